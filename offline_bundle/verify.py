"""Verify a bundle: signature → bundle.json → exact file set → chunks in parallel → content rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .manifest import BundleManifest
from .progress import Progress


@dataclass(frozen=True)
class VerifiedBundle:
    """A bundle that held every check at the moment of checking."""

    path: Path
    manifest: BundleManifest
    digest: str  # SHA-256 of bundle.json
    key_fingerprint: str  # of the trusted key that signed it


def verify_bundle(
    path: Path,
    trusted_keys: Sequence[Path],
    *,
    full: bool = False,
    progress: Progress | None = None,
    min_sequence: int | None = None,
) -> VerifiedBundle:
    """Verify the bundle directory `path` against pinned public key files; raises BundleError (10, 11, 12, 13, 30)."""
    raise NotImplementedError


@dataclass(frozen=True)
class Inspection:
    """What a bundle says about itself. Nothing of it is verified."""

    path: Path
    manifest: BundleManifest
    digest: str
    claimed_fingerprint: str | None


def inspect_bundle(path: Path) -> Inspection:
    """Read bundle.json without any key. The result must be shown as NOT VERIFIED."""
    raise NotImplementedError
