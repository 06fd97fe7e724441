"""API keys of the endpoint: shown once, stored as SHA-256 only, each with a name, scopes and an expiry time.

The keys that sign bundles are something else (`atoll keys`, offline_bundle/signing/keys.py). The installer makes a key
for its smoke test. Nobody needs that key later: it expires within the hour and is removed when the install ends.

Every change reads, changes and replaces the file under a lock of its own, so an operator may revoke a key during an
install. The gateway reads the file again when it changes (engine/server/access/auth.py); under systemd it has a copy,
which `systemctl reload` replaces (engine/server/access/credentials.py).
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, t
from offline_bundle.signing.strict_json import StrictJSONError, canonical, loads

SCOPES = {
    "serve": t("chat, completions and the list of models"),
    "metrics": t("the metrics at /metrics"),
    "priority": t("the field `priority`: jump the queue"),
    "admin": t("everything, including later endpoints for operators"),
}
DEFAULT_SCOPES = ("serve", "metrics")   # also of keys without the field, which are older than scopes
MAX_FILE_BYTES = 4 << 20                # as in engine/server/access/auth.py
MAX_GROUP_CHARACTERS = 64               # the same
_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\Z")
FIRST = "first key, made at install"    # its name in the file, in every language
_SMOKE = "installer-smoke-test"

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key at the only moment when its text is known."""

    id: str
    text: str


