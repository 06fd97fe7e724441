"""API keys. The file holds only SHA-256 digests, so reading it gives no one a key::

    {"keys": [{"id": "k1", "name": "team a", "sha256": "…64 hex…", "created": "2026-01-01T00:00:00Z",
               "scopes": ["serve"], "group": "team a", "expires": null, "revoked": false}]}

Keys of one `group` share cached prefixes; a key without a group shares them with no other key. Plain SHA-256 is enough
because keys are 256-bit random numbers, not passwords. The file is read again when it changes, so a revoked key is
refused from the next request on.
"""

import hashlib
import hmac
import json
import logging
import os
import re
import stat
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.message import msg, reason

log = logging.getLogger("atoll.auth")

# With a key file, all other paths need a key. The documents say nothing about this server, and browsers send no key.
PUBLIC_PATHS = frozenset({"/health", "/livez", "/version", "/docs", "/openapi.json"})
MAX_KEY_CHARACTERS = 512
MAX_FILE_BYTES = 4 << 20
MAX_GROUP_CHARACTERS = 64
_DIGEST = re.compile(r"[0-9a-f]{64}")
_UNSCOPED = ("serve", "metrics")  # the scopes of keys without "scopes", which date from before there were any

Stamp = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ApiKey:
    id: str
    name: str
    digest: bytes                # SHA-256 of the whole key, as hex in ASCII
    expires: float | None = None  # seconds since the epoch
    revoked: bool = False
    scopes: frozenset[str] = frozenset(_UNSCOPED)
    group: str = ""

    @property
    def tenant(self) -> str:
        """Whose cached prompts this key may use: those of its group, or only its own."""
        return f"group {self.group}" if self.group else f"key {self.digest.decode()}"

    def valid(self, now: float) -> bool:
        return not self.revoked and (self.expires is None or now < self.expires)

    def allows(self, scope: str) -> bool:
        """Whether the key has `scope`; `admin` includes all scopes. Unknown scopes in the file have no effect."""
        return scope in self.scopes or "admin" in self.scopes


class KeyFile:
    """The keys of one file. If the file becomes unreadable or broken, the last good keys stay valid (and it is logged);
    if it is removed, nobody is admitted."""

    def __init__(self, path: Path | str) -> None:
        """Raises ConfigError if the file cannot be used now."""
        self._path = Path(path)
        self._stamp: Stamp | None = None
        self._keys: list[ApiKey] = []
        try:
            self._stamp = self._stat()
            self._keys = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(
                msg("The key file {path} cannot be used: {error}.", path=self._path, error=reason(error)),
                "--api-key-file",
                msg('It holds {{"keys": [{{"id", "name", "sha256", …}}]}}.'),
            ) from None

    def check(self, presented: str) -> ApiKey | None:
        """The valid key that equals `presented`, or None. All stored digests are compared, each in constant time."""
        self.reload()
        if not presented or len(presented) > MAX_KEY_CHARACTERS:
            return None
        digest = hashlib.sha256(presented.encode(errors="replace")).hexdigest().encode()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found if found is not None and found.valid(time.time()) else None

    def reload(self) -> None:
        """Read the file again if it has changed; `check` calls this. Never raises."""
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

    def _stat(self) -> Stamp:
        """A stamp that changes with the file's content and its permissions (because of the change time)."""
        info = os.stat(self._path)
        return info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino, info.st_dev

    def _read(self) -> list[ApiKey]:
        """Raises OSError, ValueError."""
        fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block the gateway
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ValueError("not a regular file")
            with os.fdopen(fd, "rb", closefd=False) as file:
                data = file.read(MAX_FILE_BYTES + 1)
        finally:
            os.close(fd)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
        try:
            content = json.loads(data, parse_constant=_no_constant)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        entries = content.get("keys") if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise ValueError('it must hold {"keys": [...]}')
        return [_parse(entry, i) for i, entry in enumerate(entries)]


def bearer_token(authorization: str | None) -> str:
    """The key of an `Authorization: Bearer …` header, "" without one."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _parse(entry: Any, index: int) -> ApiKey:
    where = f"keys[{index}]"
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object")
    digest = entry.get("sha256")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest.lower()):
        raise ValueError(f"{where}.sha256 must be 64 hexadecimal digits")
    digest = digest.lower()
    revoked = entry.get("revoked", False)
    if not isinstance(revoked, bool):
        raise ValueError(f"{where}.revoked must be true or false")
    scopes = entry.get("scopes", _UNSCOPED)
    if not isinstance(scopes, list | tuple) or not all(isinstance(scope, str) for scope in scopes):
        raise ValueError(f"{where}.scopes must be a list of words")
    group = entry.get("group") or ""
    if not isinstance(group, str) or not group.isprintable() or len(group) > MAX_GROUP_CHARACTERS:
        raise ValueError(f"{where}.group must have at most {MAX_GROUP_CHARACTERS} printable characters")
    return ApiKey(
        id=str(entry.get("id") or digest[:8]),
        name=str(entry.get("name") or ""),
        digest=digest.encode(),
        expires=_time(entry.get("expires"), f"{where}.expires"),
        revoked=revoked,
        scopes=frozenset(scopes),
        group=group,
    )


def _time(value: Any, where: str) -> float | None:
    """Seconds since the epoch from a number or an ISO 8601 string (UTC if it names no zone)."""
    if value is None:
        return None
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        moment = datetime.fromisoformat(str(value))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{where} must be null, seconds since the epoch, or an ISO 8601 date") from None
