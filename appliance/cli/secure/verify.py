"""`atoll verify`: the deep check of what is installed."""

from typing import Annotated

import typer
from rich.cells import cell_len

from appliance.cli.common import Json, Prefix, examples, layout_for, padded, print_json, say, spoken, told
from appliance.cli.view.byte_progress import byte_progress
from appliance.service.words import human_bytes
from installer.base.i18n import joined, t
from installer.base.layout import Layout
from installer.operate.deep_verify.report import Report, Target
from installer.operate.deep_verify.run import rebuild, verify

_HELP = """Read every byte of the installed models and code again and compare it with what was signed.

Changes nothing, and disturbs a running service only by reading. Bytecode is compiled again from the verified sources
and compared; --rebuild-bytecode replaces what differs. `atoll status` shows the result. If it is interrupted, the same
command continues after the models that it had finished.
"""
_EXIT_CODES = (
    "Exit codes: 0 all is as signed, 10 signature missing or not trusted, 11 content differs, 12 older than allowed, "
    "13 something is missing, 30 cannot be read, 75 another check is running, 130 interrupted."
)
_KINDS = {"release": t("release"), "code": t("code"), "model": t("model")}
_LABELS = {"verify": t("Reading and comparing"), "code": t("Comparing the code")}


def register(app: typer.Typer) -> None:
    """Add the command to the `atoll` command tree."""
    lines = ("atoll verify", "atoll verify --gentle --json")
    app.command(name="verify", help=_HELP, epilog=examples(*lines, then=_EXIT_CODES))(command)


def command(
    prefix: Prefix = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also read again what an interrupted check had finished.")
    ] = False,
    gentle: Annotated[
        bool, typer.Option("--gentle", help="Use disk and processor only when nothing else needs them.")
    ] = False,
    rebuild_bytecode: Annotated[
        bool, typer.Option("--rebuild-bytecode", help="First rebuild bytecode that differs, from verified sources.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress, only the result.")] = False,
    as_json: Json = False,
) -> None:
    with told(as_json):
        if gentle:
            _be_gentle()
        if rebuild_bytecode:
            _rebuild(layout_for(prefix), silent=as_json)
        with byte_progress(_LABELS, quiet=as_json or quiet) as progress:
            said = _quietly if as_json else _say
            report = verify(layout_for(prefix), progress=progress, said=said, everything=everything)
    if as_json:
        print_json(report.to_json())
    else:
        _sum_up(report)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def _rebuild(layout: Layout, *, silent: bool) -> None:
    for name, count in rebuild(layout).items():
        if not silent:
            say(t("{name}: {count} files of bytecode were rebuilt.", name=name, count=count))


def _quietly(target: Target) -> None:
    return


def _say(target: Target) -> None:
    word = spoken(t("FAIL") if target.exit_code else t("kept") if target.kept else t("ok"))
    parts = [f"{padded(_KINDS[target.kind], 8)} {target.name}", target.digest[:12]]
    if target.kept:
        parts.append(spoken(t("found good at {at}", at=target.at)))
    elif target.bytes:
        parts.append(spoken(t("{size} in {seconds:.1f} s", size=human_bytes(target.bytes), seconds=target.seconds)))
    typer.echo(f"{' ' * (6 - cell_len(word))}{word}  {'  '.join(part for part in parts if part)}")
    for line in (target.error, target.note, target.hint):
        if line:
            typer.echo(f"        {spoken(line)}")


def _sum_up(report: Report) -> None:
    done = t("{size} in {seconds:.1f} s", size=human_bytes(report.bytes), seconds=report.seconds)
    if report.seconds > 1:
        done = joined([done, f"{human_bytes(int(report.bytes / report.seconds))}/s"])
    if report.exit_code:
        say(t("NOT as it was signed ({done}); exit code {exit_code}.", done=done, exit_code=report.exit_code))
    else:
        say(t("All is as it was signed ({done}).", done=done))
    if not report.recorded:
        say(t("The result was not recorded: only the installation's owner can do that (sudo)."))


def _be_gentle() -> None:
    """The lowest priority for processor and disk. A machine without such priorities continues normally."""
    import contextlib
    import os

    import psutil

    os.nice(19)
    with contextlib.suppress(OSError, psutil.Error, AttributeError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


