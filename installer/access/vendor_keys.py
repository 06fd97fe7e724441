"""The vendor keys that this installation trusts, `etc/atoll/trust/<fingerprint>.pub`, and those that it will never
trust again, `etc/atoll/trust/revoked.json`.

A revocation wins over everything: over a key file that somebody or an older release puts into the directory, and over a
key that the operator names. Every change is made under one lock and written to the audit log first.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from installer.audit import log
from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import reason, t
from installer.base.layout import Layout
from installer.base.timestamps import timestamp
from installer.release import release
from offline_bundle.errors import BundleError
from offline_bundle.signing import revoked_keys as store
from offline_bundle.signing.hash_words import from_words
from offline_bundle.signing.keys import Keyring, PublicKey, load_public, public_pem
from offline_bundle.text import plain

_UNTOUCHED = t("Nothing was changed.")


@dataclass(frozen=True, slots=True)
class InstalledKey:
    """One file of the trust directory. `problem` says why it is not a usable key; then it has no fingerprint."""

    path: Path
    fingerprint: str = ""
    problem: str = ""


def keyring(layout: Layout, named: Sequence[Path] = ()) -> Keyring:
    """The keys that are accepted for a bundle: those named now and no others, or else the installed ones; never a
    revoked one.

    Raises InstallError: (30) if the directory or the list of revoked keys is unreliable, (10) if a named key was
    revoked, (2, 10, 13) if a named file is not a key.
    """
    gone = revoked(layout)
    for path in named:
        refuse_revoked(load(path).fingerprint, gone)
    return Keyring(tuple(named) or tuple(installed_keys(layout)), {name: _why(entry) for name, entry in gone.items()})


def keyring_of_installed(layout: Layout, named: Sequence[Path] = ()) -> Keyring:
    """The keys that are accepted for a model that is already installed: the installed keys and those named now."""
    narrow = keyring(layout, named)
    return Keyring((*narrow.files, *(path for path in installed_keys(layout) if path not in narrow.files)),
                   narrow.revoked)  # fmt: skip


def installed_keys(layout: Layout) -> list[Path]:
    """The files of the keys that are trusted and not revoked. Raises InstallError as `keyring` does."""
    gone = revoked(layout)
    found = [entry for entry in entries(layout) if not entry.path.is_symlink()]
    for entry in found:
        if entry.problem:
            raise InstallError(
                t("The trusted key {path} cannot be used: {problem}", path=entry.path, problem=entry.problem),
                exit_code=ExitCode.UNTRUSTED,
                why=t("Whoever changed it could make this server trust a key of theirs."),
                changed=_UNTOUCHED,
                hint=t("Compare it with the vendor's letter, or remove it: atoll trust remove {name}",
                       name=entry.path.name),
            )
    return [entry.path for entry in found if entry.fingerprint not in gone]


def entries(layout: Layout) -> list[InstalledKey]:
    """Every `*.pub` of the directory, usable or not."""
    return [_entry(path) for path in sorted(layout.trust.glob("*.pub"))]


def revoked(layout: Layout) -> dict[str, dict[str, Any]]:
    """fingerprint → {fingerprint, at, by, reason}. Raises InstallError (30) if the list is unreliable."""
    try:
        return store.read_revoked(str(layout.trust), t) if store.check_folder(str(layout.trust), t) else {}
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else plain(error)
        raise InstallError(
            t("The trusted and revoked keys in {folder} cannot be relied on: {why}.", folder=layout.trust, why=why),
            exit_code=ExitCode.IO,
            changed=_UNTOUCHED,
            hint=t("Nothing is verified until this is repaired. Who changed it? ls -la {folder}", folder=layout.trust),
        ) from None


def load(path: Path) -> PublicKey:
    """A public key file that the operator named. Raises InstallError (2, 10, 13)."""
    try:
        return load_public(path)
    except BundleError as error:
        raise InstallError(error.message, exit_code=error.exit_code, changed=_UNTOUCHED, hint=error.hint) from None


def refuse_revoked(fingerprint: str, gone: dict[str, dict[str, Any]]) -> None:
    """Raise InstallError (10) if this key was revoked."""
    if fingerprint in gone:
        raise InstallError(
            t("The key {fingerprint} was revoked here: {why}.", fingerprint=fingerprint, why=_why(gone[fingerprint])),
            exit_code=ExitCode.UNTRUSTED,
            why=t("A revoked key is never trusted again."),
            hint=t("Use the vendor's new key, obtained through a separate channel."),
        )


def key_name(path: Path) -> str:
    """The file name of a key: the beginning of its fingerprint, so that the same key is one file."""
    return f"{load(path).fingerprint[:16]}.pub"


def trust(layout: Layout, source: Path) -> bool:
    """Add a key that the operator named. Returns whether it is new. Audited. Raises InstallError (10) if it was
    revoked."""
    return add(layout, load(source), str(source))


def add(layout: Layout, key: PublicKey, source: str) -> bool:
    """Trust `key`. Returns whether that is new. Raises InstallError (10) if it was revoked."""
    with _changing(layout):
        refuse_revoked(key.fingerprint, revoked(layout))
        if any(entry.fingerprint == key.fingerprint and not entry.path.is_symlink() for entry in entries(layout)):
            return False
        path = layout.trust / f"{key.fingerprint[:16]}.pub"
        if os.path.lexists(path):
            path = layout.trust / f"{key.fingerprint}.pub"
        log.append(layout.audit, "key-trusted", fingerprint=key.fingerprint, file=source)
        fs.write_atomic(path, public_pem(key), 0o644)
    return True


def remove(layout: Layout, named: str) -> list[InstalledKey]:
    """No longer trust a key (it may be added again). Returns the files that were removed. `named`: see `find`."""
    with _changing(layout):
        here = {entry.path.name: entry for entry in entries(layout)}
        if named in here and not here[named].fingerprint:
            found = [here[named]]
        else:
            fingerprint = find(layout, named)
            found = [entry for entry in here.values() if entry.fingerprint == fingerprint]
        if not found:
            raise _unknown(layout, named)
        for entry in found:
            log.append(layout.audit, "key-removed", fingerprint=entry.fingerprint, file=entry.path.name)
            fs.remove_file(entry.path)
        fs.fsync_dir(layout.trust)
    return found


def revoke(layout: Layout, fingerprint: str, why: str) -> bool:
    """Never trust this key again. Returns whether that is new. No key file is needed: only the fingerprint counts."""
    with _changing(layout):
        gone = revoked(layout)
        new = fingerprint not in gone
        files = [entry.path for entry in entries(layout) if entry.fingerprint == fingerprint]
        if new or files:
            log.append(layout.audit, "key-revoked", fingerprint=fingerprint, reason=why,
                         files=[path.name for path in files])  # fmt: skip
        if new:
            at, by = timestamp(), str(log.operator()["user"])
            gone[fingerprint] = {"fingerprint": fingerprint, "at": at, "by": by, "reason": why}
            listed = sorted(gone.values(), key=lambda entry: (entry.get("at", ""), entry["fingerprint"]))
            content = {"schema_version": 1, "revoked": listed}
            fs.write_atomic(layout.revoked, json.dumps(content, indent=1, ensure_ascii=False) + "\n", 0o644)
        for path in files:  # older releases, which have no list of revoked keys, must not trust it either
            fs.remove_file(path)
        fs.fsync_dir(layout.trust)
    return new


def find(layout: Layout, named: str) -> str:
    """The fingerprint that `named` means: at least 8 of its first digits or 4 of its words, the name of a file here, or
    all 64 digits or 32 words.

    Raises InstallError (usage): no match, or several.
    """
    here = {entry.path.name: entry.fingerprint for entry in entries(layout) if entry.fingerprint}
    if named in here:
        return here[named]
    plain_text = "".join(named.split()).replace(":", "").lower()
    with contextlib.suppress(ValueError):
        plain_text = from_words(named)
    known = {*here.values(), *revoked(layout)}
    if store.FINGERPRINT.match(plain_text):
        return plain_text
    matching = sorted(name for name in known if len(plain_text) >= 8 and name.startswith(plain_text))
    if len(matching) > 1:
        raise InstallError(
            t("{named} matches {count} keys.", named=named, count=len(matching)),
            exit_code=ExitCode.USAGE,
            changed=_UNTOUCHED,
            hint=t("Give more digits. To list the keys: atoll trust list"),
        )
    if not matching:
        raise _unknown(layout, named)
    return matching[0]


def signed_by(info: dict[str, Any]) -> dict[str, str]:
    """The parts of the release `info` (release.json) → the fingerprint of the key that signed each."""
    runtime = info.get("runtime")
    parts = [*release.bundles_of(info), *([{**runtime, "name": "atoll"}] if runtime else [])]
    return {f"{part.get('name')} {part.get('version')}": str(part.get("key_fingerprint")) for part in parts}


def why_revoked(layout: Layout, fingerprint: str) -> str:
    """Since when and why it is revoked; empty if it is not."""
    entry = revoked(layout).get(fingerprint)
    return _why(entry) if entry else ""


def _why(entry: dict[str, Any]) -> str:
    said = "".join(c if c.isprintable() else " " for c in str(entry.get("reason", "")))[:200]
    return f"{str(entry.get('at', '?'))[:20]}, {said or '?'}"


def _entry(path: Path) -> InstalledKey:
    try:
        info = path.lstat()
        if path.is_symlink():
            return InstalledKey(path, problem=t("it is a link; only files count"))
        store.check_owner(str(path), info, t)
        return InstalledKey(path, load_public(path).fingerprint)
    except BundleError as error:
        return InstalledKey(path, problem=error.message)
    except (OSError, ValueError) as error:
        return InstalledKey(path, problem=reason(error) if isinstance(error, OSError) else plain(error))


def _unknown(layout: Layout, named: str) -> InstallError:
    return InstallError(
        t("No key {named} is known to {name}.", named=named, name=layout.name),
        exit_code=ExitCode.USAGE,
        changed=_UNTOUCHED,
        hint=t("To list the keys: atoll trust list. To revoke one that was never here, give all 64 digits of its "
               "fingerprint."),
    )


@contextlib.contextmanager
def _changing(layout: Layout) -> Iterator[None]:
    """One change at a time, by any process. Waiting for another change takes milliseconds."""
    fd = os.open(layout.trust, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
