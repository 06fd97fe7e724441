"""API keys. The file holds only SHA-256 digests, so reading it gives no one a key::

    {"keys": [{"id": "k1", "name": "team a", "sha256": "…64 hex…", "created": "2026-01-01T00:00:00Z",
               "expires": null, "revoked": false}]}

Plain SHA-256 is enough because keys are 256-bit random numbers, not passwords. The file is read again when it changes.
"""

import hashlib
import hmac
import json
import logging
import os
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

log = logging.getLogger("atoll.auth")

PUBLIC_PATHS = frozenset({"/health", "/livez", "/version"})  # everything else needs a key when a key file is set
MAX_KEY_CHARACTERS = 512
MAX_FILE_BYTES = 4 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    id: str
    name: str
    digest: bytes                # SHA-256 of the whole key, as hex in ASCII
    expires: float | None = None  # seconds since the epoch
    revoked: bool = False

    def valid(self, now: float) -> bool:
        return not self.revoked and (self.expires is None or now < self.expires)


class KeyFile:
    """The keys of one file. A file that has become unreadable or broken keeps the last good keys (and is logged); a
    file that is gone admits nobody."""

    def __init__(self, path: Path | str) -> None:
        """Raises ConfigError if the file cannot be used now."""
        self._path = Path(path)
        self._stamp: tuple[int, int, int] | None = None
        self._keys: list[ApiKey] = []
        try:
            self._stamp = self._stat()
            self._keys = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The key file {self._path} cannot be used: {error}.", "--api-key-file",
                'It holds {"keys": [{"id", "name", "sha256", …}]}.',
            ) from None

    def check(self, presented: str) -> ApiKey | None:
        """The valid key that equals `presented`. Every stored digest is compared, in constant time."""
        self._reload()
        if not presented or len(presented) > MAX_KEY_CHARACTERS:
            return None
        digest = hashlib.sha256(presented.encode()).hexdigest().encode()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found if found is not None and found.valid(time.time()) else None

    def _reload(self) -> None:
        try:
            stamp = self._stat()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._keys = self._read()
            log.info("read %d API keys", len(self._keys))
        except FileNotFoundError:
            if self._keys:
                log.error("the key file %s is gone: nobody is admitted until it is back", self._path)
            self._keys, self._stamp = [], None
        except (OSError, ValueError) as error:
            log.error("the changed key file %s cannot be used, the last good keys stay in force: %s", self._path, error)

    def _stat(self) -> tuple[int, int, int]:
        stat = os.stat(self._path)
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read(self) -> list[ApiKey]:
        """Raises OSError, ValueError."""
        with self._path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
        content = json.loads(data)
        entries = content.get("keys") if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise ValueError('it must hold {"keys": [...]}')
        return [_parse(entry, i) for i, entry in enumerate(entries)]


def bearer_token(authorization: str | None) -> str:
    """The key of an `Authorization: Bearer …` header, "" without one."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _parse(entry: Any, index: int) -> ApiKey:
    where = f"keys[{index}]"
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object")
    digest = str(entry.get("sha256", "")).lower()
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{where}.sha256 must be 64 hexadecimal digits")
    revoked = entry.get("revoked", False)
    if not isinstance(revoked, bool):
        raise ValueError(f"{where}.revoked must be true or false")
    return ApiKey(
        id=str(entry.get("id") or digest[:8]),
        name=str(entry.get("name") or ""),
        digest=digest.encode(),
        expires=_time(entry.get("expires"), f"{where}.expires"),
        revoked=revoked,
    )


def _time(value: Any, where: str) -> float | None:
    """Seconds since the epoch from a number or an ISO 8601 string (UTC if it names no zone)."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    try:
        moment = datetime.fromisoformat(str(value))
    except (TypeError, ValueError):
        raise ValueError(f"{where} must be null, seconds since the epoch, or an ISO 8601 date") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
