"""`atoll bench`: put realistic load on an OpenAI endpoint, and compare the results."""

from pathlib import Path
from typing import Annotated

import typer

from appliance.cli.bench import quality, serve
from appliance.cli.bench.view import print_comparison
from appliance.cli.common import Json, examples, print_json, say_rows, told
from appliance.cli.language.commands import Commands
from installer.base.i18n import language_of

app = Commands(
    help="Measure an OpenAI endpoint under load like real traffic, and compare results.", no_args_is_help=True,
    epilog=examples("atoll bench serve --profile chat", "atoll bench compare before.json after.json"),
)  # fmt: skip
serve.register(app)
quality.register(app)


@app.command(epilog=examples("atoll bench compare before.json after.json", "atoll bench compare vllm.json atoll.json"))
def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="A saved result, of Atoll or of vLLM.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The result to compare with it.")],
    as_json: Json = False,
) -> None:
    """Compare two saved results: what got better, what got worse, and whether they are comparable."""
    from appliance.load.compare import compare as rows_of
    from appliance.load.compare import differences
    from appliance.load.result import read_result

    with told(as_json):
        one, two = read_result(before), read_result(after)
        rows, notes = rows_of(one, two), differences(one, two)
        if as_json:
            print_json({
                "before": str(before), "after": str(after), "notes": [str(note) for note in notes],
                "rows": [{"name": row.name, "before": row.before, "after": row.after, "change": row.change,
                          "better": row.better} for row in rows],
            })  # fmt: skip
            return
        print_comparison(rows, notes, (before.name, after.name))


@app.command(epilog=examples("atoll bench profiles", "atoll bench profiles chat > my-chat.toml"))
def profiles(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this profile, as a start for your "
                                                                      "own.")] = None,
    as_json: Json = False,
) -> None:
    """List the built-in traffic profiles, or print one as a file. A file of your own is checked."""
    from appliance.load.profile import BUILT_IN, built_in, find_profile, text_of

    with told(as_json):
        if name is not None:
            profile = find_profile(name)
            if as_json:
                print_json(profile.model_dump(mode="json", exclude_none=True))
            else:
                typer.echo(text_of(profile), nl=False)
            return
        known = [built_in(each) for each in BUILT_IN]
        if as_json:
            print_json({"profiles": [profile.model_dump(mode="json", exclude_none=True) for profile in known]})
            return
        korean = language_of() == "ko"
        say_rows([(each.name, (each.title.ko if korean else each.title.en) if each.title else "") for each in known])
