"""Verify a signed directory, whichever kind of bundle it holds.

    1. check_signed_manifest   model.sig against the pinned keys, then bundle.json, then that both name the same files
    2. check_file_set          exactly the signed files are there, with the signed sizes
    3. check_bytes             every byte

Nothing but the signature's envelope is parsed before the signature is verified. offline_bundle/model/verify.py and
offline_bundle/runtime/verify.py run these steps; store/ingest.py copies a model between the second and the third.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from offline_bundle import limits, names, untrusted_dir
from offline_bundle.bundle.manifest import MANIFEST, SIGNATURE, File, Manifest
from offline_bundle.errors import CONTENT, REPLAY, SPACE_IO, UNTRUSTED, BundleError
from offline_bundle.parallel import Reader, Tick, run
from offline_bundle.progress import Progress
from offline_bundle.signing import model_signing
from offline_bundle.signing.keys import PublicKey
from offline_bundle.text import t

AnyManifest = TypeVar("AnyManifest", bound=Manifest[Any])


@dataclass(frozen=True)
class SignedManifest(Generic[AnyManifest]):
    """A manifest whose signature is valid, with the exact bytes that were checked."""

    manifest: AnyManifest
    manifest_bytes: bytes
    signature_bytes: bytes
    digest: str
    key_fingerprint: str


def check_signed_manifest(
    root: int, trusted: Mapping[str, PublicKey], kind: type[AnyManifest], min_sequence: int | None = None
) -> SignedManifest[AnyManifest]:
    """The manifest of the open directory `root`, of the class `kind`, once its signature and its list of files hold.

    Raises BundleError: untrusted, content, replay (sequence below `min_sequence`), missing, space/IO.
    """
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
    resources, key = model_signing.verify(signature, trusted)
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
    manifest = kind.parse(raw)
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
            t("{title} has sequence {sequence}, but {min_sequence} was already accepted here: an older bundle is being "
              "replayed.", title=manifest.title, sequence=manifest.sequence, min_sequence=min_sequence),
            t("Use the newest bundle from the vendor. To go back on purpose, roll the installation back."),
            REPLAY,
        )
    return SignedManifest(manifest, raw, signature, digest, key.fingerprint)


def check_file_set(root: int, signed: SignedManifest[Any]) -> None:
    """Exactly the signed files and their directories are there, with the signed sizes, and nothing else."""
    sizes = {f.path: f.size for f in signed.manifest.files}
    sizes |= {MANIFEST: len(signed.manifest_bytes), SIGNATURE: len(signed.signature_bytes)}
    untrusted_dir.check_file_set(root, sizes)


def check_bytes(root: int, files: Sequence[File], progress: Progress, *, full: bool = False) -> None:
    """Hash every file in pieces, on all cores. `full` also computes each file's own SHA-256, with one thread a file.

    Progress stage: ``verify``. Raises BundleError: content, missing, space/IO.
    """
    reader = Reader(root)

    def check(task: tuple[File, list[tuple[int, int, str]]], tick: Tick) -> None:
        entry, pieces = task
        whole = hashlib.sha256() if full else None
        with untrusted_dir.open_file(root, entry.path) as fd:
            for offset, length, expected in pieces:
                piece, at, end = hashlib.sha256(), offset, offset + length
                while at < end:
                    view = reader.buffer(entry.read_size, end - at)
                    try:
                        n = reader.read_into(fd, view, at)
                    except OSError as e:
                        raise untrusted_dir.read_failed(entry.path, e) from e
                    if n == 0:
                        raise mismatch(entry, offset, length)
                    piece.update(view[:n])
                    if whole:
                        whole.update(view[:n])
                    at += n
                    tick(n)
                if piece.hexdigest() != expected:
                    raise mismatch(entry, offset, length)
            if os.pread(fd, 1, entry.size):
                raise mismatch(entry, entry.size, 1)
        if whole and whole.hexdigest() != entry.sha256:
            raise BundleError(
                t("{path}: the signed hash of the file and those of its chunks disagree.", path=names.show(entry.path)),
                t("The bundle was made by a broken tool; ask its maker for a new one."),
                CONTENT,
            )

    largest_first = sorted(files, key=lambda f: -f.size)
    tasks = [(f, part) for f in largest_first for part in ([f.pieces()] if full else [[p] for p in f.pieces()])]
    run(tasks, check, stage="verify", total=sum(f.size for f in files), progress=progress, workers=reader.workers)


def mismatch(entry: File, offset: int, length: int) -> BundleError:
    """The error for bytes that are not what was signed."""
    return BundleError(
        t("{path} differs from what was signed, in bytes {first}-{last}: it was damaged or changed after signing.",
          path=names.show(entry.path), first=offset, last=offset + length - 1),
        t("Copy the bundle again from its source; if it happens again, suspect the disk or the vendor's copy."),
        CONTENT,
    )
