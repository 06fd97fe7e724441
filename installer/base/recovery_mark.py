"""The mark that a power cut during a switch leaves behind, so that the next boot checks.

The mark is a file, so a boot without one costs nothing: systemd looks for it (ConditionPathExists=) and starts `atoll
settle` only then. What actually happened is in the journal alone.
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
    """The switch was committed or undone."""
    if mark_of(layout).exists():
        fs.remove_file(mark_of(layout))


def went_back(records: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The record of a boot that put the previous release back, unless something was installed since."""
    found = None
    for record in records:
        if record["event"] == "rolled-back":
            found = record if "cut_off" in record else None
        elif record["event"] in ("commit", "uninstall", "uninstalled"):
            found = None
    return found
