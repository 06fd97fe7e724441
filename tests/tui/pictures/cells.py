"""A screen of the program as rows of cells: what stands in each, and its colours."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.color import Color, blend_rgb
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.app import App

from tui.look import DARK_COLOURS


class Look(NamedTuple):
    ink: str
    paper: str
    bold: bool = False
    underlined: bool = False


class Cell(NamedTuple):
    """One character, which is one cell wide or two."""

    text: str
    width: int
    look: Look


Row = list[Cell]

_HERE = str(Path(__file__).resolve().parents[3])
# What differs between two machines or two runs and must not stand in a picture, as pairs of equal width.
_PLACES = {f"/tmp/{root}/{real}": shown for root in "EK" for real, shown in
           (("srv", "/srv/atoll"), ("usb", "/media/usb"), ("kim", "/home/user"))}  # fmt: skip
# The same where the end of a line has cut them off.
_CUT = ((r"(?<=from )/tmp/[EK]/(?=…)", "/media/"), (r"/tmp/[EK]/(?=…)", "/srv/at"), (r"/tmp/[EK](?=…)", "/srv/a"))
_SECRET = re.compile(r"(?<=sk-)[\w-]{8,}")
# Glyphs of plots and bars: how high they are depends on the run.
_PLOTTED = re.compile("[\u2500-\u259f\u2800-\u28ff]+")
_CHANGING = re.compile(r"\b[0-9a-f]{8,}\b|\d[\d.,:]*")


def cells(app: App[Any]) -> list[Row]:
    width, height = app.size
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, color_system="truecolor",
                      record=True, legacy_windows=False, safe_box=False)  # fmt: skip
    console.print(app.screen._compositor.render_update(full=True, screen_stack=app._background_screens))
    lines = Segment.split_and_crop_lines(Segment.filter_control(console._record_buffer), width)
    return [_masked([cell for segment in line for cell in _cells_of(segment)]) for line in lines][:height]


def plain(rows: list[Row]) -> str:
    return "\n".join("".join(cell.text for cell in row).rstrip() for row in rows)


def shape(text: str) -> str:
    """The text without what differs from run to run: numbers, ids, plots, and how far columns are apart."""
    without = _PLOTTED.sub("", _CHANGING.sub("0", text))
    return "\n".join(" ".join(line.split()) for line in without.splitlines() if line.strip())


def _cells_of(segment: Segment) -> Iterator[Cell]:
    look = _look(segment.style or Style())
    for character in segment.text:
        if character != "\n" and (width := cell_len(character)):
            yield Cell(character, width, look)


def _masked(row: Row) -> Row:
    text = "".join(cell.text for cell in row)
    for real, shown in _PLACES.items():
        text = text.replace(real, shown)
    for real, shown in _CUT:
        text = re.sub(real, shown, text)
    text = text.replace(_HERE, "/srv/code".ljust(len(_HERE), "."))
    text = _SECRET.sub(lambda found: "x" * len(found[0]), text)
    return [cell._replace(text=character) for cell, character in zip(row, text, strict=True)]


def _look(style: Style) -> Look:
    ink, paper = _hex(style.color, True), _hex(style.bgcolor, False)
    if style.reverse:
        ink, paper = paper, ink
    if style.dim:
        ink = blend_rgb(_rgb(ink), _rgb(paper), 0.4).hex
    return Look(ink, paper, bool(style.bold), bool(style.underline))


def _hex(color: Color | None, foreground: bool) -> str:
    return (color or Color.default()).get_truecolor(DARK_COLOURS, foreground).hex


def _rgb(text: str) -> Any:
    return Color.parse(text).get_truecolor()
