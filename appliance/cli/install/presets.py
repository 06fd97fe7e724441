"""`atoll presets`: tested starting points for a model, a GPU and a use; every value with its reason."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.cli.common import Json, examples, print_json, say, say_rows, told
from appliance.cli.language.commands import Commands
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, language_of, t

if TYPE_CHECKING:
    from appliance.service.presets.resolve import Preset

Gpu = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="The GPU: h100, L40S, 80GB, … (default: this machine's)."),
]

app = Commands(
    help="List starting points for a model, a GPU and a use, and explain each value.",
    epilog=examples("atoll presets --gpu h100", "atoll presets show gemma4-31b/chat --gpu h100",
                    "atoll presets show qwen3.6-27b/white-paper --json"),
)  # fmt: skip


@app.callback(invoke_without_command=True)
def _list(ctx: typer.Context, gpu: Gpu = None, as_json: Json = False) -> None:
    if ctx.invoked_subcommand is not None:
        return
    from appliance.service.planning import model_and_gpu
    from appliance.service.presets import resolve

    with told(as_json):
        card = model_and_gpu.card(gpu)
        rows: list[dict[str, Any]] = [{"name": name} for name in resolve.names()]
        for row in rows if card else ():
            try:
                found = resolve.find(row["name"], card)
                row |= {"fits": True, "context": found.planned.context, "users": found.planned.users,
                        "command": found.command}  # fmt: skip
            except InstallError as error:
                if error.exit_code != ExitCode.PREFLIGHT_FAIL:
                    raise
                row |= {"fits": False, "message": error.message, "hint": error.hint}
        if as_json:
            print_json({"gpu": card.name if card else None, "presets": rows})
            return
        say_rows([(row["name"], _line(row)) for row in rows])
        if card is None:
            say()
            say(t("Name a GPU to see what fits: atoll presets --gpu h100"))


@app.command(
    epilog=examples("atoll presets show gemma4-31b/chat --gpu h100", "atoll presets show qwen3.6-27b/white-paper"),
)
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="MODEL/USE, as listed by `atoll presets`.")],
    gpu: Gpu = None,
    as_json: Json = False,
) -> None:
    """Show a preset: its flags with reasons and sources, sampling defaults, users and speed.

    Exit code 3: it does not fit on this GPU; the nearest that does is named.
    """
    from appliance.service.planning import model_and_gpu
    from appliance.service.presets import resolve

    with told(as_json):
        verbatim = gpu is None and name.endswith(f"/{resolve.WHITE_PAPER}")
        found = resolve.find(name, None if verbatim else model_and_gpu.card(gpu))
        if as_json:
            print_json(found.to_json())
        else:
            _print(found)


def _line(row: dict[str, Any]) -> str:
    if "fits" not in row:
        return ""
    if not row["fits"]:
        return joined([row["message"], row["hint"]], " ")
    return t("{users} × {context} tokens at once", users=f"{row['users']:,}", context=f"{row['context']:,}")


def _print(found: "Preset") -> None:
    language, sampling, speed = language_of(), found.sampling, found.speed
    users, context = f"{found.planned.users:,}", f"{found.planned.context:,}"
    fits = t("{users} × {context} tokens at once", users=users, context=context)
    say(t("{name} on {gpu}: {fits}", name=found.name, gpu=found.card.title, fits=fits))
    say()
    typer.echo(f"  {found.command}")
    say()
    for choice in found.choices:
        value = f" {choice.value}" if choice.value is not None else ""
        typer.echo(f"  {choice.flag}{value}")
        typer.echo(f"      {choice.reason.in_language(language)} [{choice.reason.source}]")
    values = f"temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}"
    say()
    say_rows([
        (t("sampling"), f"{values} [{sampling.source}]"), ("", sampling.why.in_language(language)),
        (t("licence"), found.licence), (t("revision"), found.model.revision or t("not recorded")),
        (t("chat template"), f"sha256:{found.model.template}" if found.model.template else t("not recorded")),
        *[(t("speed"), text) for text in _speed(speed)],
    ], indent=2)  # fmt: skip


def _speed(speed: Any) -> Sequence[str]:
    if speed.single is None:
        return []
    if not speed.measured:
        return [t("one stream: at most {rate} tokens/s (estimate: {source})", rate=f"{speed.single:,.0f}",
                  source=speed.source)]  # fmt: skip
    lines = [t("one stream: {rate} tokens/s (measured: {source})", rate=f"{speed.single:,.0f}", source=speed.source)]
    if speed.many is not None:
        lines.append(t("64 requests: {rate} tokens/s (measured: {source})", rate=f"{speed.many:,.0f}",
                       source=speed.source))  # fmt: skip
    return lines
