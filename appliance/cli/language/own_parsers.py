"""`--help` of the commands that bring an argparse parser of their own, in another language.

Rooms below this one do not know the catalogue, so their parsers are changed at the last moment: when one is about to
print its help, its words are looked up, and lines are broken by the cells that they take on a terminal (Hangul: two).
"""

import argparse
import contextlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len

from appliance.cli.language.help_texts import LANGUAGE_HELP

# An indented line is to be typed; what explains it stands after a gap.
_EXAMPLE = re.compile(r"(?P<typed>\s+\S.*?)(?:(?P<gap>\s{2,})(?P<words>\S.*))?")
_FILE = re.compile(r"\S+\.\w+:")


@contextlib.contextmanager
def helping(change: Callable[[str], str]) -> Iterator[None]:
    """For the duration of the block, every parser's help says what `change` makes of its words."""
    shape = argparse.HelpFormatter
    methods = [(argparse.ArgumentParser, "format_help"), (shape, "_split_lines"), (shape, "_fill_text")]
    before = [getattr(owner, name) for owner, name in methods]
    format_help = before[0]

    def said(parser: argparse.ArgumentParser) -> str:
        _each(parser, change)
        return format_help(parser)

    def split(_: Any, text: str, width: int) -> list[str]:
        return wrapped(text, width)

    def fill(_: Any, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in wrapped(text, width - len(indent)))

    try:
        for (owner, name), method in zip(methods, (said, split, fill), strict=True):
            setattr(owner, name, method)
        yield
    finally:
        for (owner, name), method in zip(methods, before, strict=True):
            setattr(owner, name, method)


def paragraphs(run: Callable[[Sequence[str]], Any]) -> set[str]:
    """All the words of a command's help, for the catalogue."""
    found = {"usage: "}

    def note(text: str) -> str:
        found.add(text)
        return text

    with helping(note), contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        run(["--help"])
    return found


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells, broken between words; a longer word has a line of its own."""
    lines: list[str] = []
    for word in text.split():
        if lines and cell_len(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _each(parser: argparse.ArgumentParser, change: Callable[[str], str]) -> None:
    groups = parser._action_groups
    groups[-1].add_argument("--lang", metavar="[ko|en]", help=LANGUAGE_HELP)  # taken before the parser sees it
    for group in groups:
        if group.title and any(action.help is not argparse.SUPPRESS for action in group._group_actions):
            group.title = change(group.title)
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            action.help = change(action.help)
    if parser.description:
        parser.description = change(" ".join(parser.description.split()))
    if parser.epilog:
        parser.epilog = "\n".join(_line(line, change) for line in parser.epilog.split("\n"))


def _line(line: str, change: Callable[[str], str]) -> str:
    if not line.strip() or _FILE.fullmatch(line):
        return line
    example = _EXAMPLE.fullmatch(line)
    if example is None:
        return change(line)
    return example["typed"] + (example["gap"] + change(example["words"]) if example["words"] else "")
