"""The deep check (`atoll verify`): read every byte of the model store and of the code again, and compare it with what
was signed.

It only reads, and takes no lock that an install needs; a model that an upgrade removes meanwhile is left out. The
result is recorded in state/verify.json for `atoll status`. A check that was interrupted continues with the models that
it had not finished, as long as nobody has touched the finished ones.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from installer.access import vendor_keys
from installer.audit import log
from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import reason, t
from installer.base.journal import History, replay
from installer.base.layout import Layout
from installer.operate.deep_verify.report import Report, Target, age_seconds, last, now
from installer.operate.deep_verify.targets import Check, code_trees, signed_description, targets
from installer.release import release
from installer.release.code_tree import rebuild_bytecode
from offline_bundle.errors import BundleError
from offline_bundle.progress import Progress, silent
from offline_bundle.store.store import is_sealed

GO_ON_WITHIN = 24 * 3600.0   # seconds for which the finished part of an interrupted check is reused
# If several things failed, the most serious one decides the exit code.
_GRAVITY = (ExitCode.UNTRUSTED, ExitCode.CONTENT_MISMATCH, ExitCode.DOWNGRADE, ExitCode.MEDIA, ExitCode.IO)


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
    report = Report(started=now())
    known = {} if everything else _finished_before(layout)
    with _alone(layout) as recording:
        report.recorded = recording
        trusted = trusted_keys if trusted_keys is not None else vendor_keys.keyring(layout)
        history, readable = _history(layout)
        try:
            for target, check in targets(layout, history, readable, trusted, progress):
                _run(target, check, known)
                report.targets.append(target)
                said(target)
            codes = [target.exit_code for target in report.targets if target.exit_code]
            report.exit_code = min(codes, key=_gravity) if codes else 0
            report.outcome = "bad" if codes else "good"
        finally:
            report.finished, report.seconds = now(), round(time.monotonic() - began, 2)
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
        for tree in code_trees(layout):
            signed_description(tree, trusted)
            made[tree.name] = rebuild_bytecode(tree)
            if made[tree.name]:
                log.append(layout.audit, "bytecode-rebuilt", code=tree.name, files=made[tree.name])
    return made


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
    target.at, target.seconds = now(), round(time.monotonic() - began, 2)


def _finished_before(layout: Layout) -> dict[str, Target]:
    """Models that a recent, interrupted check found good, and that nobody has touched since."""
    before = last(layout)
    if before is None or before.get("outcome") != "interrupted":
        return {}
    found: dict[str, Target] = {}
    for entry in before["targets"]:
        try:
            target = Target(**entry)
            fresh = 0 <= age_seconds(target.at) < GO_ON_WITHIN
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


def _gravity(code: int) -> int:
    return _GRAVITY.index(code) if code in _GRAVITY else len(_GRAVITY)
