"""What the operator's terminal can show, by its name. It imports no screens, so it can be asked before they load."""

import os
import sys

from appliance.service.words import t

_WITHOUT_CURSOR = ("", "dumb", "unknown")
_WITHOUT_COLOURS = ("vt1", "vt2", "vt3", "vt4")   # as DEC's terminals were; a serial console is often one of them


def why_not(command: str) -> str:
    """Why there can be no screens here, and which command does without them. A Text; empty where they can be shown."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return t("The screens need a terminal, and there is none here: input or output is a file or a pipe. "
                 "Use the command line: {command}", command=command)  # fmt: skip
    term = os.environ.get("TERM", "")
    if term in _WITHOUT_CURSOR:
        return t("The screens need a terminal that can move its cursor (TERM is '{term}'). Use the command line: "
                 "{command}", term=term, command=command)  # fmt: skip
    return ""


def is_plain() -> bool:
    """Consoles and serial lines: ASCII and at most 16 colours."""
    locale = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := os.environ.get(name))), "")
    term = os.environ.get("TERM", "")
    utf8 = "utf-8" in locale.lower() or "utf8" in locale.lower()
    return term == "linux" or term.startswith(("vt", "ansi")) or not utf8


def has_colours() -> bool:
    return not os.environ.get("TERM", "").startswith(_WITHOUT_COLOURS)
