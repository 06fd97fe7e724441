"""A line over time in a few rows of a terminal: dots of braille, or stars where only ASCII can be drawn.

textual-plotext draws its axes with box characters in every mode, which a console or a serial line may not have.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual.app import RenderResult
from textual.reactive import reactive
from textual.widget import Widget

from tui.frame.front import Told

Points = tuple[tuple[float, float], ...]
_LEVELS = "_.:-=+*#"   # of a sparkline in ASCII
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))   # of a braille sign: row, column


class Plot(Told, Widget):
    """`points` are (x, y), by rising x. `target`: a level that is drawn across; what lies above it is `bad`."""

    points: reactive[Points] = reactive(())
    ends: reactive[tuple[str, str]] = reactive(("", ""))   # Texts below the first and the last point, for their x
    target: reactive[float | None] = reactive(None)
    title = reactive("")      # a Text: what, in which unit
    x_unit = reactive("s")
    language = reactive("en")

    AXIS: ClassVar = 7        # cells for the numbers on the left

    def render(self) -> RenderResult:
        width, height = self.size.width - self.AXIS - 1, self.size.height - 2
        if len(self.points) < 2 or width < 8 or height < 2:
            return Text(self.say(self.title))
        top = nice(max([y for _, y in self.points] + ([self.target] if self.target else [])))
        rows = (ascii_rows if self.front.plain else braille_rows)(self.points, width, height, top)
        level = None if self.target is None else height - 1 - min(height - 1, int(self.target / top * height))
        text = Text(self.say(self.title), "bold", no_wrap=True, end="")
        for number, row in enumerate(rows):
            label = _number(top) if number == 0 else _number(self.target) if number == level else ""
            text.append("\n").append(f"{label:>{self.AXIS - 1}} ", "yellow" if number == level else "dim")
            text.append("|", "dim")
            fill = "-" if number == level else " "
            for cell in row:
                text.append(fill if cell in (" ", "\u2800") else cell,
                            "yellow" if cell in (" ", "\u2800") else "cyan")  # fmt: skip
        left, right = (self.say(end) for end in self.ends)
        left = left or _number(self.points[0][0])
        right = right or f"{_number(self.points[-1][0])} {self.x_unit}".rstrip()
        gap = max(1, width - cell_len(right) - cell_len(left))
        text.append("\n").append(f"{'0':>{self.AXIS - 1}} ", "dim")
        return text.append(f" {left}{' ' * gap}{right}", "dim")


def nice(most: float) -> float:
    """The next round number above: 1, 2, 2.5 or 5 times a power of ten."""
    if most <= 0:
        return 1.0
    power = 1.0
    while power * 10 <= most:
        power *= 10
    while power > most:
        power /= 10
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= most)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _columns(points: Sequence[tuple[float, float]], count: int) -> list[float | None]:
    """The highest y in each of `count` equal slots of x; straight lines cross the empty slots."""
    first, last = points[0][0], points[-1][0]
    highest: dict[int, float] = {}
    for x, y in points:
        at = min(count - 1, int((x - first) / ((last - first) or 1) * count))
        highest[at] = max(highest.get(at, y), y)
    slots: list[float | None] = [None] * count
    known = sorted(highest)
    for at, to in pairwise(known):
        for slot in range(at, to):
            slots[slot] = highest[at] + (highest[to] - highest[at]) * (slot - at) / (to - at)
    if known:
        slots[known[-1]:] = [highest[known[-1]]] * (count - known[-1])
    return slots


def braille_rows(points: Sequence[tuple[float, float]], width: int, height: int, top: float) -> list[str]:
    grid = [[0] * width for _ in range(height)]
    before: int | None = None
    for x, value in enumerate(_columns(points, width * 2)):
        if value is None:
            continue
        y = height * 4 - 1 - min(height * 4 - 1, round(max(0.0, value) / top * (height * 4 - 1)))
        start = y if before is None or before == y else before + (1 if y > before else -1)
        for dot in range(min(start, y), max(start, y) + 1):  # a steep part is one line, too
            grid[dot // 4][x // 2] |= _DOTS[dot % 4][x % 2]
        before = y
    return ["".join(chr(0x2800 + cell) for cell in row) for row in grid]


def ascii_rows(points: Sequence[tuple[float, float]], width: int, height: int, top: float) -> list[str]:
    grid = [[" "] * width for _ in range(height)]
    for x, value in enumerate(_columns(points, width)):
        if value is not None:
            grid[height - 1 - min(height - 1, round(max(0.0, value) / top * (height - 1)))][x] = "*"
    return ["".join(row) for row in grid]


def spark(points: Sequence[tuple[float, float]], width: int, *, plain: bool) -> str:
    """A line of one row: the values from 0 to the highest."""
    if len(points) < 2 or width < 2:
        return ""
    top = max(y for _, y in points) or 1.0
    if not plain:
        return braille_rows(points, width, 1, top)[0]
    least = len(_LEVELS) - 1
    return "".join(_LEVELS[round(max(0.0, value or 0.0) / top * least)] for value in _columns(points, width))
