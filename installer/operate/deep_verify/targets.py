"""What a deep check reads: the live release, every code tree, every model of the store; and how each is checked."""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from platform import python_version
from typing import Any

from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, t
from installer.base.journal import History
from installer.base.layout import Layout
from installer.operate.deep_verify.report import Target
from installer.release import release, replay_guard
from installer.release.code_tree import is_bytecode, read_facts, verify_code
from offline_bundle import limits
from offline_bundle.bundle.manifest import MANIFEST, SIGNATURE
from offline_bundle.errors import BundleError
from offline_bundle.medium.code_tree.tools import tag
from offline_bundle.progress import Progress
from offline_bundle.signing import model_signing
from offline_bundle.signing.keys import load_trusted
from offline_bundle.store.store import verify_model

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")

Check = Callable[[Target], None]
"""Sets `bytes` of its target. Raises BundleError, InstallError or OSError for what is wrong."""


def targets(
    layout: Layout, history: History, readable: bool, trusted: Sequence[Path], progress: Progress
) -> Iterator[tuple[Target, Check]]:
    """Everything there is to check, including what should be there and is missing."""
    name = release.live(layout)
    yield Target("release", name or "none"), lambda target: _check_release(layout, history, readable, target)
    for tree in code_trees(layout):
        yield Target("code", tree.name), lambda target, at=tree: _check_code(at, trusted, progress, target)
    info = release.read_info(layout, name) if name else {}
    expected = {str(bundle.get("digest")): str(bundle.get("name")) for bundle in release.bundles_of(info)}
    there = {path.name for path in _entries(layout.models)}
    names = {**_names(layout), **expected}
    for digest in sorted(there | expected.keys(), key=lambda d: (d not in expected, names.get(d, ""), d)):
        yield Target("model", names.get(digest, "unknown"), digest), lambda target: _check_model(
            layout, history if readable else None, trusted, progress, target, wanted=target.digest in expected
        )


def _entries(store: Path) -> list[Path]:
    try:
        return [path for path in store.iterdir() if _DIGEST.match(path.name) and not path.is_symlink()]
    except OSError:
        return []


def _names(layout: Layout) -> dict[str, str]:
    """Digest → name, taken from the releases."""
    try:
        releases = [path.name for path in layout.releases.iterdir()]
    except OSError:
        return {}
    bundles = [bundle for name in releases for bundle in release.bundles_of(release.read_info(layout, name))]
    return {str(bundle.get("digest")): str(bundle.get("name")) for bundle in bundles}


def _check_release(layout: Layout, history: History, readable: bool, target: Target) -> None:
    """`current` must lead to the committed release, and that release must be the one its name says."""
    again = t("Install it again from its medium: atoll install MEDIUM")
    if target.name == "none":
        raise InstallError(t("No release is live."), exit_code=ExitCode.MEDIA, hint=again)
    info = release.read_info(layout, target.name)
    wrapper = layout.releases / target.name / "bin/atoll"
    if not info or not wrapper.is_file():
        message = t("The release {name} is not complete: release.json or bin/atoll is missing.", name=target.name)
        raise InstallError(message, exit_code=ExitCode.CONTENT_MISMATCH, hint=again)
    target.bytes = fs.tree_size(wrapper.parent.parent)
    if info.get("release") != target.name:
        message = t("The release {name} calls itself {other}.", name=target.name,
                    other=str(info.get("release"))[:80])
        raise InstallError(message, exit_code=ExitCode.CONTENT_MISMATCH, hint=again)
    if not release.is_as_made(layout, target.name, info):
        message = t("The release {name} was changed after it was made: release.json, bin/atoll or lib differs.",
                    name=target.name)
        raise InstallError(message, exit_code=ExitCode.CONTENT_MISMATCH, hint=again)
    committed = history.committed
    if readable and committed and history.open_switch is None and committed["release"] != target.name:
        raise InstallError(
            t("`current` leads to {name}, but {release} was installed.", name=target.name,
              release=committed["release"]),
            exit_code=ExitCode.CONTENT_MISMATCH,
            why=t("Somebody changed it by hand."),
            hint=t("Go back to what was installed: atoll rollback, or atoll install MEDIUM"),
        )


