"""Ingest: one pass from the medium into the read-only store, verified while it is copied."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .manifest import BundleManifest
from .progress import Progress, silent


@dataclass(frozen=True)
class IngestedModel:
    """A bundle in the store: read-only, complete, verified."""

    path: Path  # store/<digest>, the whole bundle
    manifest: BundleManifest
    digest: str
    key_fingerprint: str
    copied_bytes: int  # 0 when it was there already

    @property
    def model_dir(self) -> Path:
        """The directory that an engine loads."""
        return self.path / "model"


def ingest(
    path: Path,
    trusted_keys: Sequence[Path],
    store: Path,
    *,
    progress: Progress = silent,
    min_sequence: int | None = None,
) -> IngestedModel:
    """Verify `path` while copying it into `store/<digest>`; raises BundleError (10, 11, 12, 13, 30, 75)."""
    raise NotImplementedError
