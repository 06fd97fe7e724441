"""Convert settings that an older Atoll wrote to the current format. Comments and everything of the operator's stay.

Each step takes the document from one version to the next; a file without a number is version 1. The caller keeps the
old file beside the new one (see `steps.activate.switch`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t

VERSION_KEY = "schema_version"


def _one_to_two(document: Any) -> None:
    """0.1 wrote no number; the tables are the same."""


STEPS: dict[int, Callable[[Any], None]] = {1: _one_to_two}


def current() -> int:
    """The version that this code writes."""
    return max(STEPS) + 1


def version_of(document: Any) -> int:
    found = document.get(VERSION_KEY, 1)
    return int(found) if isinstance(found, int) and not isinstance(found, bool) and found >= 1 else 0


def document(text: str, path: Path) -> tomlkit.TOMLDocument:
    """The settings file with its comments. Raises InstallError (usage) if it cannot be parsed."""
    try:
        return tomlkit.parse(text)
    except TOMLKitError as error:
        raise InstallError(
            t("The settings in {path} cannot be read: {error}.", path=path, error=error),
            exit_code=ExitCode.USAGE,
            changed=t("Nothing was changed."),
            hint=t("Correct that line, then run this again."),
        ) from None


def migrate(text: str, path: Path) -> tuple[str, int]:
    """The same settings in the current format, and the version that they had.

    Raises InstallError (usage): not TOML, an impossible version, or a version that a newer Atoll wrote.
    """
    settings = document(text, path)
    had = version_of(settings)
    if had == current():
        return text, had
    if had == 0 or had > current():
        said = f"{VERSION_KEY} = {settings.get(VERSION_KEY)}"
        raise InstallError(
            t("The settings in {path} have {said}; this Atoll knows 1 to {current}.", path=path, said=said,
              current=current()),
            exit_code=ExitCode.USAGE,
            why=t("A newer Atoll wrote them, or somebody changed the number."),
            changed=t("Nothing was changed."),
            hint=t("Install the newer release, or put back the older file that lies beside it (ls {path}.v*).",
                   path=path),
        )
    for version in range(had, current()):
        STEPS[version](settings)
    return _stamped(settings), had


def _stamped(document: Any) -> str:
    """Set the number as the first key, above all tables and below the comments at the top of the file."""
    if VERSION_KEY in document:
        document[VERSION_KEY] = current()
        return tomlkit.dumps(document)
    lines = tomlkit.dumps(document).splitlines(keepends=True)
    top = 0
    while top < len(lines) and lines[top].startswith("#"):
        top += 1
    rest = lines[top:]
    gap = [] if rest and not rest[0].strip() else ["\n"]
    return "".join([*lines[:top], f"{VERSION_KEY} = {current()}\n", *gap, *rest])
