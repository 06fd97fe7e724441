"""What a committed release ran with: its settings and, in the system form, every unit file. A rollback therefore needs
no medium.

Each snapshot is one JSON file named by its content. The journal's commit record names the one that counts, so a
snapshot without a commit is only a leftover.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.service.units import UnitFile


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Settings as committed, and the unit files that belong to them."""

    settings: str | None
    units: list[UnitFile]
    instances: list[str]


def file_of(layout: Layout, snapshot: Snapshot) -> tuple[Path, str]:
    """Its file, and the text in it."""
    units = {str(unit.path.relative_to(layout.prefix)): [unit.mode, unit.content] for unit in snapshot.units}
    content = {"settings": snapshot.settings, "units": units, "instances": snapshot.instances}
    text = json.dumps(content, indent=1) + "\n"
    return _path(layout, hashlib.sha256(text.encode()).hexdigest()[:16]), text


def save(layout: Layout, snapshot: Snapshot) -> str:
    """Write it durably; returns its name."""
    path, text = file_of(layout, snapshot)
    fs.make_dir(layout.snapshots, 0o700)
    fs.write_atomic(path, text, 0o600)
    return path.stem


def load(layout: Layout, name: str) -> Snapshot:
    """Raises InstallError (30) if it is gone or damaged: guessing unit files would help nobody."""
    path = _path(layout, name)
    try:
        content = json.loads(path.read_bytes())
        units = [UnitFile(layout.prefix / at, text, mode) for at, (mode, text) in content["units"].items()]
        return Snapshot(content["settings"], units, list(content["instances"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InstallError(
            t("The saved settings of the previous release, {path}, cannot be read.", path=path),
            exit_code=ExitCode.IO,
            changed=t("Nothing was changed."),
            hint=t("Install that release again from its medium: atoll install MEDIUM"),
        ) from None


def prune(layout: Layout, keep: set[str | None]) -> None:
    """Remove snapshots that no commit still needed for a rollback names."""
    if layout.snapshots.is_dir():
        for path in layout.snapshots.iterdir():
            if path.name.removesuffix(".json") not in keep:
                fs.remove_tree(layout.prefix, path)


def _path(layout: Layout, name: str) -> Path:
    return layout.snapshots / f"{name}.json"
