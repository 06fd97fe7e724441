"""Verify a model bundle: its signature, files and bytes (offline_bundle/bundle/verify.py), then the content rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offline_bundle import limits, untrusted_dir
from offline_bundle.bundle.manifest import MANIFEST, SIGNATURE
from offline_bundle.bundle.verify import check_bytes, check_file_set, check_signed_manifest
from offline_bundle.errors import BundleError
from offline_bundle.model import content
from offline_bundle.model.manifest import BundleManifest
from offline_bundle.progress import Progress, silent
from offline_bundle.signing import keys, model_signing


@dataclass(frozen=True)
class VerifiedBundle:
    """A bundle that passed every check when it was checked. To load it safely, ingest it."""

    path: Path
    manifest: BundleManifest
    digest: str  # SHA-256 of bundle.json
    key_fingerprint: str  # of the trusted key that signed it


@dataclass(frozen=True)
class Inspection:
    """What a bundle claims about itself. None of it is verified."""

    path: Path
    manifest: BundleManifest
    digest: str
    claimed_fingerprint: str | None  # None: there is no readable signature


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
        signed = check_signed_manifest(root, trusted, BundleManifest, min_sequence)
        check_file_set(root, signed)
        check_bytes(root, signed.manifest.files, progress or silent, full=full)
        content.check_model(root, signed.manifest)
    return VerifiedBundle(path, signed.manifest, signed.digest, signed.key_fingerprint)


def inspect_bundle(path: Path) -> Inspection:
    """Read bundle.json without any key; the caller that shows the result must say that it is NOT VERIFIED.

    Raises BundleError: 11 (not a manifest), 13 (missing), 30 (read error).
    """
    with untrusted_dir.open_root(path) as root:
        manifest = BundleManifest.parse(untrusted_dir.read_small(root, MANIFEST, limits.MAX_MANIFEST))
        try:
            claimed = model_signing.claimed_fingerprint(untrusted_dir.read_small(root, SIGNATURE, limits.MAX_SIGNATURE))
        except BundleError:
            claimed = None
    return Inspection(path, manifest, manifest.digest, claimed)
