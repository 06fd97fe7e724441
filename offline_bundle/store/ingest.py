"""Ingest: one pass from the medium into the read-only store, each chunk hashed while it is copied.

    signature, bundle.json, file set   as when verifying
    copy     read a block → hash → write to store/.<digest>.partial; a wrong chunk hash ends the ingest
    finish   each file: fsync → content rules on the copy → 0444 → journal
    publish  everything durable → rename to store/<digest>

The store only receives bytes that were hashed: the medium is read once, so it cannot show one thing to the verifier and
another to the copier. After a kill or a power loss the next ingest resumes where this one stopped.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from offline_bundle import limits, untrusted_dir
from offline_bundle.bundle.manifest import MANIFEST, SIGNATURE
from offline_bundle.bundle.verify import SignedManifest, check_file_set, check_signed_manifest, mismatch
from offline_bundle.errors import CONTENT, SPACE_IO, BundleError
from offline_bundle.model import content
from offline_bundle.model.manifest import BundleManifest, FileEntry
from offline_bundle.model.verify import verify_bundle
from offline_bundle.parallel import Reader, Tick, run, write_at
from offline_bundle.progress import Progress, silent
from offline_bundle.signing import keys
from offline_bundle.store import store as model_store
from offline_bundle.store.journal import Journal, stamp
from offline_bundle.text import joined, reason, t

_SPACE_SLACK = 16 * limits.MIB
_CREATE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_RESUME = t("The part already copied is kept: run the same command again to resume.")


@dataclass(frozen=True)
class IngestedModel:
    """A bundle in the store: read-only, complete, verified."""

    path: Path  # store/<digest>, the whole bundle
    manifest: BundleManifest
    digest: str
    key_fingerprint: str
    copied_bytes: int  # read from the medium by this call; 0 when the model was in the store already

    @property
    def model_dir(self) -> Path:
        """The directory that an engine loads."""
        return self.path / "model"


class _Refused(Exception):
    """The signed content breaks a content rule: a retry cannot succeed, so nothing is kept."""

    def __init__(self, error: BundleError) -> None:
        super().__init__(str(error))
        self.error = error


def ingest(
    path: Path,
    trusted_keys: Sequence[Path],
    store: Path,
    *,
    progress: Progress = silent,
    min_sequence: int | None = None,
) -> IngestedModel:
    """Verify the bundle `path` while copying it into `store/<digest>`; returns at once if it is already there, intact.

    `trusted_keys` are pinned public keys outside the medium. `min_sequence` refuses older bundles (replay). Progress
    stages: ``recheck`` (hashing what an interrupted ingest left, or an entry whose files were touched), ``copy``.

    Raises BundleError with exit code 10, 11, 12, 13 as `verify.verify_bundle` does; 30 (no space, I/O), 75 (another
    process is changing the store). An entry that is damaged is replaced from the medium.
    """
    trusted = keys.load_trusted(trusted_keys, path)
    with untrusted_dir.open_root(path) as root:
        signed = check_signed_manifest(root, trusted, BundleManifest, min_sequence)
        with model_store.locked(store):
            model_store.sweep(store)
            entry = store / signed.digest
            copied = 0
            if not _intact(store, signed, trusted_keys, progress):
                check_file_set(root, signed)
                try:
                    copied = _Ingest(root, signed, store, progress).run()
                except _Refused as e:
                    _discard(store, signed.digest)
                    raise e.error from e
                except OSError as e:
                    raise _write_failed(store, e) from e
            _discard(store, signed.digest)
    return IngestedModel(entry, signed.manifest, signed.digest, signed.key_fingerprint, copied)


def _intact(
    store: Path, signed: SignedManifest[BundleManifest], trusted_keys: Sequence[Path], progress: Progress
) -> bool:
    """Whether the entry is in the store and undamaged; a damaged one is removed."""
    entry = store / signed.digest
    if not os.path.lexists(entry):
        return False
    try:
        if model_store.is_sealed(store, signed.digest):
            with untrusted_dir.open_root(entry) as root:  # another key may have signed the same files
                check_signed_manifest(root, keys.load_trusted(trusted_keys, entry), BundleManifest)
            return True
        verify_bundle(entry, trusted_keys, progress=lambda _, done, total: progress("recheck", done, total))
        with untrusted_dir.open_root(entry) as root:
            model_store.seal(root, store, signed.digest)
    except BundleError as e:
        if e.exit_code == SPACE_IO:
            raise
        os.rename(entry, store / f".damaged-{signed.digest}")
        model_store.sweep(store)  # its space is needed for the good copy
        return False
    return True


def _discard(store: Path, digest: str) -> None:
    model_store.remove_tree(model_store.partial_path(store, digest))
    model_store.journal_path(store, digest).unlink(missing_ok=True)


class _Ingest:
    """One run of the copy, under the lock of the store."""

    def __init__(self, root: int, signed: SignedManifest[BundleManifest], store: Path, progress: Progress) -> None:
        self.root, self.signed, self.store, self.progress = root, signed, store, progress
        self.partial = model_store.partial_path(store, signed.digest)
        self.reader = Reader(root)
        self.left: Counter[str] = Counter()  # chunks still to come, by file
        self.left_lock = Lock()

    def run(self) -> int:
        """Copy what is missing and publish the entry; returns the bytes read from the medium."""
        files = self.signed.manifest.files
        self._open_partial()
        self.journal = Journal(model_store.journal_path(self.store, self.signed.digest))
        try:
            todo = self._resume(files)
            need = sum(e.span(i)[1] for e, i in todo)
            self._check_space(need)
            self.left.update(e.path for e, _ in todo)
            for entry in files:
                if entry.path not in self.left and entry.path not in self.journal.files:
                    self._finish(entry)
            total = self.signed.manifest.total_bytes
            run(
                todo,
                self._copy,
                stage="copy",
                total=total,
                start=total - need,
                progress=self.progress,
                workers=self.reader.workers,
            )
            self._publish()
        finally:
            self.journal.close()
            os.close(self.stage)
        return need

    def _open_partial(self) -> None:
        """Open the staging directory; one that holds anything unexpected is emptied."""
        wanted = {f.path for f in self.signed.manifest.files}
        try:
            with untrusted_dir.open_root(self.partial) as fd:
                strange = untrusted_dir.walk(fd).files.keys() - wanted - {MANIFEST, SIGNATURE}
        except BundleError:
            strange = {"?"}
        if strange:
            _discard(self.store, self.signed.digest)
        self.partial.mkdir(mode=0o700, exist_ok=True)
        self.partial.chmod(0o700)
        for directory in sorted({p.rpartition("/")[0] for p in wanted}):
            for step in (d for i, c in enumerate(directory + "/") if c == "/" and (d := directory[:i])):
                (self.partial / step).mkdir(mode=0o700, exist_ok=True)
                (self.partial / step).chmod(0o700)
        self.stage = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _resume(self, files: Sequence[FileEntry]) -> list[tuple[FileEntry, int]]:
        """What still has to be copied: (file, chunk) in file order."""
        recheck: list[tuple[FileEntry, int]] = []
        for entry in files:
            with self._staged(entry) as f:
                if self.journal.files.get(entry.path) == stamp(f.fileno()):
                    continue
                self.journal.files.pop(entry.path, None)
                os.fchmod(f.fileno(), 0o600)
                os.ftruncate(f.fileno(), entry.size)
            hinted = self.journal.chunks.get(entry.path, set())
            recheck += [(entry, i) for i in range(len(entry.chunks)) if i in hinted]
        good: set[tuple[str, int]] = set()
        here = Reader(self.stage)

        def check(task: tuple[FileEntry, int], tick: Tick) -> None:
            entry, index = task
            at, length = entry.span(index)
            end, digest = at + length, hashlib.sha256()
            with untrusted_dir.open_file(self.stage, entry.path) as fd:
                while at < end:
                    view = here.buffer(entry.chunk_size, end - at)
                    here.read_into(fd, view, at)
                    digest.update(view)
                    at += len(view)
                    tick(len(view))
            if digest.hexdigest() == entry.chunks[index]:
                good.add((entry.path, index))

        if recheck:
            total = sum(e.span(i)[1] for e, i in recheck)
            run(recheck, check, stage="recheck", total=total, progress=self.progress)
        return [
            (entry, i)
            for entry in files
            if entry.path not in self.journal.files
            for i in range(len(entry.chunks))
            if (entry.path, i) not in good
        ]

    def _staged(self, entry: FileEntry):
        """The staged copy, created when absent; read-only leftovers are opened for writing again."""
        directory, _, name = entry.path.rpartition("/")
        with untrusted_dir.open_directory(self.stage, directory) as parent:
            try:
                fd = os.open(name, _CREATE, 0o600, dir_fd=parent)
            except PermissionError:  # a finished 0444 file, and we are not root: its stamp needs no write access
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
                if self.journal.files.get(entry.path) != stamp(fd):
                    os.fchmod(fd, 0o600)
                    os.close(fd)
                    fd = os.open(name, _CREATE, 0o600, dir_fd=parent)
        return os.fdopen(fd, "rb", buffering=0)

    def _check_space(self, need: int) -> None:
        """Refuse before copying if it cannot fit, after deleting leftovers of other ingests."""
        for attempt in (0, 1):
            info = os.fstatvfs(self.stage)
            free = info.f_bavail * info.f_frsize
            if free >= need + _SPACE_SLACK:
                return
            if attempt == 0:
                model_store.sweep(self.store, partials_except=self.signed.digest)
        raise BundleError(
            t("The store's disk has {free:,} bytes free; {need:,} are needed for {name} {version}.", free=free,
              need=need + _SPACE_SLACK, name=self.signed.manifest.name, version=self.signed.manifest.version),
            t("Free space or remove a model that is no longer used, then run the same command again."),
            SPACE_IO,
        )

    def _copy(self, task: tuple[FileEntry, int], tick: Tick) -> None:
        """Read, hash and write one chunk. Only a chunk with the right hash enters the journal."""
        entry, index = task
        start, length = entry.span(index)
        at, end, digest = start, start + length, hashlib.sha256()
        with untrusted_dir.open_file(self.root, entry.path) as source, self._staged(entry) as target:
            if os.fstat(source).st_size != entry.size:
                raise mismatch(entry, start, length)
            while at < end:
                view = self.reader.buffer(entry.chunk_size, end - at)
                try:
                    got = self.reader.read_into(source, view, at)
                except OSError as e:
                    failed = untrusted_dir.read_failed(entry.path, e)
                    raise BundleError(failed.message, joined([failed.hint, _RESUME], " "), failed.exit_code) from e
                if got != len(view):
                    raise mismatch(entry, start, length)
                digest.update(view)
                write_at(target.fileno(), view, at)
                at += len(view)
                tick(len(view))
            os.posix_fadvise(source, start, length, os.POSIX_FADV_DONTNEED)  # keep the copy in the page cache instead
        if digest.hexdigest() != entry.chunks[index]:
            raise mismatch(entry, start, length)
        self.journal.chunk_written(entry.path, index)
        with self.left_lock:
            self.left[entry.path] -= 1
            last = self.left[entry.path] == 0
        if last:
            self._finish(entry)

    def _finish(self, entry: FileEntry) -> None:
        """A file is complete: make it durable, apply the content rules to the copy, make it read-only."""
        with untrusted_dir.open_file(self.stage, entry.path) as fd:
            os.fsync(fd)
            try:
                content.check_file(fd, entry)
            except BundleError as e:
                raise _Refused(e) from e
            os.fchmod(fd, 0o444)
            os.fsync(fd)
            self.journal.file_finished(entry.path, fd)

    def _publish(self) -> None:
        """Add manifest and signature (from memory, as checked), seal the entry, and rename it into place."""
        for name, data in ((MANIFEST, self.signed.manifest_bytes), (SIGNATURE, self.signed.signature_bytes)):
            path = self.partial / name
            path.unlink(missing_ok=True)
            fd = os.open(path, _CREATE | os.O_EXCL, 0o600)
            try:
                write_at(fd, memoryview(data), 0)
            finally:
                os.close(fd)
        check_file_set(self.stage, self.signed)
        try:
            content.check_whole(self.stage, self.signed.manifest)
        except BundleError as e:
            raise _Refused(e) if e.exit_code == CONTENT else e from e
        model_store.seal(self.stage, self.store, self.signed.digest)
        os.rename(self.partial, self.store / self.signed.digest)
        with untrusted_dir.open_root(self.store) as fd:
            os.fsync(fd)


def _write_failed(store: Path, e: OSError) -> BundleError:
    return BundleError(
        t("Writing to the store {store} failed: {why}.", store=store, why=reason(e)),
        joined([t("Free space or check the disk."), _RESUME], " "),
        SPACE_IO,
    )
