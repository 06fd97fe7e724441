"""`atoll logs`: the service's log."""

import sys
from typing import Annotated

import typer

from appliance.cli.common import Prefix, examples, layout_for, say, told
from installer.base.i18n import t
from installer.support import logs as source

_HELP = """Show the service's log: journald's on a server, the log file below a prefix.

Lines are formatted for reading; --raw shows them as they were written. They contain no prompts, answers or keys.
"""


def register(app: typer.Typer) -> None:
    """Add the command to the `atoll` command tree."""
    lines = ("atoll logs", "atoll logs -f --unit gateway", "atoll logs --unit engine@chat --since '1 hour ago' -n 1000")
    app.command(name="logs", help=_HELP, epilog=examples(*lines))(command)


def command(
    prefix: Prefix = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Number of lines from the end.")] = 100,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Continue as lines are written.")] = False,
    unit: Annotated[
        list[str] | None,
        typer.Option("--unit", "-u", metavar="UNIT", show_default=False,
                     help="gateway, engine, engine@NAME, gpu-ready, verify; repeatable."),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Start time: '1 hour ago', '2026-01-31 14:00'.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Print each line as the service wrote it.")] = False,
) -> None:
    with told(False):
        layout = layout_for(prefix)
        if layout.system and not source.may_read_all():
            say(t("Only root and the groups systemd-journal and adm see all lines: sudo atoll logs"), err=True)
        read = source.follow if follow else source.read
        try:
            for line in read(layout, lines=lines, wanted=unit or (), since=since):
                typer.echo(source.printable(line.text) if raw else line.readable())
        except BrokenPipeError:
            sys.stdout = None  # type: ignore[assignment]  # a reader that left is not an error
