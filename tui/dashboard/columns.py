"""Cells in columns, as many of them as fit."""

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

GAP = 2


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, most_rows: int) -> Text:
    """A bold line of heads and at most `most_rows` lines; columns that do not fit are left out from the end."""
    table = [heads, *rows[:most_rows]]
    widths = [max(cell_len(row[number]) for row in table) for number in range(len(heads))]
    fitting, used = 0, 0
    for size in widths:
        if used + size > width:
            break
        fitting, used = fitting + 1, used + size + GAP
    text = Text(no_wrap=True, end="")
    for number, row in enumerate(table):
        line = (" " * GAP).join(set_cell_size(cell, size) for cell, size in zip(row[:fitting], widths, strict=False))
        text.append(("\n" if number else "") + line.rstrip(), "bold" if number == 0 else "")
    if len(rows) > most_rows:
        text.append(f"\n+ {len(rows) - most_rows}", "dim")
    return text
