"""Remove what is older than the previous release, once the live release is proven."""

import contextlib

from installer.access import vendor_keys
from installer.base import fs
from installer.base.errors import InstallError
from installer.base.layout import Layout
from installer.decide import changes
from installer.decide.context import Context
from installer.release import release
from installer.service import snapshots
from offline_bundle.errors import BundleError
from offline_bundle.store.store import remove_model


def _revoked(layout: Layout, name: str) -> bool:
    """Whether a part of this release is signed by a revoked key: then nobody can go back to it."""
    try:
        gone = vendor_keys.revoked(layout)
    except (InstallError, OSError):
        return False
    return any(fingerprint in gone for fingerprint in vendor_keys.signed_by(release.read_info(layout, name)).values())


def prune(context: Context) -> int:
    """Remove releases, code and models that neither the live release nor the previous one uses. Returns the bytes
    freed.

    A failure here only leaves something for the next run to remove.
    """
    layout = context.layout
    committed = context.history.committed
    if committed is None or context.history.open_switch is not None:
        return 0
    previous = committed.get("previous")
    kept: set[str] = {committed["release"], *([previous] if previous and not _revoked(layout, previous) else [])}
    leads_to = set(kept)  # a part still running from an earlier release may run a model of this one
    kept |= changes.in_use(committed)
    freed = 0
    with contextlib.suppress(OSError, BundleError):
        for entry in sorted(layout.releases.iterdir()):
            if entry.name not in kept:
                freed += fs.tree_size(entry)
                fs.remove_tree(layout.prefix, entry)
        freed += release.prune_code(layout, kept)
        infos = [release.read_info(layout, name) for name in leads_to]
        used = {facts["digest"] for info in infos for facts in release.bundles_of(info)}
        for entry in sorted(layout.models.iterdir()):
            if entry.is_dir() and entry.name not in used and len(entry.name) == 64:
                freed += fs.tree_size(entry)
                remove_model(layout.models, entry.name)
        snapshots.prune(layout, {committed.get("snapshot"), committed.get("previous_snapshot")})
    return freed
