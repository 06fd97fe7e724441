"""The store of ingested models: list, verify, remove, seal.

    store/<digest>/            a whole bundle; files 0444, directories 0555; named by the SHA-256 of its bundle.json
    store/.<digest>.stamps     what the files looked like when they were verified (see journal.stamp)
    store/.<digest>.partial/   an ingest under way, with its .journal; never listed, resumed by the next ingest
    store/.lock                held while the store changes

An entry appears and disappears by one rename, so a reader never sees an incomplete one.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offline_bundle import limits, untrusted_dir
from offline_bundle.bundle.manifest import MANIFEST, SIGNATURE
from offline_bundle.bundle.verify import check_file_set, check_signed_manifest
from offline_bundle.errors import BUSY, CONTENT, MISSING, SPACE_IO, USAGE, BundleError
from offline_bundle.model.manifest import BundleManifest
from offline_bundle.model.verify import VerifiedBundle, verify_bundle
from offline_bundle.progress import Progress
from offline_bundle.signing import keys
from offline_bundle.store.journal import Stamp, load_stamps, save_stamps, stamp
from offline_bundle.text import reason, t

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_GONE = (".removing-", ".damaged-")


@dataclass(frozen=True)
class StoredModel:
    """One entry of the store, as its bundle.json describes it (it can be trusted because the store belongs to root)."""

    path: Path
    digest: str
    manifest: BundleManifest

    @property
    def model_dir(self) -> Path:
        """The directory that an engine loads."""
        return self.path / "model"


def list_models(store: Path) -> list[StoredModel]:
    """Complete entries of the store, by name and sequence; partial ones are never listed.

    Raises BundleError (content) when an entry's bundle.json is not the one that its directory is named after.
    """
    found: list[StoredModel] = []
    try:
        entries = list(store.iterdir())
    except FileNotFoundError:
        return found
    except OSError as e:
        raise BundleError(
            t("The store {store} cannot be read: {why}.", store=store, why=reason(e)), t("Try again as root."), SPACE_IO
        ) from e
    for path in entries:
        if not _DIGEST.match(path.name):
            continue
        with untrusted_dir.open_root(path) as root:
            manifest = BundleManifest.parse(untrusted_dir.read_small(root, MANIFEST, limits.MAX_MANIFEST))
        if manifest.digest != path.name:
            raise BundleError(
                t("{path} holds a bundle.json that does not match its name.", path=path),
                t("Remove it and ingest it again."),
                CONTENT,
            )
        found.append(StoredModel(path, path.name, manifest))
    return sorted(found, key=lambda m: (m.manifest.name, m.manifest.sequence, m.digest))


def verify_model(
    store: Path,
    digest: str,
    trusted_keys: Sequence[Path],
    *,
    deep: bool = True,
    full: bool = True,
    progress: Progress | None = None,
) -> VerifiedBundle:
    """Verify an entry again: always signature and file set; then every byte if `deep`, else that no stamp has changed.

    A deep check uses the signed hashes of the chunks, on all cores; `full` adds the hash of each whole file, which
    takes one core a file.

    Raises BundleError as `verify.verify_bundle` does; 11 also if a stamp differs (a deep check tells whether the
    content does) or an entry is writable.
    """
    path = _entry(store, digest)
    if deep:
        verified = verify_bundle(path, trusted_keys, full=full, progress=progress)
    else:
        with untrusted_dir.open_root(path) as root:
            signed = check_signed_manifest(root, keys.load_trusted(trusted_keys, path), BundleManifest)
            check_file_set(root, signed)
        if not is_sealed(store, digest):
            raise BundleError(
                t("The files of {path} changed after the last verification.", path=path),
                t("Run a deep verification; if it fails, ingest the bundle again."),
                CONTENT,
            )
        verified = VerifiedBundle(path, signed.manifest, signed.digest, signed.key_fingerprint)
    if verified.digest != digest:
        raise BundleError(
            t("{path} holds the bundle {digest}.", path=path, digest=verified.digest),
            t("Remove it and ingest the right one."),
            CONTENT,
        )
    with untrusted_dir.open_root(path) as root:
        for name, mode in _modes(root).items():
            if mode & 0o222:
                raise BundleError(
                    t("{path} is writable; entries of the store are read-only.", path=path / name),
                    t("Ingest the bundle again, or run: chmod -R a-w {path}", path=path),
                    CONTENT,
                )
    return verified


def remove_model(store: Path, digest: str) -> None:
    """Remove an entry; it disappears in one rename. Raises BundleError (2, 13 when absent, 30, 75 when busy)."""
    path = _entry(store, digest)
    with locked(store):
        try:
            os.rename(path, store / f".removing-{digest}")
            stamps_path(store, digest).unlink(missing_ok=True)
            sweep(store)
        except FileNotFoundError as e:
            raise _absent(store, digest) from e
        except OSError as e:
            raise BundleError(
                t("Removing {path} failed: {why}.", path=path, why=reason(e)), t("Try again as root."), SPACE_IO
            ) from e


@contextmanager
def locked(store: Path) -> Iterator[None]:
    """Create the store if absent and hold its lock. Raises BundleError: busy (75), unsafe or unusable store (30)."""
    try:
        store.mkdir(mode=0o755, parents=True, exist_ok=True)
        if store.stat().st_mode & 0o002:
            raise BundleError(
                t("The store {store} is writable by everybody, so nothing in it can be trusted.", store=store),
                t("Run: chmod o-w {store}", store=store),
                SPACE_IO,
            )
        fd = os.open(store / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise BundleError(
            t("The store {store} cannot be used: {why}.", store=store, why=reason(e)),
            t("Check the path and its permissions."),
            SPACE_IO,
        ) from e
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise BundleError(
                t("Another process is changing the store {store}.", store=store),
                t("Wait until it has finished and try again."),
                BUSY,
            ) from e
        except OSError as e:
            raise BundleError(
                t("The store {store} cannot be locked: {why}.", store=store, why=reason(e)),
                t("Put it on a local disk."),
                SPACE_IO,
            ) from e
        yield
    finally:
        os.close(fd)


def sweep(store: Path, *, partials_except: str | None = None) -> None:
    """Delete entries that were being removed; with `partials_except`, other digests' unfinished ingests too."""
    for path in store.iterdir():
        if path.name.startswith(_GONE):
            remove_tree(path)
        elif partials_except is not None and path.name.endswith((".partial", ".journal")):
            if partials_except in path.name:
                continue
            remove_tree(path)


