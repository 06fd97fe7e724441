"""Verify a runtime on a machine that has Atoll. (On one that has not, install.sh does: offline_bundle/medium.)"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from offline_bundle import limits, untrusted_dir
from offline_bundle.bundle.manifest import MANIFEST
from offline_bundle.bundle.verify import check_bytes, check_file_set, check_signed_manifest
from offline_bundle.errors import BundleError
from offline_bundle.progress import Progress, silent
from offline_bundle.runtime.manifest import RuntimeManifest
from offline_bundle.signing.keys import PublicKey


@dataclass(frozen=True, slots=True)
class VerifiedRuntime:
    """A runtime that passed every check; with `signature_only`, its files' bytes were not among them."""

    path: Path
    manifest: RuntimeManifest
    digest: str
    key_fingerprint: str


def is_runtime(path: Path) -> bool:
    """Whether the directory claims to be a runtime. Proves nothing."""
    try:
        with untrusted_dir.open_root(path) as root:
            return b'"kind":"runtime"' in untrusted_dir.read_small(root, MANIFEST, limits.MAX_MANIFEST)
    except BundleError:
        return False


def inspect_runtime(path: Path) -> RuntimeManifest:
    """What a runtime claims about itself. None of it is verified."""
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
    """Verify the directory `path` against the pinned keys. Progress stage: ``verify``.

    Raises BundleError with exit code 10 (signature or key), 11 (content), 12 (sequence below `min_sequence`), 13
    (path or file missing), 30 (read error).
    """
    with untrusted_dir.open_root(path) as root:
        signed = check_signed_manifest(root, trusted, RuntimeManifest, min_sequence)
        if not signature_only:
            check_file_set(root, signed)
            check_bytes(root, signed.manifest.files, progress)
    return VerifiedRuntime(path, signed.manifest, signed.digest, signed.key_fingerprint)
