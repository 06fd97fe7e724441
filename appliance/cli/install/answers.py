"""`atoll answers validate|template|schema`: check the answers file on any machine, before it goes to the server."""

from pathlib import Path
from typing import Annotated

import typer

from appliance.cli.common import Json, examples, print_json, say, told
from appliance.cli.language.commands import Commands
from installer.base.i18n import t
from installer.decide.answers import TEMPLATE, read_answers
from installer.decide.answers import schema as json_schema

app = Commands(help="Check or create an answers file for an unattended install.", no_args_is_help=True)


@app.command(epilog=examples("atoll answers validate answers.toml", "atoll answers validate answers.toml --json"))
def validate(file: Annotated[Path, typer.Argument(metavar="FILE")], as_json: Json = False) -> None:
    """Check a file against the schema. It needs no server and no medium; exit code 2 names what is wrong."""
    with told(as_json):
        answers = read_answers(file)
    if as_json:
        print_json({"valid": True, "answers": answers.model_dump(mode="json", exclude_unset=True)})
    else:
        say(t("{file} is a valid answers file.", file=file))


@app.command(epilog=examples("atoll answers template > answers.toml"))
def template() -> None:
    """Print a commented answers file as a start for your own."""
    typer.echo(TEMPLATE, nl=False)


@app.command(epilog=examples("atoll answers schema > answers.schema.json"))
def schema() -> None:
    """Print the JSON Schema of the answers, for editors and other tools."""
    print_json(json_schema())
