"""The supervisor of a prefix installation: starts `atoll serve`, restarts it when it crashes, ends with it.

`PrefixService` (installer/service/prefix.py) starts it as `python -m appliance.supervise --prefix DIR`. It leads its
own session, so it outlives the terminal that started it. On a server systemd supervises the units instead.

    run/atoll/supervisor.lock   flock: at most one per prefix
    run/atoll/atoll.pid         this process: {pid, start_time, boot_id, release}
    run/atoll/service.json      what the service does: {phase, pid, since, restarts, last_exit, admin}

It also keeps the sampler running (appliance/series/sampler.py), which the service does not depend on.
"""

import argparse
import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from engine.server.http.local_socket import ADMIN, METRICS
from engine.server.process.runtime_directory import runtime_directory
from engine.server.process.supervisor import Restarts, Supervisor
from installer.base import fs
from installer.base.layout import Layout
from installer.base.proc import ProcessId
from installer.service.log_file import rotate

STOP_SECONDS = 30.0     # from SIGTERM to SIGKILL
MAX_RESTARTS = 4        # within the supervisor's window, as StartLimitBurst= of the units
ROTATE_SECONDS = 10.0   # how often the size of the log is checked
SAMPLER_AFTER = 2.0     # on a server the sampler starts after the gateway; until then there is nothing to sample
SAMPLER_SECONDS = 30.0  # before a sampler that ended is started again
EXIT_BUSY = 75

_PR_SET_PDEATHSIG = 1


class CannotStartError(Exception):
    """The release's command cannot be run; the log says why."""


class PrefixSupervisor(Supervisor):
    """The service of one prefix."""

    def __init__(self, layout: Layout, metrics: Path) -> None:
        """`metrics`: the Unix socket that the service offers /metrics on."""
        release = layout.current.resolve(strict=True)  # a switch must not change what a restart starts
        self._admin = metrics.with_name("admin.sock")
        sockets = {METRICS.variable: str(metrics), ADMIN.variable: str(self._admin)}
        super().__init__(
            [str(release / "bin/atoll"), "serve", "--config", str(layout.config)],
            stop_seconds=STOP_SECONDS, cwd="/", preexec_fn=_die_with_parent, env={**os.environ, **sockets},
        )
        self._sampler = [
            sys.executable, "-s", "-P", "-m", "appliance.series.sampler", "--socket", str(metrics),
            "--directory", str(layout.series),
        ]  # fmt: skip
        self.layout = layout
        self.release = release.name
        self._restarts = Restarts(MAX_RESTARTS, first_delay=1.0)
        self._restarted = 0
        self._last_exit: int | None = None

    async def run(self) -> int:
        """Until SIGTERM (0), or until a restart is pointless (1)."""
        loop = asyncio.get_running_loop()
        stops: list[asyncio.Task[bool]] = []
        loop.add_signal_handler(signal.SIGTERM, lambda: stops.append(loop.create_task(self.stop())))
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        me = ProcessId.of(os.getpid())
        assert me is not None
        identity = {"pid": me.pid, "start_time": me.start_time, "boot_id": me.boot_id, "release": self.release}
        fs.write_atomic(self.layout.pidfile, json.dumps(identity) + "\n", 0o644)
        rotation, sampling = loop.create_task(self._rotate()), loop.create_task(self._sample())
        try:
            with contextlib.suppress(CannotStartError):
                self.spawn()
                await self.supervise()
            await asyncio.gather(*stops)
        finally:
            rotation.cancel()
            sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sampling
            self._report("stopped" if self.stopping else "failed")
            fs.remove_file(self.layout.pidfile)
        return 0 if self.stopping else 1

    def spawn(self) -> None:
        rotate(self.layout.log)
        with open(self.layout.log, "ab", buffering=0) as log:
            self._note(f"starting {self.release}")
            self._popen |= {"stdout": log, "stderr": log}
            try:
                super().spawn()
            except OSError as error:
                self._note(f"cannot start {self.argv[0]}: {error.strerror}")
                raise CannotStartError from None
        self._report("running")

    async def ended(self, status: int) -> float | None:
        self._last_exit = status
        self._note(f"exit status {status}")
        delay = self._restarts.delay_after(status) if status else None
        if delay is not None:
            self._restarted = self._restarts.count
            self._report("restarting")
        return delay

    async def _rotate(self) -> None:
        while True:
            await asyncio.sleep(ROTATE_SECONDS)
            rotate(self.layout.log, running=True)

    async def _sample(self) -> None:
        """Keep the sampler running until cancelled."""
        await asyncio.sleep(SAMPLER_AFTER)
        while True:
            process: subprocess.Popen[bytes] | None = None
            try:
                with contextlib.suppress(OSError), open(self.layout.log, "ab", buffering=0) as log:
                    process = subprocess.Popen(self._sampler, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
                                               preexec_fn=_die_with_parent)  # fmt: skip
                while process is not None and process.poll() is None:
                    await asyncio.sleep(1.0)
                await asyncio.sleep(SAMPLER_SECONDS)
            finally:
                if process is not None and process.poll() is None:
                    process.kill()  # the file survives it
                    process.wait()

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError), open(self.layout.log, "ab", buffering=0) as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} supervisor: {text}\n".encode())

    def _report(self, phase: str) -> None:
        state = {
            "phase": phase,
            "pid": self.pid,
            "since": time.time(),
            "restarts": self._restarted,
            "last_exit": self._last_exit,
            "admin": str(self._admin),
        }
        with contextlib.suppress(OSError):  # a full disk must not take the service down
            fs.write_atomic(self.layout.service_state, json.dumps(state) + "\n", 0o644)


def _die_with_parent() -> None:
    """In the child, before exec: if the supervisor is killed, the service stops too and is never orphaned."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="appliance.supervise", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=Path, required=True)
    layout = Layout.at(parser.parse_args(argv).prefix)
    fd = os.open(layout.run / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("another supervisor runs for this prefix", file=sys.stderr)
        return EXIT_BUSY
    with runtime_directory() as directory:
        return asyncio.run(PrefixSupervisor(layout, directory / "metrics.sock").run())


if __name__ == "__main__":
    sys.exit(main())
