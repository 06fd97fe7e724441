"""Signed model bundles: build, inspect, verify, ingest. The format is described in docs/en/bundle.md.

Names are imported on first use: a program that only needs a message (text.py) does not load cryptography. A bundle is
copied into a store by `offline_bundle.store.ingest.ingest`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offline_bundle.errors import BundleError
    from offline_bundle.model.build import build_bundle
    from offline_bundle.model.manifest import BundleManifest
    from offline_bundle.model.verify import VerifiedBundle, inspect_bundle, verify_bundle
    from offline_bundle.progress import Progress

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
    "BundleManifest": "model.manifest",
    "Progress": "progress",
    "VerifiedBundle": "model.verify",
    "build_bundle": "model.build",
    "inspect_bundle": "model.verify",
    "verify_bundle": "model.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)
