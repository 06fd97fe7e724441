"""Signed model bundles: build, inspect, verify, ingest. The format is described in docs/en/bundle.md."""

from .build import build_bundle
from .errors import BundleError
from .ingest import IngestedModel, ingest
from .manifest import BundleManifest
from .progress import Progress
from .verify import VerifiedBundle, inspect_bundle, verify_bundle

__all__ = [
    "BundleError",
    "BundleManifest",
    "IngestedModel",
    "Progress",
    "VerifiedBundle",
    "build_bundle",
    "ingest",
    "inspect_bundle",
    "verify_bundle",
]
