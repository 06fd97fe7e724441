"""A table of Textual's whose Enter goes forward, as everywhere."""

from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual.binding import Binding
from textual.widgets import DataTable


class Table(DataTable):
    BINDINGS: ClassVar = [Binding("enter", "app.forward", show=False)]

    def fill(self, heads: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
        """Replace everything. Sets the widths of the columns itself: DataTable measures them only after it has drawn,
        and would cut the new cells to the width of their heads."""
        self.clear(columns=True)
        for at, head in enumerate(heads):
            self.add_column(head, width=max([_width(head), *(_width(row[at]) for row in rows if at < len(row))]))
        for row in rows:
            self.add_row(*row)


def _width(cell: str | Text) -> int:
    return cell.cell_len if isinstance(cell, Text) else cell_len(cell)
