"""The service of a prefix installation: one supervisor process, which starts `atoll serve`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import CHOSEN, t
from installer.base.layout import Layout, code_root
from installer.base.proc import ProcessId
from installer.service.log_file import tail
from installer.service.manager import ServiceState, Switched, stop_and_start

# What the service may inherit: no proxies, no tokens, no Python paths of the user who typed the command.
_INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_SETTINGS = "ATOLL_LIMITS_"  # limits of the endpoint, see engine/server/settings/limit_settings.py

# From the code that runs this command, not from the release: how a release is started must not depend on its flags.
SUPERVISOR = "appliance.supervise"
_BUSY = 75  # exit status of a supervisor that found another one


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
        CHOSEN: "en",  # its messages go into the log
    }


class PrefixService:
    """The service of a prefix installation, under its supervisor."""

    def __init__(self, layout: Layout, *, stop_timeout: float = 40.0) -> None:
        self.layout = layout
        self.stop_timeout = stop_timeout

    def start(self) -> None:
        if self._supervisor() is not None:
            return
        if self._spawn() == _BUSY:
            # A supervisor that an interrupted install had just started was first; it may have read older settings.
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
                    sys.executable, "-s", "-P", "-m", SUPERVISOR,
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
        """systemd is not used here."""

    def models(self) -> list[str]:
        return []

    def remove_units(self) -> None:
        self.stop()

    def reload(self) -> None:
        """There are no units."""

    def remove_users(self) -> None:
        """There are no users."""

    def reload_keys(self) -> None:
        """The server notices changes of the file by itself."""

    def reload_models(self, drain: float) -> bool:
        return False

    def stop(self, names: Collection[str] | None = None) -> bool:
        leader = self._leader()
        if leader is None:
            return False
        before = leader.family()  # the engine has a session of its own: find it now, while its parent lives
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
        """Always empty: after a crash, a supervisor may have started the newer release."""
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
