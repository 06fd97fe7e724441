"""Build and sign a bundle from a model directory."""

from collections.abc import Sequence
from pathlib import Path

from . import limits
from .manifest import Acceptance, Requires
from .progress import Progress, silent


def build_bundle(
    source_model_dir: Path,
    out_dir: Path,
    *,
    name: str,
    version: str,
    sequence: int,
    license_id: str,
    license_file: Path,
    source_repo: str,
    source_revision: str,
    private_key: Path,
    progress: Progress = silent,
    passphrase: bytes | None = None,
    acceptance: Acceptance = "click",
    license_url: str | None = None,
    requires: Requires | None = None,
    exclude: Sequence[str] = (),
    chunk_size: int = limits.DEFAULT_CHUNK,
) -> Path:
    """Copy, hash and sign `source_model_dir` into `out_dir/<name>-<version>` and return that path."""
    raise NotImplementedError
