"""argparse whose `--help` a front end may tell in another language (`retelling` in engine/errors.py).

Every text is told when it is added. Lines are broken by the cells that they take on a terminal: Hangul takes two.
"""

import argparse
import re
import unicodedata
from functools import partial
from typing import Any

from engine.errors import front_end_flags, told

WIDTH = 110
_FLAGS_WIDTH = 34  # left column

# An indented line is to be typed; what explains it stands after a gap.
_EXAMPLE = re.compile(r"(?P<typed>\s+\S.*?)(?:(?P<gap>\s{2,})(?P<words>\S.*))?")
_FILE = re.compile(r"\S+\.\w+:")


class HelpParser(argparse.ArgumentParser):
    def __init__(self, *, description: str, epilog: str = "", **settings: Any) -> None:
        """`epilog`: lines of words, and indented ones to type."""
        super().__init__(
            description=wrapped(told(description), WIDTH), epilog="\n".join(map(_told_line, epilog.split("\n"))),
            formatter_class=partial(argparse.RawTextHelpFormatter, max_help_position=_FLAGS_WIDTH, width=WIDTH),
            add_help=False, **settings,
        )

    def add_help_flags(self) -> None:
        """-h, and the flags that the front end has taken from the command line already. Call it last."""
        group = self.add_argument_group(told("help"))
        group.add_argument("-h", "--help", action="help", help=help_text("show this text"))
        for name, metavar, text in front_end_flags():
            group.add_argument(name, metavar=metavar, help=help_text(text), dest=argparse.SUPPRESS)


def help_text(text: str) -> str:
    """A flag's help, as `add_argument` wants it."""
    return wrapped(told(text), WIDTH - _FLAGS_WIDTH).replace("%", "%%")


def wrapped(text: str, width: int) -> str:
    """Lines of at most `width` cells, broken between words; a longer word has a line of its own."""
    lines: list[str] = []
    for word in text.split():
        if lines and _cells(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "\n".join(lines)


def _cells(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def _told_line(line: str) -> str:
    if not line.strip() or _FILE.fullmatch(line):
        return line
    example = _EXAMPLE.fullmatch(line)
    if example is None:
        return told(line)
    return example["typed"] + (example["gap"] + told(example["words"]) if example["words"] else "")
