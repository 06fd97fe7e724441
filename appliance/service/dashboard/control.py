"""What an operator may do with the service from the dashboard: the same as the commands of these names."""

from typing import Literal

from installer.base.i18n import t
from installer.base.layout import Layout
from installer.base.timeouts import START_TIMEOUT
from installer.decide.frontend import Unattended
from installer.decide.install_options import InstallOptions
from installer.operate.drain import drain, undrain
from installer.operate.lifecycle import restart, start, stop
from installer.operate.rollback import Rollback
from installer.service.drain_state import DrainState
from installer.support import logs

Action = Literal["start", "stop", "drain", "undrain", "restart", "rollback"]
ACTIONS: dict[Action, str] = {
    "start": t("Start the service"),
    "stop": t("Stop the service: running requests may finish first, new ones are refused"),
    "drain": t("Drain it: running requests may finish, new ones are refused"),
    "undrain": t("Accept requests again after a drain"),
    "restart": t("Restart the service: changed settings apply"),
    "rollback": t("Go back to the previous release"),
}


def do(layout: Layout, action: Action) -> str:
    """Do it, and say what was done. Raises InstallError."""
    match action:
        case "start":
            return start(layout, Unattended(), timeout=START_TIMEOUT).detail
        case "drain":
            return drained(drain(layout))
        case "undrain":
            return drained(undrain(layout))
        case "stop":
            return stop(layout).detail
        case "restart":
            return restart(layout, Unattended(), timeout=START_TIMEOUT).detail
        case "rollback":
            options = InstallOptions(prefix=layout.prefix, start_timeout=START_TIMEOUT)
            return t("release {release} serves", release=Rollback(options, Unattended(), layout=layout).run().release)


def drained(state: DrainState) -> str:
    """What a drain, or its end, has led to."""
    if not state.draining:
        return t("The service accepts requests.")
    if state.in_flight:
        return t("New requests are refused; {count} requests still run.", count=state.in_flight)
    return t("New requests are refused; no request runs.")


def log_lines(layout: Layout, count: int) -> list[str]:
    """The last lines of the service's log, for people. Raises InstallError."""
    return [line.readable() for line in logs.read(layout, lines=count)]
