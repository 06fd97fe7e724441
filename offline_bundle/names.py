"""Which paths a bundle may contain. An allow-list: what is not plainly harmless on every file system is refused.

Names are ASCII, so two names can never be equal after Unicode normalisation without being equal bytes, and no
name can carry control characters, bidi marks or another alphabet's look-alikes into a terminal.
"""

import re
from collections.abc import Iterable

from offline_bundle import limits
from offline_bundle.errors import CONTENT, BundleError
from offline_bundle.text import Text, t

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@,-]*\Z")
_WINDOWS_DEVICES = frozenset(
    ["con", "prn", "aux", "nul", *(f"com{i}" for i in range(10)), *(f"lpt{i}" for i in range(10))]
)
_DESKTOP_LITTER = (".ds_store", "thumbs.db", "desktop.ini", "._", ".spotlight", ".trash", ".fseventsd")


def show(path: str) -> str:
    """`path` made safe and short for a message: control and non-ASCII characters escaped.

    Of a sentence of ours only the values in it are: they may come from a medium.
    """
    if isinstance(path, Text):
        return path.with_values(lambda value: show(value) if isinstance(value, str) else value)
    text = ascii(path)[1:-1]
    return text if len(text) <= 160 else f"{text[:120]}…{text[-30:]}"


def problem(path: str) -> str | None:
    """Why `path` (relative, '/'-separated) is not allowed in a bundle, or None if it is."""
    if not path:
        return t("is empty")
    if len(path.encode("utf-8", "surrogatepass")) > limits.MAX_PATH:
        return t("is longer than {most} bytes", most=limits.MAX_PATH)
    if path.startswith("/"):
        return t("is absolute")
    if "\\" in path:
        return t("contains a backslash")
    parts = path.split("/")
    if len(parts) > limits.MAX_DEPTH:
        return t("is nested deeper than {most} levels", most=limits.MAX_DEPTH)
    for part in parts:
        if part in ("", ".", ".."):
            return t("contains an empty, '.' or '..' step")
        if part.lower().startswith(".git"):
            return t("is git data, which the signature format does not cover")
        if len(part) > limits.MAX_NAME:
            return t("has a part longer than {most} characters", most=limits.MAX_NAME)
        if not _COMPONENT.match(part):
            return t("uses characters outside A-Z a-z 0-9 . _ + = @ , - or starts with '.' or '-'")
        if part.endswith("."):
            return t("has a part that ends with '.'")
        if part.split(".")[0].lower() in _WINDOWS_DEVICES:
            return t("is a reserved device name on some systems")
    return None


def check(path: str) -> str:
    """Return `path`, or raise BundleError (content) when `problem` finds one."""
    if (why := problem(path)) is not None:
        raise BundleError(t("The path '{path}' {why}.", path=show(path), why=why), litter_hint(path), CONTENT)
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
        return t("A desktop file manager left it there: delete it and try again.")
    return t("Remove it, or copy the bundle again from its source.")
