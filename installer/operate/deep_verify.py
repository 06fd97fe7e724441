"""The deep check (`atoll verify`): read every byte of the model store and of the code again, and compare it with what
was signed.

It only reads, and takes no lock that an install needs; a model that an upgrade removes meanwhile is left out. The
result is recorded in state/verify.json for `atoll status`. A check that was interrupted continues with the models that
it had not finished, as long as nobody has touched the finished ones.
"""

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from platform import python_version
from typing import Any, Literal

from installer.access import vendor_keys
from installer.audit import log
from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, reason, t
from installer.base.journal import History, replay
from installer.base.layout import Layout
from installer.base.messages import with_ids, without_ids
from installer.release import release, replay_guard
from installer.release.code_tree import is_bytecode, read_facts, rebuild_bytecode, verify_code
from offline_bundle import limits
from offline_bundle.bundle.manifest import MANIFEST, SIGNATURE
from offline_bundle.errors import BundleError
from offline_bundle.medium.code_tree.tools import tag
from offline_bundle.progress import Progress, silent
from offline_bundle.signing import model_signing
from offline_bundle.signing.keys import load_trusted
from offline_bundle.store.store import is_sealed, verify_model

GO_ON_WITHIN = 24 * 3600.0   # seconds for which the finished part of an interrupted check is reused
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
# If several things failed, the most serious one decides the exit code.
_GRAVITY = (ExitCode.UNTRUSTED, ExitCode.CONTENT_MISMATCH, ExitCode.DOWNGRADE, ExitCode.MEDIA, ExitCode.IO)

Kind = Literal["release", "code", "model"]


@dataclass(slots=True)
class Target:
    """One thing that was checked. `exit_code` is 0 if it is as it was signed."""

    kind: Kind
    name: str
    digest: str = ""
    exit_code: int = 0
    error: str = ""
    hint: str = ""
    bytes: int = 0
    seconds: float = 0.0
    at: str = ""
    note: str = ""          # what could not be checked
    kept: bool = False      # an interrupted check found it good; it was not read again


@dataclass(slots=True)
class Report:
    """A whole check. `outcome` is good, bad, or interrupted (only what was finished is listed)."""

    started: str
    outcome: Literal["good", "bad", "interrupted"] = "interrupted"
    exit_code: int = int(ExitCode.INTERRUPTED)
    finished: str = ""
    seconds: float = 0.0
    bytes: int = 0
    targets: list[Target] = field(default_factory=list)
    recorded: bool = True

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": 1, **asdict(self)}

    def to_record(self) -> dict[str, Any]:
        """The same for the state file: each text keeps its message id."""
        texts = [with_ids({field.name: getattr(target, field.name) for field in fields(target)})
                 for target in self.targets]  # fmt: skip
        return self.to_json() | {"targets": texts}


def verify(
    layout: Layout,
    *,
    progress: Progress = silent,
    said: Callable[[Target], None] = lambda target: None,
    everything: bool = False,
    trusted_keys: Sequence[Path] | None = None,
) -> Report:
    """Check everything. `said` is called with each target when it is done. `everything`: also check again what an
    interrupted check had finished.

    Raises InstallError: nothing installed (2), another check is running (75). Findings are reported, not raised.
    """
    began = time.monotonic()
    report = Report(started=_now())
    known = {} if everything else _finished_before(layout)
    with _alone(layout) as recording:
        report.recorded = recording
        trusted = trusted_keys if trusted_keys is not None else vendor_keys.keyring(layout)
        history, readable = _history(layout)
        try:
            for target, check in _targets(layout, history, readable, trusted, progress):
                _run(target, check, known)
                report.targets.append(target)
                said(target)
            codes = [target.exit_code for target in report.targets if target.exit_code]
            report.exit_code = min(codes, key=_gravity) if codes else 0
            report.outcome = "bad" if codes else "good"
        finally:
            report.finished, report.seconds = _now(), round(time.monotonic() - began, 2)
            report.bytes = sum(target.bytes for target in report.targets)
            if recording:
                fs.write_atomic(layout.verify_state, json.dumps(report.to_record(), indent=1) + "\n", 0o644)
    return report


def rebuild(layout: Layout, *, trusted_keys: Sequence[Path] | None = None) -> dict[str, int]:
    """Rebuild the bytecode of every code tree that does not match its sources. Returns code tree -> number of files
    that differed.

    Raises InstallError: the signature or a source is not as signed (10, 11), not the installation's owner (30).
    """
    trusted = trusted_keys if trusted_keys is not None else vendor_keys.keyring(layout)
    made: dict[str, int] = {}
    with _alone(layout) as owner:
        if not owner:
            raise InstallError(
                t("Only the installation's owner can change the code."), exit_code=ExitCode.IO,
                changed=t("Nothing was changed."), hint=t("Run it with sudo."),
            )
        for tree in _trees(layout):
            _signed_description(tree, trusted)
            made[tree.name] = rebuild_bytecode(tree)
            if made[tree.name]:
                log.append(layout.audit, "bytecode-rebuilt", code=tree.name, files=made[tree.name])
    return made


