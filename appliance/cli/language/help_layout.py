"""How `--help` is laid out: plain lines for any terminal, made for consoles of 80 columns.

typer's boxes give a quarter of such a console to each column and cut the names of long options off; click's own layout
counts characters, and Hangul takes two columns each. Here widths are columns of the terminal.

    --gpus [NAME=]GPU,…  GPUs of a model, by index or UUID (as installed, or
                         all).
"""

import re
from collections.abc import Sequence

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from appliance.cli.common import spoken
from installer.base.i18n import t

NAME_WIDTH = 30  # a longer name has a line of its own
GAP = 2
_BRACES = re.compile(r"\{(\S+?)\}")
_TYPE = re.compile(r" <(?:list\[)?([^<>\]]*)\]?>$")  # how typer names the type of a value that has no name
_VALUES = {
    "int": "N", "int range": "N", "float": "N", "float range": "N", "str": "TEXT", "path": "PATH", "Path": "PATH",
}  # fmt: skip


class HelpLayout(typer.Context.formatter_class):
    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """`Usage: atoll models add [OPTIONS] NAME`. typer would write `{NAME}`."""
        super().write_usage(prog, _BRACES.sub(r"\1", args), spoken(t("Usage: ")) if prefix is None else prefix)

    def write_text(self, text: str) -> None:
        """Paragraphs. One that has lines of its own (commands to type) keeps them."""
        indent = " " * self.current_indent
        paragraphs = []
        for paragraph in text.strip().split("\n\n"):
            lines = paragraph.split("\n")
            if len(lines) == 1:
                lines = self._wrapped(paragraph, self.width - self.current_indent)
            paragraphs.append("".join(f"{indent}{line}".rstrip() + "\n" for line in lines))
        self.write("\n".join(paragraphs))

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = NAME_WIDTH, col_spacing: int = GAP) -> None:
        """Names, and beside each its description."""
        rows = [(self._with_value(name), text) for name, text in rows]
        widths = [cell_len(name) for name, _ in rows]
        column = max([width for width in widths if width <= col_max], default=0) + col_spacing
        indent, beside = " " * self.current_indent, " " * (self.current_indent + column)
        for (name, text), width in zip(rows, widths, strict=True):
            lines = self._wrapped(" ".join(text.split()), self.width - len(beside))
            if width + col_spacing <= column and lines:
                self.write(f"{indent}{name}{' ' * (column - width)}{lines.pop(0)}\n")
            else:
                self.write(f"{indent}{name}\n")
            self.write("".join(f"{beside}{line}\n" for line in lines))

    @staticmethod
    def _with_value(name: str) -> str:
        """`--port <int range>` as `--port N`, `MODEL <path>` as `MODEL`."""
        found = _TYPE.search(name)
        if found is None:
            return name
        value = _VALUES.get(found[1], found[1]) if name.startswith("-") else ""
        return f"{name[:found.start()]} {value}".rstrip()

    @staticmethod
    def _wrapped(text: str, width: int) -> list[str]:
        console = Console(width=max(width, 10))
        return [line.plain.rstrip() for line in Text(text).wrap(console, console.width, overflow="fold")]
