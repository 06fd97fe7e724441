"""The store of ingested models: `store/<digest>/`, root-owned and read-only."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .manifest import BundleManifest
from .progress import Progress
from .verify import VerifiedBundle


@dataclass(frozen=True)
class StoredModel:
    """One entry of the store, as its (unverified) bundle.json describes it."""

    path: Path
    digest: str
    manifest: BundleManifest

    @property
    def model_dir(self) -> Path:
        """The directory that an engine loads."""
        return self.path / "model"


def list_models(store: Path) -> list[StoredModel]:
    """Complete entries of the store, by name and sequence; partial ones are never listed."""
    raise NotImplementedError


def verify_model(
    store: Path, digest: str, trusted_keys: Sequence[Path], *, deep: bool = True, progress: Progress | None = None
) -> VerifiedBundle:
    """Re-verify an entry: signature and file set always, every byte when `deep`; raises BundleError."""
    raise NotImplementedError


def remove_model(store: Path, digest: str) -> None:
    """Remove an entry; it disappears in one rename. Raises BundleError (13 when absent, 75 when busy)."""
    raise NotImplementedError
