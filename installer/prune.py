"""What is older than the release before the live one goes, once the live one has proved itself."""

import contextlib

from installer import changes, fs, release, snapshots
from installer.context import Context
from offline_bundle.errors import BundleError
from offline_bundle.store import remove_model


def prune(context: Context) -> int:
    """Remove releases, code and models that neither the live release nor the one before it uses; the bytes freed.

    A failure here only leaves something behind for the next run to remove.
    """
    layout = context.layout
    committed = context.history.committed
    if committed is None or context.history.open_switch is not None:
        return 0
    kept: set[str] = {name for name in (committed["release"], committed.get("previous")) if name}
    kept |= changes.in_use(committed)
    freed = 0
    with contextlib.suppress(OSError, BundleError):
        for entry in sorted(layout.releases.iterdir()):
            if entry.name not in kept:
                freed += fs.tree_size(entry)
                fs.remove_tree(layout.prefix, entry)
        freed += release.prune_code(layout, kept)
        infos = [release.read_info(layout, name) for name in kept]
        used = {facts["digest"] for info in infos for facts in release.bundles_of(info)}
        for entry in sorted(layout.models.iterdir()):
            if entry.is_dir() and entry.name not in used and len(entry.name) == 64:
                freed += fs.tree_size(entry)
                remove_model(layout.models, entry.name)
        snapshots.prune(layout, {committed.get("snapshot"), committed.get("previous_snapshot")})
    return freed
