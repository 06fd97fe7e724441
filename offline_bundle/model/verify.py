"""Verify a bundle: signature → bundle.json → exact file set → chunks in parallel → content rules.

Nothing but the signature's envelope is parsed before the signature holds, and no file's content before its hash does.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offline_bundle import limits, names
from offline_bundle.errors import CONTENT, REPLAY, SPACE_IO, UNTRUSTED, BundleError
from offline_bundle.model import content
from offline_bundle.model.manifest import MANIFEST, SIGNATURE, BundleManifest, FileEntry
from offline_bundle.parallel import Reader, Tick, run
from offline_bundle.progress import Progress, silent
from offline_bundle.signing import keys, oms
from offline_bundle.store import untrusted_dir
from offline_bundle.text import t


@dataclass(frozen=True)
class VerifiedBundle:
    """A bundle that held every check at the moment of checking. To load it safely, ingest it."""

    path: Path
    manifest: BundleManifest
    digest: str  # SHA-256 of bundle.json
    key_fingerprint: str  # of the trusted key that signed it


@dataclass(frozen=True)
class Inspection:
    """What a bundle says about itself. Nothing of it is verified."""

    path: Path
    manifest: BundleManifest
    digest: str
    claimed_fingerprint: str | None  # None: there is no readable signature


@dataclass(frozen=True)
class SignedManifest:
    """A manifest whose signature holds, with the exact bytes that were checked."""

    manifest: BundleManifest
    manifest_bytes: bytes
    signature_bytes: bytes
    digest: str
    key_fingerprint: str


def verify_bundle(
    path: Path,
    trusted_keys: Sequence[Path],
    *,
    full: bool = False,
    progress: Progress | None = None,
    min_sequence: int | None = None,
) -> VerifiedBundle:
    """Verify the bundle directory `path` against pinned public key files (which must lie outside of it).

    `full` also recomputes every whole-file SHA-256 (one thread a file), as an outside party's tool would.
    Progress stage: ``verify``.

    Raises BundleError with exit code 10 (signature or key), 11 (content), 12 (sequence below `min_sequence`),
    13 (path or file missing), 30 (read error), 2 (no key given).
    """
    trusted = keys.load_trusted(trusted_keys, path)
    with untrusted_dir.open_root(path) as root:
        signed = check_signed_manifest(root, trusted, min_sequence)
        files = {f.path: f for f in signed.manifest.files}
        check_file_set(root, signed)
        _hash_files(root, signed.manifest, full=full, progress=progress or silent)
        for entry in signed.manifest.files:
            with untrusted_dir.open_file(root, entry.path) as fd:
                content.check_file(fd, entry)
        content.check_whole(
            lambda p: untrusted_dir.read_small(root, p, limits.MAX_PARSED), files, signed.manifest.chat_template_sha256
        )
    return VerifiedBundle(path, signed.manifest, signed.digest, signed.key_fingerprint)


def inspect_bundle(path: Path) -> Inspection:
    """Read bundle.json without any key; whoever shows the result must say that it is NOT VERIFIED.

    Raises BundleError: 11 (not a manifest), 13 (missing), 30 (read error).
    """
    with untrusted_dir.open_root(path) as root:
        manifest = BundleManifest.parse(untrusted_dir.read_small(root, MANIFEST, limits.MAX_MANIFEST))
        try:
            claimed = oms.claimed_fingerprint(untrusted_dir.read_small(root, SIGNATURE, limits.MAX_SIGNATURE))
        except BundleError:
            claimed = None
    return Inspection(path, manifest, manifest.digest, claimed)


def check_signed_manifest(root: int, trusted: dict[str, keys.PublicKey], min_sequence: int | None) -> SignedManifest:
    """Steps one and two: the signature, then bundle.json, then that both name the same files and hashes."""
    try:
        signature = untrusted_dir.read_small(root, SIGNATURE, limits.MAX_SIGNATURE)
    except BundleError as e:
        if e.exit_code == SPACE_IO:
            raise
        raise BundleError(
            t("The bundle has no usable signature: {message}", message=e.message),
            t("An unsigned bundle is never accepted; get it again from its vendor."),
            UNTRUSTED,
        ) from e
    resources, key = oms.verify(signature, trusted)
    signed_digest = resources.pop(MANIFEST, None)
    if signed_digest is None:
        raise BundleError(
            t("The signature does not cover bundle.json."), t("Build it with 'atoll bundle build'."), CONTENT
        )
    raw = untrusted_dir.read_small(root, MANIFEST, limits.MAX_MANIFEST)
    digest = hashlib.sha256(raw).hexdigest()
    if digest != signed_digest:
        raise BundleError(
            t("bundle.json is not the file that was signed: it was changed after signing."),
            t("Do not use this bundle. Get it again from its vendor."),
            CONTENT,
        )
    manifest = BundleManifest.parse(raw)
    listed = {f.path: f.sha256 for f in manifest.files}
    if listed != resources:
        odd = sorted(p for p in listed.keys() | resources.keys() if listed.get(p) != resources.get(p))
        raise BundleError(
            t("bundle.json and the signature disagree about {odd}.", odd=names.show(odd[0])),
            t("Build the bundle again."),
            CONTENT,
        )
    if min_sequence is not None and manifest.sequence < min_sequence:
        raise BundleError(
            t("{name} {version} has sequence {sequence}, but {min_sequence} was already accepted here: an older "
              "bundle is being replayed.", name=manifest.name, version=manifest.version, sequence=manifest.sequence,
              min_sequence=min_sequence),
            t("Use the newest bundle from the vendor. To go back on purpose, roll the installation back."),
            REPLAY,
        )
    return SignedManifest(manifest, raw, signature, digest, key.fingerprint)


def check_file_set(root: int, signed: SignedManifest) -> None:
    """Step three: exactly the signed files and their directories are there, with the signed sizes, nothing else."""
    tree = untrusted_dir.walk(root)
    sizes = {f.path: f.size for f in signed.manifest.files}
    sizes[MANIFEST] = len(signed.manifest_bytes)
    sizes[SIGNATURE] = len(signed.signature_bytes)
    directories = {path[:i] for path in sizes for i, c in enumerate(path) if c == "/"}
    for path in sorted((tree.files.keys() - sizes.keys()) | (tree.directories - directories)):
        raise BundleError(
            t("{path} is not part of the signed bundle.", path=names.show(path)), names.litter_hint(path), CONTENT
        )
    for path, size in sizes.items():
        if path not in tree.files:
            raise untrusted_dir.missing(path)
        if tree.files[path] != size:
            raise BundleError(
                t("{path} has {files} bytes where {size} were signed: it is cut off or changed.",
                  path=names.show(path), files=tree.files[path], size=size),
                t("Copy the bundle again from its source."),
                CONTENT,
            )


def chunk_mismatch(entry: FileEntry, offset: int, length: int) -> BundleError:
    """The error for bytes that are not what was signed."""
    return BundleError(
        t("{path} differs from what was signed, in bytes {offset}-{offset2}: it was damaged or changed after signing.",
          path=names.show(entry.path), offset=offset, offset2=offset + length - 1),
        t("Copy the bundle again from its source; if it happens again, suspect the disk or the vendor's copy."),
        CONTENT,
    )


def chunk_span(entry: FileEntry, index: int) -> tuple[int, int]:
    """(offset, length) of a chunk in its file."""
    offset = index * entry.chunk_size
    return offset, min(entry.chunk_size, entry.size - offset)


def _hash_files(root: int, manifest: BundleManifest, *, full: bool, progress: Progress) -> None:
    """Step four: every byte. A task is one chunk, or (full) one file."""
    reader = Reader(root)

    def check(task: tuple[FileEntry, range], tick: Tick) -> None:
        entry, indexes = task
        whole = hashlib.sha256() if full else None
        with untrusted_dir.open_file(root, entry.path) as fd:
            for index in indexes:
                offset, length = chunk_span(entry, index)
                chunk = hashlib.sha256()
                end, view = offset + length, reader.buffer(entry.chunk_size)
                at = offset
                while at < end:
                    try:
                        n = reader.read_into(fd, view[: end - at], at)
                    except OSError as e:
                        raise untrusted_dir.read_failed(entry.path, e) from e
                    if n == 0:
                        raise chunk_mismatch(entry, offset, length)
                    chunk.update(view[:n])
                    if whole:
                        whole.update(view[:n])
                    at += n
                    tick(n)
                if chunk.hexdigest() != entry.chunks[index]:
                    raise chunk_mismatch(entry, offset, length)
            if os.pread(fd, 1, entry.size):
                raise chunk_mismatch(entry, entry.size, 1)
        if whole and whole.hexdigest() != entry.sha256:
            raise BundleError(
                t("{path}: the signed hash of the file and those of its chunks disagree.", path=names.show(entry.path)),
                t("The bundle was made by a broken tool; ask its maker for a new one."),
                CONTENT,
            )

    tasks: list[tuple[FileEntry, range]] = []
    for entry in manifest.files:
        every = range(len(entry.chunks))
        tasks += [(entry, every)] if full else [(entry, range(i, i + 1)) for i in every]
    run(tasks, check, stage="verify", total=manifest.total_bytes, progress=progress, workers=reader.workers)