def last(layout: Layout) -> dict[str, Any] | None:
    """The recorded result of the last check; None if there was none, or if it cannot be read."""
    try:
        found = json.loads(fs.read_regular(layout.verify_state, 1 << 20)[0])
        if not isinstance(found, dict) or not isinstance(found.get("targets"), list):
            return None
        return found | {"targets": [without_ids(target) for target in found["targets"] if isinstance(target, dict)]}
    except (OSError, ValueError):
        return None


Check = Callable[[Target], None]
"""Sets `bytes` of its target. Raises BundleError, InstallError or OSError for what is wrong."""


def _targets(
    layout: Layout, history: History, readable: bool, trusted: Sequence[Path], progress: Progress
) -> Iterator[tuple[Target, Check]]:
    """Everything there is to check, including what should be there and is missing."""
    name = release.live(layout)
    yield Target("release", name or "none"), lambda target: _check_release(layout, history, readable, target)
    for tree in _trees(layout):
        yield Target("code", tree.name), lambda target, at=tree: _check_code(at, trusted, progress, target)
    info = release.read_info(layout, name) if name else {}
    expected = {str(bundle.get("digest")): str(bundle.get("name")) for bundle in release.bundles_of(info)}
    there = {path.name for path in _entries(layout.models)}
    names = {**_names(layout), **expected}
    for digest in sorted(there | expected.keys(), key=lambda d: (d not in expected, names.get(d, ""), d)):
        yield Target("model", names.get(digest, "unknown"), digest), lambda target: _check_model(
            layout, history if readable else None, trusted, progress, target, wanted=target.digest in expected
        )


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


def _trees(layout: Layout) -> list[Path]:
    return sorted(path for path in layout.code.glob("*") if (path / "runtime.json").is_file())


def _signed_description(tree: Path, trusted: Sequence[Path]) -> dict[str, Any]:
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
    facts = _signed_description(tree, trusted)
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


def _run(target: Target, check: Check, known: dict[str, Target]) -> None:
    """Run one check and write what is wrong into its target."""
    began = time.monotonic()
    earlier = known.get(target.digest) if target.kind == "model" else None
    if earlier is not None:
        target.kept, target.bytes, target.at, target.seconds = True, earlier.bytes, earlier.at, earlier.seconds
        target.name = earlier.name
        return
    try:
        check(target)
    except (BundleError, InstallError) as error:
        target.exit_code, target.error, target.hint = int(error.exit_code), error.message, error.hint
    except OSError as error:
        target.exit_code, target.error = int(ExitCode.IO), t("It could not be read: {why}.", why=reason(error))
        target.hint = t("Users other than root cannot read everything. As root, look at the disk: dmesg")
        if isinstance(error, FileNotFoundError):
            target.exit_code, target.error = int(ExitCode.MEDIA), t("{filename} is missing.", filename=error.filename)
            target.hint = t("Install again from the medium: atoll install MEDIUM")
    target.at, target.seconds = _now(), round(time.monotonic() - began, 2)


def _finished_before(layout: Layout) -> dict[str, Target]:
    """Models that a recent, interrupted check found good, and that nobody has touched since."""
    before = last(layout)
    if before is None or before.get("outcome") != "interrupted":
        return {}
    found: dict[str, Target] = {}
    for entry in before["targets"]:
        try:
            target = Target(**entry)
            fresh = 0 <= time.time() - _seconds(target.at) < GO_ON_WITHIN
        except (TypeError, ValueError):
            continue
        if target.kind == "model" and not target.exit_code and fresh and is_sealed(layout.models, target.digest):
            found[target.digest] = target
    return found


def _history(layout: Layout) -> tuple[History, bool]:
    """What the journal says, and whether this user may read it."""
    try:
        records = replay(layout.journal).records
    except PermissionError:
        records, readable = [], False
    else:
        readable = True
    if not records and release.live(layout) is None:
        raise InstallError(
            t("There is no Atoll installation at {name}.", name=layout.name),
            exit_code=ExitCode.USAGE,
            changed=t("Nothing was changed."),
            hint=t("Give the right directory with --prefix or ATOLL_PREFIX, or install: atoll install --help"),
        )
    return History(records), readable


@contextmanager
def _alone(layout: Layout) -> Iterator[bool]:
    """Allow one check at a time. Yields whether its result can be recorded (only the installation's owner can)."""
    try:
        path = layout.verify_state.with_suffix(".lock")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise InstallError(
            t("Another verification is running."),
            exit_code=ExitCode.BUSY,
            changed=t("Nothing was changed."),
            hint=t("Wait until it has finished; `atoll status` then shows what it found."),
        ) from None
    try:
        yield True
    finally:
        os.close(fd)


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


def _gravity(code: int) -> int:
    return _GRAVITY.index(code) if code in _GRAVITY else len(_GRAVITY)


def _now() -> str:
    return time.strftime(_FORMAT, time.gmtime())


def _seconds(text: str) -> float:
    import calendar

    return float(calendar.timegm(time.strptime(text, _FORMAT)))
