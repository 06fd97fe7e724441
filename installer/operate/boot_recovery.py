"""`atoll settle`: at boot, before any engine starts, undo an upgrade that a power cut interrupted.

Between switch and commit, the new release has not yet passed its smoke test. After a power cut the machine would boot
into it with nobody watching, so the last committed release is restored first. The services start afterwards even if
this fails: an unproven release is better than none.
"""

import contextlib
import sys

from installer.audit import log
from installer.base.errors import ExitCode, InstallError
from installer.base.journal import History, Journal, intact
from installer.base.layout import Layout
from installer.base.lock import InstallLock
from installer.base.recovery_mark import unmark
from installer.base.timestamps import compact_timestamp
from installer.decide.context import Context
from installer.decide.frontend import Unattended
from installer.decide.install_options import InstallOptions
from installer.release import config, release
from installer.service import units
from installer.service.systemd import SystemdService
from installer.steps.activate import drop_private_keys
from installer.steps.undo import put_back

REASON = "The power was cut, or the machine stopped, before the new release had proved itself."


def settle(layout: Layout, *, service: SystemdService | None = None) -> str:
    """If a switch to another release was interrupted, restore the committed one. Returns a sentence about what was
    done.

    Starts nothing and waits for nothing: the boot continues with that. Raises InstallError or OSError if something
    cannot be put back.
    """
    service = service or SystemdService(layout)
    try:
        with InstallLock(layout.lock, "settle"):
            return _settle(layout, service)
    except InstallError as error:
        if error.exit_code != ExitCode.BUSY:
            raise
        return "Another install is running; it restores the proven release itself if it fails."


def _settle(layout: Layout, service: SystemdService) -> str:
    history = History(intact(layout.journal))
    opened, committed = history.open_switch, history.committed
    if opened is None:
        unmark(layout)
        return "No install was interrupted."
    if committed is None or opened["previous"] is None:
        return "The first install was interrupted: there is no earlier release. Run the same install again."
    if service.pids() - {1}:  # systemd (process 1) holds the port
        return "The service is already running and is left as it is. To go back: atoll start"
    previous = opened["previous"]
    if not (layout.releases / previous / "bin/atoll").is_file():
        raise InstallError(f"The release before, {previous}, is not on the disk any more.", exit_code=ExitCode.IO)
    listened = config.read_text(layout.units / units.SOCKET)
    journal = Journal(f"{compact_timestamp()}-settle", intact(layout.journal))
    journal.open(layout.journal)
    try:
        context = Context(InstallOptions(prefix=layout.prefix), layout, Unattended(), service, (), journal, history)
        put_back(context, opened)
        drop_private_keys(context)
        facts = {"to": previous, "cut_off": opened["to"], "kind": opened.get("kind", "install")}
        journal.add("rolled-back", reason=REASON, **facts)
        log.append(layout.audit, "rolled-back", reason=REASON, **facts)
        unmark(layout)
    finally:
        journal.close()
    if config.read_text(layout.units / units.SOCKET) != listened:
        service.reopen()
    with contextlib.suppress(InstallError):  # the boot starts them too
        service.start()
    if opened.get("kind") == "tune":
        return "A tuning was interrupted. The settings from before it were put back."
    return f"The upgrade to {opened['to']} was cut off before it had proved itself. {previous} was put back."


def main() -> int:
    """Entry point of `atoll settle`; returns the exit status."""
    layout = Layout.server()
    try:
        print(settle(layout), file=sys.stderr)
    except (InstallError, OSError) as error:
        why, live = getattr(error, "message", str(error)), release.live(layout)
        print(f"The proven release could not be put back: {why}", file=sys.stderr)
        print(f"The boot goes on with {live}. To try again: atoll start", file=sys.stderr)
        return int(getattr(error, "exit_code", ExitCode.IO))
    return 0
