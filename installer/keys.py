"""API keys of the endpoint: shown once, stored as SHA-256 only.

The installer needs a key of its own for the smoke test and nobody should know it afterwards: it makes one that expires
within the hour and removes it when the install ends.
"""

import hashlib
import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from installer import fs
from installer.errors import ExitCode, InstallError

_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
_SMOKE = "installer-smoke-test"


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key at the one moment when its text is known."""

    id: str
    text: str


def read(path: Path) -> list[dict[str, Any]]:
    """All entries; a missing file has none. A file that is not ours to understand is refused, never overwritten."""
    try:
        keys = json.loads(path.read_bytes())["keys"]
        if isinstance(keys, list) and all(isinstance(key, dict) and "sha256" in key and "id" in key for key in keys):
            return keys
        raise ValueError
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        raise InstallError(
            f"The key file {path} is damaged.",
            exit_code=ExitCode.IO,
            changed="It was left as it is.",
            hint=f"Restore it from a backup, or move it away for a new key: mv {path} {path}.damaged",
        ) from None


def write(path: Path, keys: list[dict[str, Any]]) -> None:
    fs.write_atomic(path, json.dumps({"keys": keys}, indent=2) + "\n", 0o600)


def add(path: Path, name: str, *, lifetime: float | None = None) -> NewKey:
    """Make a 256-bit key and store its hash; `lifetime` in seconds, None for ever."""
    text = "sk-" + secrets.token_urlsafe(32)
    now = time.time()
    entry = {
        "id": secrets.token_hex(4),
        "name": name,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "created": time.strftime(_FORMAT, time.gmtime(now)),
        "expires": None if lifetime is None else time.strftime(_FORMAT, time.gmtime(now + lifetime)),
        "revoked": False,
    }
    write(path, [*read(path), entry])
    return NewKey(entry["id"], text)


def add_smoke(path: Path, lifetime: float) -> NewKey:
    return add(path, _SMOKE, lifetime=lifetime)


def remove(path: Path, ids: set[str], *, smoke: bool = False) -> None:
    """Drop entries by id, and with `smoke` whatever smoke tests left. The last entry's removal removes the file."""
    keys = read(path)
    kept = [key for key in keys if key["id"] not in ids and not (smoke and key.get("name") == _SMOKE)]
    if len(kept) == len(keys):
        return
    if kept:
        write(path, kept)
    else:
        fs.remove_file(path)
        fs.fsync_dir(path.parent)


def usable(path: Path) -> list[dict[str, Any]]:
    """Entries that a person may hold: not revoked, not expired, not the smoke test's."""
    now = time.strftime(_FORMAT, time.gmtime())
    return [
        key
        for key in read(path)
        if not key.get("revoked") and key.get("name") != _SMOKE and (key.get("expires") is None or key["expires"] > now)
    ]