def read(path: Path) -> list[Entry]:
    """All entries; none if the file is missing. A file that we cannot understand is refused, never overwritten."""
    data, problem = b"", ""
    try:
        data, _ = fs.read_regular(path, MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        problem = t("it is not a regular file")
    try:
        if problem:
            raise ValueError(problem)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(t("it is larger than {most} bytes", most=MAX_FILE_BYTES))
        content = loads(data)
        entries = content.get("keys") if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise ValueError(t('it does not hold {{"keys": [...]}}'))
        for number, entry in enumerate(entries):
            if (wrong := _problem(entry)) is not None:
                raise ValueError(t("entry {number}: {wrong}", number=number + 1, wrong=wrong))
        return entries
    except (StrictJSONError, ValueError) as error:
        raise InstallError(
            t("The key file {path} is damaged: {error}.", path=path, error=error),
            exit_code=ExitCode.IO,
            changed=t("It was left as it is."),
            hint=t("Restore it from a backup, or move it away for a new key: mv {path} {path}.damaged", path=path),
        ) from None


def _problem(entry: Any) -> str | None:
    """What is wrong with one entry, or None."""
    if not isinstance(entry, dict):
        return t("it is not an object")
    for name in ("id", "sha256"):
        if not isinstance(entry.get(name), str) or not entry[name]:
            return t("{name} is missing", name=name)
    if not re.fullmatch("[0-9a-f]{64}", entry["sha256"]):
        return t("sha256 is not 64 hexadecimal digits")
    if not isinstance(entry.get("name", ""), str):
        return t("name is not a text")
    if not isinstance(entry.get("revoked", False), bool):
        return t("revoked is neither true nor false")
    if not isinstance(expires := entry.get("expires"), str | None) or (expires and not _TIME.match(expires)):
        return t("expires is not a time such as {now}", now=_now())
    scopes = entry.get("scopes", [])
    if not isinstance(scopes, list) or not all(isinstance(scope, str) for scope in scopes):
        return t("scopes is not a list of words")
    if not _groupable(entry.get("group") or ""):
        return t("group is not a short printable text")
    return None


def write(path: Path, keys: Sequence[Entry]) -> None:
    """Replace the file atomically, one entry per line."""
    fs.write_atomic(path, canonical({"keys": list(keys)}).replace(b"},{", b"},\n{") + b"\n", 0o600)


@contextmanager
def _changing(path: Path) -> Iterator[list[Entry]]:
    """The entries, to be changed in place. They are written back if the block ends without an exception."""
    fd = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        entries = read(path)
        before = [dict(entry) for entry in entries]
        yield entries
        if entries == before:
            return
        if entries:
            write(path, entries)
        else:
            fs.remove_file(path)
            fs.fsync_dir(path.parent)
    finally:
        os.close(fd)


def add(
    path: Path, name: str, *, lifetime: float | None = None, scopes: Sequence[str] = DEFAULT_SCOPES, group: str = ""
) -> NewKey:
    """Make a 256-bit key and store its hash. `lifetime` is in seconds; None for no end. Raises InstallError (usage).

    Keys of one `group` share cached prefixes; "" shares with nobody.
    """
    check_name(name)
    check_scopes(scopes)
    check_group(group)
    text = "sk-" + secrets.token_urlsafe(32)
    now = time.time()
    entry: Entry = {
        "id": secrets.token_hex(4),
        "name": name,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "created": _now(now),
        "scopes": [scope for scope in SCOPES if scope in scopes],
        **({"group": group} if group else {}),
        "expires": None if lifetime is None else _now(now + lifetime),
        "revoked": False,
    }
    with _changing(path) as entries:
        entries.append(entry)
    return NewKey(entry["id"], text)


def add_smoke(path: Path, lifetime: float) -> NewKey:
    return add(path, _SMOKE, lifetime=lifetime, scopes=("serve",))


def revoke(path: Path, reference: str) -> Entry:
    """Refuse a key for good; it stays in the list. `reference`: its id, the beginning of one (4 characters), or a
    name."""
    with _changing(path) as entries:
        entry = find(entries, reference)
        if not entry.get("revoked"):
            entry["revoked"], entry["revoked_at"] = True, _now()
        return dict(entry)


def admit(path: Path, chosen: Sequence[str] | None, *, spare: Sequence[str] = ()) -> int:
    """Let only these keys use the models, by id or `group:NAME`; None: every key again. Returns how many changed.

    A key that is held back keeps its place and its text: it loses the scope `serve` until it is admitted again. Keys of
    operators (`admin`) and those named in `spare` are left alone.
    """
    changed = 0
    if not path.parent.is_dir():
        return changed
    with _changing(path) as entries:
        for entry in entries:
            name = entry.get("name")
            held = entry.get("held_scopes")
            inside = chosen is None or entry["id"] in chosen or f"group:{entry.get('group') or ''}" in chosen
            if inside and isinstance(held, list):
                entry["scopes"] = [scope for scope in SCOPES if scope in held]
                del entry["held_scopes"]
                changed += 1
            elif (not inside and held is None and name != _SMOKE and name not in spare
                  and "serve" in scopes_of(entry) and "admin" not in scopes_of(entry)):  # fmt: skip
                entry["held_scopes"] = scopes_of(entry)
                entry["scopes"] = [scope for scope in entry["held_scopes"] if scope != "serve"]
                changed += 1
    return changed


def remove(path: Path, ids: set[str], *, smoke: bool = False) -> None:
    """Remove entries by id, and with `smoke` those that smoke tests left. Removing the last entry removes the file."""
    if not path.parent.is_dir():
        return
    with _changing(path) as entries:
        entries[:] = [k for k in entries if k["id"] not in ids and not (smoke and k.get("name") == _SMOKE)]


def find(entries: Sequence[Entry], reference: str) -> Entry:
    """The entry that the reference means. Raises InstallError (usage) if none or several match."""
    people = [entry for entry in entries if entry.get("name") != _SMOKE]
    found = [entry for entry in people if entry["id"] == reference]
    if not found and len(reference) >= 4:
        found = [entry for entry in people if entry["id"].startswith(reference)]
    if not found:
        found = [entry for entry in people if entry.get("name") == reference]
    if len(found) == 1:
        return found[0]
    problem = t("There is no API key '{reference}'.", reference=reference)
    if found:
        problem = t("{count} API keys are called '{reference}'.", count=len(found), reference=reference)
    raise InstallError(
        problem,
        exit_code=ExitCode.USAGE,
        why=t("A key is named by its id, never by its text: the text is a secret and is stored nowhere."),
        changed=t("Nothing was changed."),
        hint=t("Give the id of one: atoll apikey list"),
    )


def state(entry: Entry, now: float | None = None) -> str:
    """active, expired or revoked."""
    if entry.get("revoked"):
        return "revoked"
    expires = entry.get("expires")
    return "expired" if expires is not None and expires <= _now(now) else "active"


def people(path: Path) -> list[Entry]:
    """Entries that were made for a person or a program, whatever their state."""
    return [entry for entry in read(path) if entry.get("name") != _SMOKE]


def usable(path: Path) -> list[Entry]:
    """Entries that a person may hold: not revoked, not expired, not the smoke test's."""
    return [entry for entry in people(path) if state(entry) == "active"]


def scopes_of(entry: Entry) -> list[str]:
    return list(entry.get("scopes", DEFAULT_SCOPES))


def shown_name(entry: Entry) -> str:
    """The name a person gave it. The installer's name for its first key can be translated."""
    name = str(entry.get("name", ""))
    return t("first key, made at install") if name == FIRST else name


def seconds_left(entry: Entry) -> float | None:
    """Seconds until it expires; None: never."""
    if entry.get("expires") is None:
        return None
    return _seconds(entry["expires"]) - time.time()


def lifetime_of(entry: Entry) -> float | None:
    """For how long it was made; None: for ever."""
    return None if entry.get("expires") is None else _seconds(entry["expires"]) - _seconds(entry["created"])


def _seconds(at: str) -> float:
    return datetime.strptime(at, _FORMAT).replace(tzinfo=UTC).timestamp()


def check_name(name: str) -> None:
    """Raises InstallError (usage) for a name that a listing could not show on one line."""
    if not name.strip() or not name.isprintable() or len(name) > 64:
        raise InstallError(
            t("A key's name has 1 to 64 printable characters."),
            exit_code=ExitCode.USAGE,
            changed=t("Nothing was changed."),
            hint=t("Say who will use it, for example: atoll apikey new --name 'team a'"),
        )


def check_scopes(scopes: Sequence[str]) -> None:
    """Raises InstallError (usage)."""
    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown or not scopes:
        what = joined((t("{name}: {meaning}", name=name, meaning=meaning) for name, meaning in SCOPES.items()), "; ")
        problem = t("There is no scope '{name}'.", name=unknown[0]) if unknown else None
        raise InstallError(
            problem or t("A key without a scope opens nothing."),
            exit_code=ExitCode.USAGE,
            changed=t("Nothing was changed."),
            hint=t("The scopes are {what}.", what=what),
        )


def check_group(group: str) -> None:
    """Raises InstallError (usage)."""
    if not _groupable(group):
        raise InstallError(
            t("A group's name has 1 to 64 printable characters."),
            exit_code=ExitCode.USAGE,
            changed=t("Nothing was changed."),
            hint=t("Name what its keys have in common, for example: --group 'team a'"),
        )


def _groupable(group: Any) -> bool:
    return isinstance(group, str) and (not group or bool(group.strip())) and group.isprintable() and (
        len(group) <= MAX_GROUP_CHARACTERS)


def _now(at: float | None = None) -> str:
    return time.strftime(_FORMAT, time.gmtime(time.time() if at is None else at))
