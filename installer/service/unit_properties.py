"""The properties that `systemctl show` prints of a unit, and the state of a service that they amount to."""

from collections.abc import Mapping

from installer.service.manager import ServiceState

PROPERTIES = ("Id", "LoadState", "ActiveState", "SubState", "MainPID", "NRestarts", "ExecMainCode", "ExecMainStatus",
               "Result", "StateChangeTimestamp", "Job", "ControlGroup", "StatusText", "CanReload",
               "InvocationID")  # fmt: skip
UP = ("active", "activating", "reloading")
_KILLED = 2              # ExecMainCode: ended by a signal (CLD_KILLED)


def service_state(facts: Mapping[str, str], release: str | None) -> ServiceState:
    active, sub = facts["ActiveState"], facts["SubState"]
    if active == "failed":
        phase = "failed"
    elif sub == "auto-restart":
        phase = "restarting"
    elif active in UP or (active == "inactive" and is_queued(facts)):
        phase = "running"
    else:
        phase = "stopped"
    status = int(facts["ExecMainStatus"] or 0)
    ended = facts["ExecMainCode"] not in ("", "0")
    return ServiceState(
        phase=phase,
        pid=int(facts["MainPID"] or 0) or None,
        release=release if phase in ("running", "restarting") else None,
        since=_seconds(facts["StateChangeTimestamp"]),
        restarts=int(facts["NRestarts"] or 0),
        last_exit=(-status if facts["ExecMainCode"] == str(_KILLED) else status) if ended else None,
    )


def is_queued(facts: Mapping[str, str]) -> bool:
    """Whether systemd has a job queued for the unit."""
    return facts["Job"] not in ("", "0")


def _seconds(stamp: str) -> float | None:
    """Unix seconds of systemd's "@1700000000"; None for anything else."""
    return float(stamp[1:]) if stamp[:1] == "@" and stamp[1:].isdigit() and stamp != "@0" else None
