"""Verify a runtime on a machine that has Atoll: signature, bundle.json, the exact set of files, every byte."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from offline_bundle import limits, names, parallel
from offline_bundle.errors import CONTENT, REPLAY, SPACE_IO, UNTRUSTED, BundleError
from offline_bundle.model.manifest import MANIFEST, SIGNATURE
from offline_bundle.progress import Progress, silent
from offline_bundle.runtime.manifest import RuntimeFile, RuntimeManifest
from offline_bundle.signing import oms
from offline_bundle.signing.keys import PublicKey
from offline_bundle.store import untrusted_dir
from offline_bundle.text import t

_TAMPERED = t("Do not use this medium. Get it again from its vendor.")


@dataclass(frozen=True, slots=True)
class VerifiedRuntime:
    """A runtime whose signature held, and whose bytes did too unless only the signature was asked for."""

    path: Path
    manifest: RuntimeManifest
    digest: str
    key_fingerprint: str


def is_runtime(path: Path) -> bool:
    """Whether the directory says that it is a runtime. Proves nothing."""
    try:
        with untrusted_dir.open_root(path) as root:
            return b'"kind":"runtime"' in untrusted_dir.read_small(root, MANIFEST, limits.MAX_MANIFEST)
    except BundleError:
        return False


def inspect_runtime(path: Path) -> RuntimeManifest:
    """What a runtime says about itself. Nothing of it is verified."""
    with untrusted_dir.open_root(path) as root:
        return RuntimeManifest.parse(untrusted_dir.read_small(root, MANIFEST, limits.MAX_MANIFEST))


def verify_runtime(
    path: Path,
    trusted: Mapping[str, PublicKey],
    *,
    min_sequence: int | None = None,
    signature_only: bool = False,
    progress: Progress = silent,
) -> VerifiedRuntime:
    """Hold the directory `path` against the pinned keys. Progress stage: ``verify``.

    Raises BundleError with exit code 10 (signature or key), 11 (content), 12 (sequence below `min_sequence`), 13
    (path or file missing), 30 (read error).
    """
    with untrusted_dir.open_root(path) as root:
        signature, resources, key = _signature(root, trusted)
        text = untrusted_dir.read_small(root, MANIFEST, limits.MAX_MANIFEST)
        digest = hashlib.sha256(text).hexdigest()
        if resources.pop(MANIFEST, None) != digest:
            raise BundleError(t("bundle.json is not the file that was signed."), _TAMPERED, CONTENT)
        manifest = RuntimeManifest.parse(text)
        if {f.path: f.sha256 for f in manifest.files} != resources:
            raise BundleError(t("bundle.json and the signature name different files."), _TAMPERED, CONTENT)
        if min_sequence is not None and manifest.sequence < min_sequence:
            raise BundleError(
                t("This runtime has sequence {sequence}, but {accepted} was already accepted here.",
                  sequence=manifest.sequence, accepted=min_sequence),
                t("Use the newest medium. To go back on purpose: atoll rollback"),
                REPLAY,
            )
        if not signature_only:
            sizes = {f.path: f.size for f in manifest.files}
            _check_file_set(root, {**sizes, MANIFEST: len(text), SIGNATURE: len(signature)})
            _check_bytes(root, manifest, progress)
    return VerifiedRuntime(path, manifest, digest, key.fingerprint)


def _signature(root: int, trusted: Mapping[str, PublicKey]) -> tuple[bytes, dict[str, str], PublicKey]:
    try:
        signature = untrusted_dir.read_small(root, SIGNATURE, limits.MAX_SIGNATURE)
    except BundleError as e:
        if e.exit_code == SPACE_IO:
            raise
        message = t("The runtime has no usable signature: {why}", why=e.message)
        hint = t("An unsigned one is never accepted; get it again from its vendor.")
        raise BundleError(message, hint, UNTRUSTED) from e
    return signature, *oms.verify(signature, trusted)


def _check_file_set(root: int, sizes: Mapping[str, int]) -> None:
    tree = untrusted_dir.walk(root)
    directories = {path[:i] for path in sizes for i, c in enumerate(path) if c == "/"}
    for path in sorted((tree.files.keys() - sizes.keys()) | (tree.directories - directories)):
        message = t("{path} is not part of the signed runtime.", path=names.show(path))
        raise BundleError(message, names.litter_hint(path), CONTENT)
    for path, size in sizes.items():
        if path not in tree.files:
            raise untrusted_dir.missing(path)
        if tree.files[path] != size:
            raise BundleError(
                t("{path} has {found} bytes, not the {size} signed.", path=names.show(path), found=tree.files[path],
                  size=size),
                _TAMPERED,
                CONTENT,
            )


def _check_bytes(root: int, manifest: RuntimeManifest, progress: Progress) -> None:
    reader = parallel.Reader(root)

    def check(entry: RuntimeFile, tick: parallel.Tick) -> None:
        digest, buffer, left = hashlib.sha256(), reader.buffer(limits.DEFAULT_CHUNK), entry.size
        with untrusted_dir.open_file(root, entry.path) as fd:
            while left:
                try:
                    count = reader.read_into(fd, buffer[: min(len(buffer), left)], entry.size - left)
                except OSError as e:
                    raise untrusted_dir.read_failed(entry.path, e) from e
                if not count:
                    break
                digest.update(buffer[:count])
                left -= count
                tick(count)
        if left or digest.hexdigest() != entry.sha256:
            raise BundleError(
                t("{path} differs from what was signed.", path=names.show(entry.path)), _TAMPERED, CONTENT
            )

    largest_first = sorted(manifest.files, key=lambda f: -f.size)
    total, workers = manifest.total_bytes, reader.workers
    parallel.run(largest_first, check, stage="verify", total=total, progress=progress, workers=workers)
