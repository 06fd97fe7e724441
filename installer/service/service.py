"""How the service is run: a supervisor process under a prefix, systemd on a server, behind the same few verbs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import CHOSEN, t
from installer.base.layout import Layout
from installer.base.proc import ProcessId

# What the service may inherit. No proxies, no tokens, no Python paths of the person who typed the command.
_INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_SETTINGS = "ATOLL_LIMITS_"  # limits of the endpoint, see engine/server/settings/limits.py

_BUSY = 75  # exit status of a supervisor that found another one


@dataclass(frozen=True, slots=True)
class ServiceState:
    """`phase` is running, restarting, failed, stopped or dead (killed without a word)."""

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
    """When a change of what runs began to be felt, and when it began: seconds of the monotonic clock."""

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
        """Start these parts anew (None: all), with the shortest silence. Returns when none of the old processes is
        left. `hand_over` False: none begins before all the old ones have ended. Raises InstallError (40)."""
        ...

    def apply_units(self, models: Sequence[str]) -> None:
        """The unit files on the disk are new: make users and directories, reload, enable exactly these instances."""
        ...

    def remove_units(self) -> None:
        """Stop and disable everything, before the unit files are removed."""
        ...

    def reload(self) -> None:
        """Forget unit files that are no longer there."""
        ...

    def remove_users(self) -> None:
        """The users and the group that `apply_units` made."""
        ...

    def reload_keys(self) -> None:
        """The file of API keys has changed."""
        ...

    def state(self) -> ServiceState: ...

    def serving(self) -> dict[str, str]:
        """Part -> the process that serves in it, by a name that no later process will have. A part that is not ready,
        or that something is being done to, is not among them."""
        ...

    def pids(self) -> frozenset[int]:
        """Every live process of the service: what it holds, a switch will give back."""
        ...

    def log_tail(self, lines: int) -> list[str]: ...


def stop_and_start(service: ServiceManager, names: Collection[str] | None) -> Switched:
    """The plain way from the old processes to the new ones."""
    silent_from = time.monotonic()
    service.stop(names)
    starting_from = time.monotonic()
    service.start()
    return Switched(silent_from, starting_from)


def code_root() -> Path:
    """The directory that our packages are imported from."""
    return Path(__file__).resolve().parents[2]


def service_environment(layout: Layout) -> dict[str, str]:
    """A clean environment with every cache inside the tree and no way to a model hub."""
    kept = {name: value for name, value in os.environ.items() if name in _INHERITED or name.startswith(_SETTINGS)}
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        **kept,
        "HOME": str(layout.cache),
        "XDG_CACHE_HOME": str(layout.cache),
        "TRITON_CACHE_DIR": str(layout.cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(layout.cache / "inductor"),
        "CUDA_CACHE_PATH": str(layout.cache / "cuda"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # a release is never written to
        CHOSEN: "en",  # what it says goes into the log
    }


class PrefixService:
    """The service of a prefix installation, under `installer.service.prefix_supervisor`."""

    def __init__(self, layout: Layout, *, stop_timeout: float = 40.0) -> None:
        self.layout = layout
        self.stop_timeout = stop_timeout

    def start(self) -> None:
        if self._supervisor() is not None:
            return
        if self._spawn() == _BUSY:
            # A supervisor that an interrupted install had just begun came first; it may have read older settings.
            self._await_state(None)
            self.stop()
            if self._spawn() == _BUSY:
                raise self._not_started()

    def _spawn(self) -> int | None:
        """Start a supervisor and wait until it reports; returns its exit status if it ended instead."""
        self.layout.service_state.unlink(missing_ok=True)
        with open(self.layout.log, "ab") as log:
            process = subprocess.Popen(
                [
                    sys.executable, "-s", "-P", "-m", "installer.service.prefix_supervisor",
                    "--prefix", str(self.layout.prefix),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={**service_environment(self.layout), "PYTHONPATH": str(code_root())},
                start_new_session=True,
            )
        return self._await_state(process)

    def _await_state(self, process: subprocess.Popen[bytes] | None) -> int | None:
        deadline = time.monotonic() + 30
        while not self.layout.service_state.exists():
            if process is not None and process.poll() == _BUSY:
                return _BUSY
            if (process is not None and process.poll() is not None) or time.monotonic() > deadline:
                raise self._not_started()
            time.sleep(0.02)
        return None

    def _not_started(self) -> InstallError:
        return InstallError(
            t("The supervisor of the service did not start."),
            exit_code=ExitCode.UNHEALTHY,
            hint=t("Read {log}.", log=self.layout.log),
            log_tail=self.log_tail(10),
        )

    def apply_units(self, models: Sequence[str]) -> None:
        """Nothing of systemd is used here."""

    def remove_units(self) -> None:
        self.stop()

    def reload(self) -> None:
        """No units."""

    def remove_users(self) -> None:
        """No users."""

    def reload_keys(self) -> None:
        """The server looks at the file by itself."""

    def stop(self, names: Collection[str] | None = None) -> bool:
        leader = self._leader()
        if leader is None:
            return False
        before = leader.family()  # the engine has a session of its own: it is found now, while its parent lives
        if leader.alive():
            _signal(leader, signal.SIGTERM)
            _wait_gone(leader, self.stop_timeout)
        for process in {*before, *leader.family()}:
            if not _wait_gone(process, 2.0 if process in before else 0.0):  # whatever ignored the request
                _signal(process, signal.SIGKILL)
                _wait_gone(process, 5.0)
        self.layout.pidfile.unlink(missing_ok=True)
        return bool(before)

    def switch(self, names: Collection[str] | None, timeout: float, *, hand_over: bool = True) -> Switched:
        return stop_and_start(self, names)

    def state(self) -> ServiceState:
        supervisor = self._supervisor()
        report = _read_json(self.layout.service_state)
        identity = _read_json(self.layout.pidfile)
        phase = str(report.get("phase", "stopped"))
        if supervisor is None and phase in ("running", "restarting"):
            phase = "dead"
        return ServiceState(
            phase=phase,
            pid=report.get("pid") if supervisor else None,
            release=identity.get("release") if supervisor else None,
            since=report.get("since"),
            restarts=int(report.get("restarts") or 0),
            last_exit=report.get("last_exit"),
        )

    def serving(self) -> dict[str, str]:
        """None: a supervisor may have started the newer release after a crash."""
        return {}

    def pids(self) -> frozenset[int]:
        leader = self._leader()
        return frozenset(process.pid for process in leader.family()) if leader is not None else frozenset()

    def log_tail(self, lines: int) -> list[str]:
        return tail(self.layout.log, lines)

    def _leader(self) -> ProcessId | None:
        """The process that the pidfile names, alive or not."""
        data = _read_json(self.layout.pidfile)
        try:
            return ProcessId(int(data["pid"]), int(data["start_time"]), str(data["boot_id"]))
        except (KeyError, TypeError, ValueError):
            return None

    def _supervisor(self) -> ProcessId | None:
        leader = self._leader()
        return leader if leader is not None and leader.alive() else None


def service_for(layout: Layout) -> ServiceManager:
    """Whatever runs the service of this installation."""
    if not layout.system:
        return PrefixService(layout)
    from installer.service.systemd import SystemdService

    return SystemdService(layout)


def tail(path: Path, lines: int, limit: int = 1 << 20) -> list[str]:
    """The last lines of a file, reading at most `limit` bytes of it."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            return file.read().decode(errors="replace").splitlines()[-lines:] if lines > 0 else []
    except OSError:
        return []


def readable(line: str) -> str:
    """A line of the log for people: the service writes one JSON object a line."""
    if line.startswith("{"):
        try:
            entry = json.loads(line)
            return f"{entry['level']}: {entry['message']}"
        except (ValueError, KeyError, TypeError):
            return line
    return line


def follow(path: Path) -> Iterator[str]:
    """Lines as they are written from now on, across rotation; ends only with the reader."""
    file = open(path, "rb")  # noqa: SIM115
    file.seek(0, os.SEEK_END)
    rest = b""
    try:
        while True:
            if data := file.read(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
                continue
            time.sleep(0.25)
            try:
                now = path.stat()
            except FileNotFoundError:
                continue
            if now.st_ino != os.fstat(file.fileno()).st_ino:
                file.close()
                file = open(path, "rb")  # noqa: SIM115
            elif now.st_size < file.tell():
                file.seek(0)
    finally:
        file.close()


def _signal(process: ProcessId, number: int) -> None:
    """Signal exactly this process: the descriptor pins it before its identity is checked."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        if process.alive():
            signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


def _wait_gone(process: ProcessId, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while process.alive():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
