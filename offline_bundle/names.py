"""Which paths a bundle may contain: an allow-list of names that are harmless on every file system.

Names are ASCII, so two different names never become equal after Unicode normalisation, and no name can carry control
characters, bidi marks or another alphabet's look-alikes into a terminal. A part of install.sh.
"""

import re
from collections.abc import Iterable

from offline_bundle.errors import CONTENT, BundleError
from offline_bundle.limits import MAX_DEPTH, MAX_NAME, MAX_PATH
from offline_bundle.text import Text, t

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@,-]*\Z")
_WINDOWS_DEVICES = frozenset(
    ["con", "prn", "aux", "nul", *(f"com{i}" for i in range(10)), *(f"lpt{i}" for i in range(10))]
)
_DESKTOP_LITTER = (".ds_store", "thumbs.db", "desktop.ini", "._", ".spotlight", ".trash", ".fseventsd")


def show(path: str) -> str:
    """`path` made safe and short for a message: control and non-ASCII characters are escaped.

    In a sentence of our own only the values are escaped, because they may come from a medium.
    """
    if isinstance(path, Text):
        return path.with_values(lambda value: show(value) if isinstance(value, str) else value)
    text = ascii(path)[1:-1]
    return text if len(text) <= 160 else f"{text[:120]}…{text[-30:]}"


def path_problem(path: str) -> str | None:
    """Why `path` (relative, '/'-separated) is not allowed in a bundle, or None if it is."""
    if not path:
        return t("is empty")
    if len(path.encode("utf-8", "surrogatepass")) > MAX_PATH:
        return t("is longer than {most} bytes", most=MAX_PATH)
    if path.startswith("/"):
        return t("is absolute")
    if "\\" in path:
        return t("contains a backslash")
    parts = path.split("/")
    if len(parts) > MAX_DEPTH:
        return t("is nested deeper than {most} levels", most=MAX_DEPTH)
    for part in parts:
        if part in ("", ".", ".."):
            return t("contains an empty, '.' or '..' step")
        if part.lower().startswith(".git"):
            return t("is git data, which the signature format does not cover")
        if len(part) > MAX_NAME:
            return t("has a part longer than {most} characters", most=MAX_NAME)
        if not _COMPONENT.match(part):
            return t("uses characters outside A-Z a-z 0-9 . _ + = @ , - or starts with '.' or '-'")
        if part.endswith("."):
            return t("has a part that ends with '.'")
        if part.split(".")[0].lower() in _WINDOWS_DEVICES:
            return t("is a reserved device name on some systems")
    return None


def check_path(path: str) -> str:
    """Return `path`, or raise BundleError (content) when `path_problem` finds one."""
    if (why := path_problem(path)) is not None:
        raise BundleError(t("The path '{path}' {why}.", path=show(path), why=why), litter_hint(path), CONTENT)
    return path


def collision(paths: Iterable[str]) -> tuple[str, str] | None:
    """Two of `paths` that some file system would treat as one, or of which one is a directory of the other."""
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
    """What to do about an unexpected file: desktops leave some on every disk that they mount."""
    name = path.rsplit("/", 1)[-1].lower()
    if name.startswith(_DESKTOP_LITTER):
        return t("A desktop file manager left it there: delete it and try again.")
    return t("Remove it, or copy the bundle again from its source.")
