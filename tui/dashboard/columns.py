"""Cells in columns, as many of them as fit."""

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

GAP = 2
LEAST_FIRST = 12   # cells of the first column: names are cut before a column is left out


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, most_rows: int) -> Text:
    """A bold line of heads, unless there are none, and at most `most_rows` lines.

    Where there is no room for all columns, the first one is cut; if that is not enough, the last ones are left out.
    """
    table = [*([heads] if heads else []), *rows[:most_rows]]
    if not table:
        return Text()
    widths = [max(cell_len(row[number]) for row in table) for number in range(len(table[0]))]
    excess = sum(widths) + GAP * (len(widths) - 1) - width
    if excess > 0:
        widths[0] = max(min(widths[0], LEAST_FIRST), widths[0] - excess)
    fitting, used = 0, 0
    for size in widths:
        if used + size > width:
            break
        fitting, used = fitting + 1, used + size + GAP
    text = Text(no_wrap=True, end="")
    for number, row in enumerate(table):
        line = (" " * GAP).join(_fitted(cell, size) for cell, size in zip(row[:fitting], widths, strict=False))
        text.append(("\n" if number else "") + line.rstrip(), "bold" if heads and number == 0 else "")
    if len(rows) > most_rows:
        text.append(f"\n+ {len(rows) - most_rows}", "dim")
    return text


def _fitted(cell: str, size: int) -> str:
    return set_cell_size(cell, size - 1) + "~" if cell_len(cell) > size else set_cell_size(cell, size)
