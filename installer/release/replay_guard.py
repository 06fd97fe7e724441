"""The highest sequence of each bundle that was ever committed here: it exposes an old bundle that is replayed."""

import json

from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t
from installer.base.layout import Layout


def _read(layout: Layout) -> dict[str, int]:
    try:
        data = json.loads(layout.sequence.read_bytes())["sequences"]
        if isinstance(data, dict) and all(isinstance(value, int) for value in data.values()):
            return data
        raise ValueError
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        raise InstallError(
            t("The record of installed sequences, {sequence}, is damaged.", sequence=layout.sequence),
            exit_code=ExitCode.IO,
            why=t("Without it, an old bundle could be taken for a new one."),
            changed=t("Nothing was changed."),
            hint=t("Restore it from a backup; `grep committed {audit}` shows what was installed.", audit=layout.audit),
        ) from None


def last_sequence(layout: Layout, name: str) -> int | None:
    """The highest sequence committed for a bundle name."""
    return _read(layout).get(name)


def raise_sequence(layout: Layout, name: str, sequence: int) -> None:
    """Remember a committed sequence. It never decreases."""
    known = _read(layout)
    if known.get(name, 0) < sequence:
        fs.write_atomic(layout.sequence, json.dumps({"sequences": {**known, name: sequence}}, indent=2) + "\n", 0o600)