def remove_tree(path: Path) -> None:
    """Delete a file or tree, read-only directories included (unlinking needs their write bit unless root)."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for directory, _, _ in os.walk(path):
        os.chmod(directory, 0o700)
    shutil.rmtree(path)


def partial_path(store: Path, digest: str) -> Path:
    """Where an ingest of `digest` gathers its files."""
    return store / f".{digest}.partial"


def journal_path(store: Path, digest: str) -> Path:
    """The journal of that ingest."""
    return store / f".{digest}.journal"


def stamps_path(store: Path, digest: str) -> Path:
    """The stamps of a complete entry."""
    return store / f".{digest}.stamps"


def seal(root: int, store: Path, digest: str) -> None:
    """Make everything below `root` read-only and durable, and save the stamps that mark it as verified."""
    tree = untrusted_dir.walk(root)
    stamps: dict[str, Stamp] = {}
    for path in tree.files:
        with untrusted_dir.open_file(root, path) as fd:
            os.fchmod(fd, 0o444)
            os.fsync(fd)
            stamps[path] = stamp(fd)
    for directory in sorted(tree.directories, reverse=True):
        with untrusted_dir.open_directory(root, directory) as fd:
            os.fchmod(fd, 0o555)
            os.fsync(fd)
    os.fchmod(root, 0o555)
    os.fsync(root)
    save_stamps(stamps_path(store, digest), stamps)


def is_sealed(store: Path, digest: str) -> bool:
    """Whether every file of the entry, and no other, is exactly as `seal` left it (nothing is read)."""
    saved = load_stamps(stamps_path(store, digest))
    try:
        with untrusted_dir.open_root(store / digest) as root:
            if not {MANIFEST, SIGNATURE} <= saved.keys() or untrusted_dir.walk(root).files.keys() != saved.keys():
                return False
            for path, expected in saved.items():
                with untrusted_dir.open_file(root, path) as fd:
                    if stamp(fd) != expected:
                        return False
    except BundleError:
        return False
    return True


def _modes(root: int) -> dict[str, int]:
    tree = untrusted_dir.walk(root)
    modes: dict[str, int] = {}
    for path in tree.files:
        with untrusted_dir.open_file(root, path) as fd:
            modes[path] = os.fstat(fd).st_mode
    for path in ("", *tree.directories):
        with untrusted_dir.open_directory(root, path) as fd:
            modes[path or "."] = os.fstat(fd).st_mode
    return modes


def _entry(store: Path, digest: str) -> Path:
    if not _DIGEST.match(digest):
        raise BundleError(
            t("Models in the store are named by 64 hexadecimal digits."), t("List the store first."), USAGE
        )
    path = store / digest
    if path.is_symlink() or not path.is_dir():
        raise _absent(store, digest)
    return path


def _absent(store: Path, digest: str) -> BundleError:
    return BundleError(
        t("The store {store} has no model {digest}.", store=store, digest=digest),
        t("List the store, or ingest the bundle."),
        MISSING,
    )
