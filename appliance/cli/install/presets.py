"""`atoll presets`: tested starting points for a model, a GPU and a use; every value with its reason."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.cli.common import Json, examples, padded, print_json, say, say_rows, told
from appliance.cli.language.commands import Commands
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, language_of, t

if TYPE_CHECKING:
    from appliance.service.presets.resolve import Preset

Gpu = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="The GPU: h100, L40S, 80GB, … (default: this machine's)."),
]

_NAME, _COLUMN = 20, 12  # columns of the terminal

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
        if card is None:
            uses: dict[str, list[str]] = {}
            for row in rows:
                model, _, use = row["name"].partition("/")
                uses.setdefault(model, []).append(use)
            say_rows((model, joined(names)) for model, names in uses.items())
            say()
            say(t("Name a GPU to see what fits: atoll presets --gpu h100"))
            return
        say(t("{gpu}: requests at once × tokens of each (1K: 1,024)", gpu=card.title))
        say()
        _print_table(rows)
        say()
        for message in _reasons_of_misfits(rows):
            say(message)
        say(t("Each value and its reason: {command}", command="atoll presets show MODEL/USE"))


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


def _print_table(rows: list[dict[str, Any]]) -> None:
    """A line for each model, and a column for each use; "-" where it does not fit, or has no such preset."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        model, _, use = row["name"].partition("/")
        cells.setdefault(model, {})[use] = f"{row['users']:,} × {_tokens(row['context'])}" if row["fits"] else "-"
    uses = list(dict.fromkeys(row["name"].partition("/")[2] for row in rows))
    for name, found in {"": dict(zip(uses, uses, strict=True)), **cells}.items():
        line = "".join(padded(found.get(use, "-"), _COLUMN) for use in uses)
        typer.echo(f"{name:<{_NAME}}{line}".rstrip())


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count % 1024 == 0 else f"{count:,}"


def _reasons_of_misfits(rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with models that fit in no use, for one and the same reason."""
    reasons: dict[str, set[str]] = {}
    for row in rows:
        reasons.setdefault(row["name"].partition("/")[0], set()).add("" if row["fits"] else row["message"])
    return [reason for each in reasons.values() if len(each) == 1 for reason in each if reason]


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
