"""Signed model bundles: build, inspect, verify, ingest. The format is described in docs/en/bundle.md.

Names are imported when they are used: who only wants to say a sentence (text.py) needs no cryptography. Taking a bundle
into a store is `offline_bundle.ingest.ingest`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import build_bundle
    from .errors import BundleError
    from .manifest import BundleManifest
    from .progress import Progress
    from .verify import VerifiedBundle, inspect_bundle, verify_bundle

__all__ = [
    "BundleError",
    "BundleManifest",
    "Progress",
    "VerifiedBundle",
    "build_bundle",
    "inspect_bundle",
    "verify_bundle",
]

_PLACES = {
    "BundleError": "errors",
    "BundleManifest": "manifest",
    "Progress": "progress",
    "VerifiedBundle": "verify",
    "build_bundle": "build",
    "inspect_bundle": "verify",
    "verify_bundle": "verify",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)
