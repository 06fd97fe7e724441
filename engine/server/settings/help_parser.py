"""argparse whose `--help` a front end may translate (`retelling` in engine/errors.py).

Every text is translated when it is added. Lines are broken by terminal cells, because a Hangul syllable takes two.
"""

import argparse
import re
import shutil
import unicodedata
from functools import partial
from typing import Any

from engine.errors import front_end_flags, told

_WIDEST = 110      # columns; longer lines are hard to read
_FLAGS_WIDTH = 32  # left column

# An indented line shows what to type; its explanation follows after a gap.
_EXAMPLE = re.compile(r"(?P<typed>\s+\S.*?)(?:(?P<gap>\s{2,})(?P<words>\S.*))?")
_FILE = re.compile(r"\S+\.\w+:")


class HelpParser(argparse.ArgumentParser):
    def __init__(self, *, description: str, epilog: str = "", **settings: Any) -> None:
        """`epilog`: lines of text, and indented lines that show what to type."""
        width = line_width()
        super().__init__(
            description=wrapped(told(description), width),
            epilog="\n".join(_told_line(line, width) for line in epilog.split("\n")),
            formatter_class=partial(argparse.RawTextHelpFormatter, max_help_position=_FLAGS_WIDTH, width=width),
            add_help=False, **settings,
        )

    def add_help_flags(self) -> None:
        """Add -h, and list the flags that the front end has already taken from the command line. Call it last."""
        group = self.add_argument_group(told("help"))
        group.add_argument("-h", "--help", action="help", help=help_text("show this text"))
        for name, metavar, text in front_end_flags():
            group.add_argument(name, metavar=metavar, help=help_text(text), dest=argparse.SUPPRESS)


def line_width() -> int:
    """Columns of a line, on this terminal. Consoles of servers have 80."""
    return max(min(shutil.get_terminal_size().columns - 2, _WIDEST), _FLAGS_WIDTH + 30)


def help_text(text: str) -> str:
    """A flag's help, in the form that `add_argument` expects."""
    return wrapped(told(text), line_width() - _FLAGS_WIDTH).replace("%", "%%")


def wrapped(text: str, width: int) -> str:
    """Lines of at most `width` cells, broken between words; a longer word gets its own line."""
    lines: list[str] = []
    for word in text.split():
        if lines and _cells(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "\n".join(lines)


def _cells(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def _told_line(line: str, width: int) -> str:
    if not line.strip() or _FILE.fullmatch(line):
        return line
    example = _EXAMPLE.fullmatch(line)
    if example is None:
        return wrapped(told(line), width)
    return example["typed"] + (example["gap"] + told(example["words"]) if example["words"] else "")
