"""`atoll top`: the dashboard, or one look at it for scripts and for terminals without screens."""

import sys
import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.cells import cell_len

from appliance.cli.common import Json, Prefix, examples, layout_for, print_json, say, spoken, told
from appliance.service.dashboard.snapshot import Snapshot
from appliance.service.words import t
from tui.command import open_screens
from tui.terminal import why_not

_HELP = """The running service on one screen: models, speed, waiting requests, KV cache, GPUs, and what to act on.

It shows numbers and names, never what is asked or answered. Leaving it changes nothing.
"""
_SETTLE = 2.0  # seconds between the two looks that a rate needs


def register(app: typer.Typer) -> None:
    lines = ("sudo atoll top", "sudo atoll top --once", "sudo atoll top --json | jq '.models[].tokens_out'",
             "sudo atoll top --json | jq '.active[] | select(.state == \"waiting\") | .request_id'")
    app.command(name="top", help=_HELP, epilog=examples(*lines))(command)


def command(
    prefix: Prefix = None,
    once: Annotated[bool, typer.Option("--once", help="Print one look as plain lines and end.")] = False,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII in 16 colours only.")] = False,
    as_json: Json = False,
) -> None:
    with told(as_json):
        layout = layout_for(prefix)
        if once or as_json:
            from appliance.service.dashboard.watcher import Watcher  # with what reads units and GPUs

            with Watcher(layout, _SETTLE) as watcher:
                if watcher.look().models:
                    time.sleep(_SETTLE)
                seen = watcher.look()
            if as_json:
                print_json(seen.to_json())
            else:
                _print(seen)
            return
        if said := why_not("atoll top --once"):
            say(said, err=True)
            raise typer.Exit(2)
        open_screens(layout, ascii_only=ascii_only, dashboard=True)


def _print(seen: Snapshot) -> None:
    from appliance.service.dashboard import cells
    say(cells.headline(seen))
    if seen.endpoint:
        say(t("endpoint {url}", url=seen.endpoint))
    if seen.models:
        typer.echo()
        _table(cells.MODEL_HEADS, [cells.model_cells(model) for model in seen.models])
        typer.echo()
        for model in seen.models:
            for line in cells.model_details(model):
                say(line)
        say(cells.requests_line(seen))
    if said := cells.active_line(seen):
        typer.echo()
        say(said)
        if seen.active:
            _table(cells.ACTIVE_HEADS, [cells.active_cells(active) for active in seen.active])
    if seen.gpus:
        typer.echo()
        _table(cells.GPU_HEADS, [cells.gpu_cells(gpu) for gpu in seen.gpus])
    if seen.why_not:
        say(seen.why_not)
    for alert in seen.alerts:
        say(t("ALERT: {what}", what=alert.what) if alert.severity == "error" else t("warning: {what}", what=alert.what))
        if alert.next:
            say(t("  next: {command}", command=alert.next))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell; a Hangul syllable takes two."""
    table = [[spoken(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(cell_len(row[number]) for row in table) for number in range(len(table[0]))]
    for row in table:
        cells = (cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip(), file=sys.stdout)