def code_trees(layout: Layout) -> list[Path]:
    return sorted(path for path in layout.code.glob("*") if (path / "runtime.json").is_file())


def signed_description(tree: Path, trusted: Sequence[Path]) -> dict[str, Any]:
    """runtime.json of a code tree. The signature over share/bundle.json must be valid and must name this very file."""
    share = tree / "share"
    signature = fs.read_regular(share / SIGNATURE, limits.MAX_SIGNATURE)[0]
    resources, _ = model_signing.verify(signature, load_trusted(trusted, tree))
    digest = hashlib.sha256(fs.read_regular(share / MANIFEST, limits.MAX_MANIFEST)[0]).hexdigest()
    facts = read_facts(tree)
    if resources.get(MANIFEST) != digest or facts.get("digest") != digest:
        message = t("The description of the code in {tree} is not the one that was signed.", tree=tree)
        raise InstallError(message, exit_code=ExitCode.CONTENT_MISMATCH, hint=_again())
    return facts


def _again() -> str:
    return t("Stop the service (atoll stop) and install again from the medium, which replaces what differs: "
             "sudo sh install.sh")


def _check_code(tree: Path, trusted: Sequence[Path], progress: Progress, target: Target) -> None:
    """Check the signed description of the code first, then every file."""
    facts = signed_description(tree, trusted)
    differing = verify_code(tree, lambda done, total: progress("code", done, total))
    target.bytes = fs.tree_size(tree)
    if facts.get("abi") != tag():
        target.note = t("Its bytecode was not checked: it was made for another version of Python ({abi}).",
                        abi=str(facts.get("abi"))[:8])
    if not differing:
        return
    names = joined(differing[:3])
    if len(differing) > 3:
        names = t("{names} and {count} more", names=names, count=len(differing) - 3)
    if not all(is_bytecode(path) for path in differing):
        message = t("The code differs from what was installed: {names}.", names=names)
        raise InstallError(message, exit_code=ExitCode.CONTENT_MISMATCH, hint=_again())
    told = [t("Bytecode differs from what the verified sources compile to: {names}.", names=names)]
    made_by, here = str(facts.get("compiled_by"))[:16], python_version()
    if made_by != here:
        told.append(t("It was made by Python {made_by}; this is {here}. An update of Python would explain it.",
                      made_by=made_by, here=here))
    raise InstallError(
        joined(told, " "),
        exit_code=ExitCode.CONTENT_MISMATCH,
        hint=t("Keep a copy of {tree} for the investigation, then rebuild the bytecode: atoll verify "
               "--rebuild-bytecode", tree=tree),
    )


def _check_model(
    layout: Layout,
    history: History | None,
    trusted: Sequence[Path],
    progress: Progress,
    target: Target,
    *,
    wanted: bool,
) -> None:
    try:
        found = verify_model(layout.models, target.digest, trusted, full=False, progress=progress)
    except BundleError:
        if not wanted and not (layout.models / target.digest).exists():
            return  # an upgrade has just removed it
        raise
    target.bytes = found.manifest.total_bytes
    target.name = found.manifest.name
    if history is None:
        return
    newest = replay_guard.last_sequence(layout, found.manifest.name)
    committed = history.committed or {}
    previous = release.read_info(layout, committed["previous"]) if committed.get("previous") else {}
    known = {bundle.get("digest") for facts in (committed, previous) for bundle in release.bundles_of(facts)}
    if newest is not None and found.manifest.sequence < newest and target.digest not in known:
        raise InstallError(
            t("The store holds {name} with sequence {sequence}. A newer one ({newest}) was installed here, and no "
              "install put this one there.", name=target.name, sequence=found.manifest.sequence, newest=newest),
            exit_code=ExitCode.DOWNGRADE,
            why=t("An old model may bring back a fault that a newer one fixed; an attacker may have copied it there."),
            hint=t("Install the newest bundle: atoll install MEDIUM. It removes what no release uses."),
        )
