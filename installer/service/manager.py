"""How the service is run, with the same interface for both forms: under a prefix (prefix.py) and by systemd
(systemd.py)."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ServiceState:
    """`phase` is running, restarting, failed, stopped or dead (killed without leaving a status)."""

    phase: str
    pid: int | None = None          # of the service itself, not of its supervisor
    release: str | None = None
    since: float | None = None      # Unix seconds
    restarts: int = 0
    last_exit: int | None = None

    @property
    def up(self) -> bool:
        return self.phase in ("running", "restarting")


@dataclass(frozen=True, slots=True)
class Switched:
    """Times of a switch, in seconds of the monotonic clock."""

    silent_from: float      # the first part had stopped, or was about to
    starting_from: float    # the first new process was started


class ServiceManager(Protocol):
    """What the install steps need from whatever runs the service."""

    def start(self) -> None:
        """Start the release that `current` points at; returns when its process exists, not when it is ready."""
        ...

    def stop(self, names: Collection[str] | None = None) -> bool:
        """Stop it and everything it started, or only these parts (instances, "gateway"); whether anything ran."""
        ...

    def switch(self, names: Collection[str] | None, timeout: float, *, hand_over: bool = True) -> Switched:
        """Restart these parts (None: all) with the shortest interruption. Returns when no old process is left.
        `hand_over` False: end all old processes before the first new one starts. Raises InstallError (40)."""
        ...

    def apply_units(self, models: Sequence[str]) -> None:
        """Take over changed unit files: make users and directories, reload, enable exactly these instances."""
        ...

    def models(self) -> list[str]:
        """Engines that start at boot, each by its instance; none in the prefix form, which has no units."""
        ...

    def remove_units(self) -> None:
        """Stop and disable everything, before the unit files are removed."""
        ...

    def reload(self) -> None:
        """Make systemd forget unit files that no longer exist."""
        ...

    def remove_users(self) -> None:
        """Remove the users and the group that `apply_units` made."""
        ...

    def reload_keys(self) -> None:
        """Make the gateway use the changed API keys."""
        ...

    def reload_models(self, drain: float) -> bool:
        """Have the running gateway read its models again; returns when removed ones have ended their requests, after
        `drain` seconds at most. False: it cannot, and must restart."""
        ...

    def state(self) -> ServiceState: ...

    def serving(self) -> dict[str, str]:
        """Part -> an identifier of its serving process that no later process will have. Leaves out parts that are not
        ready or have a job pending."""
        ...

    def pids(self) -> frozenset[int]:
        """Every live process of the service. Preflight does not count what they hold (memory, ports) as taken."""
        ...

    def log_tail(self, lines: int) -> list[str]: ...


def stop_and_start(service: ServiceManager, names: Collection[str] | None) -> Switched:
    """Switch by stopping everything first."""
    silent_from = time.monotonic()
    service.stop(names)
    starting_from = time.monotonic()
    service.start()
    return Switched(silent_from, starting_from)
