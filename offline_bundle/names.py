"""Which paths a bundle may contain. An allow-list: what is not plainly harmless on every file system is refused.

Names are ASCII, so two names can never be equal after Unicode normalisation without being equal bytes, and no
name can carry control characters, bidi marks or another alphabet's look-alikes into a terminal.
"""

import re
from collections.abc import Iterable

from . import limits
from .errors import CONTENT, BundleError

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@,-]*\Z")
_WINDOWS_DEVICES = frozenset(
    ["con", "prn", "aux", "nul", *(f"com{i}" for i in range(10)), *(f"lpt{i}" for i in range(10))]
)
_DESKTOP_LITTER = (".ds_store", "thumbs.db", "desktop.ini", "._", ".spotlight", ".trash", ".fseventsd")


def show(path: str) -> str:
    """`path` made safe and short for a message: control and non-ASCII characters escaped."""
    text = ascii(path)[1:-1]
    return text if len(text) <= 160 else f"{text[:120]}…{text[-30:]}"


def problem(path: str) -> str | None:
    """Why `path` (relative, '/'-separated) is not allowed in a bundle, or None if it is."""
    if not path:
        return "is empty"
    if len(path.encode("utf-8", "surrogatepass")) > limits.MAX_PATH:
        return f"is longer than {limits.MAX_PATH} bytes"
    if path.startswith("/"):
        return "is absolute"
    if "\\" in path:
        return "contains a backslash"
    parts = path.split("/")
    if len(parts) > limits.MAX_DEPTH:
        return f"is nested deeper than {limits.MAX_DEPTH} levels"
    for part in parts:
        if part in ("", ".", ".."):
            return "contains an empty, '.' or '..' step"
        if part.lower().startswith(".git"):
            return "is git data, which the signature format does not cover"
        if len(part) > limits.MAX_NAME:
            return f"has a part longer than {limits.MAX_NAME} characters"
        if not _COMPONENT.match(part):
            return "uses characters outside A-Z a-z 0-9 . _ + = @ , - or starts with '.' or '-'"
        if part.endswith("."):
            return "has a part that ends with '.'"
        if part.split(".")[0].lower() in _WINDOWS_DEVICES:
            return "is a reserved device name on some systems"
    return None


def check(path: str) -> str:
    """Return `path`, or raise BundleError (content) when `problem` finds one."""
    if (why := problem(path)) is not None:
        raise BundleError(f"The path '{show(path)}' {why}.", litter_hint(path), CONTENT)
    return path


def collision(paths: Iterable[str]) -> tuple[str, str] | None:
    """Two of `paths` that some file system would take for one, or where one is a directory of the other."""
    spelled: dict[str, tuple[str, bool]] = {}  # case-folded file or directory → (as first written, is a file)
    for path in paths:
        steps = path.split("/")
        for depth in range(1, len(steps) + 1):
            here, is_file = "/".join(steps[:depth]), depth == len(steps)
            first = spelled.get(here.casefold())
            if first is None:
                spelled[here.casefold()] = (here, is_file)
            elif is_file or first != (here, False):
                return first[0], path
    return None


def litter_hint(path: str) -> str:
    """Advice for files that desktops drop onto media unasked."""
    name = path.rsplit("/", 1)[-1].lower()
    if name.startswith(_DESKTOP_LITTER):
        return "A desktop file manager left it there: delete it and try again."
    return "Remove it, or copy the bundle again from its source."
