"""A table of Textual's whose Enter goes forward, as everywhere."""

from typing import ClassVar

from textual.binding import Binding
from textual.widgets import DataTable


class Table(DataTable):
    BINDINGS: ClassVar = [Binding("enter", "app.forward", show=False)]
