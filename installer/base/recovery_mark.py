"""What a power cut in the middle of a switch leaves behind: the mark that makes the next boot look, and its record.

The mark is a file, so that a boot without one costs nothing: systemd looks for it (ConditionPathExists=) and starts
`atoll settle` only then. The journal alone says what is true.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from installer.base import fs
from installer.base.layout import Layout


def mark_of(layout: Layout) -> Path:
    return layout.state / "switching"


def mark(layout: Layout) -> None:
    """A switch is about to begin. Durable when this returns."""
    if layout.system:
        fs.write_atomic(mark_of(layout), "", 0o600)


def unmark(layout: Layout) -> None:
    """It was committed or taken back."""
    if mark_of(layout).exists():
        fs.remove_file(mark_of(layout))


def went_back(records: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The record of a boot that put the release before back, unless something was installed since."""
    found = None
    for record in records:
        if record["event"] == "rolled-back":
            found = record if "cut_off" in record else None
        elif record["event"] in ("commit", "uninstall", "uninstalled"):
            found = None
    return found
