"""The engine process as the child of `atoll serve`."""

import asyncio
import logging
import os
import signal
import site
import sys
from pathlib import Path

import engine as engine_package
from engine.errors import KILLED, AtollError
from engine.message import msg
from engine.server.ipc.client import EngineClient
from engine.server.process.supervisor import (
    FINAL_STATUSES,
    RESTART_WINDOW_SECONDS,
    Restarts,
    Supervisor,
    how_it_ended,
)
from engine.server.settings.options import ServeOptions, engine_argv

log = logging.getLogger("atoll.serve")

EXIT_UNHEALTHY = 40
LOAD_ATTEMPTS = 2               # as long as it has never been ready
STOP_SECONDS = 15.0             # between SIGTERM and SIGKILL
LAST_WORDS_SECONDS = 0.1        # time for the client to read the Goodbye of an engine that has ended
STALL_POLL_SECONDS = 5.0
STALL_KILL_SECONDS = 180.0      # a loop that hangs this long is killed; health checks report it much earlier


class EngineFailedError(AtollError):
    """The engine ended, and a restart is pointless or has been tried often enough; `status` is our own exit status."""

    def __init__(self, message: str, status: int, hint: str = "") -> None:
        super().__init__(message, hint)
        self.status = status


class EngineChild(Supervisor):
    """Restarted when it crashes or stalls; `client` is connected to its socket."""

    def __init__(self, options: ServeOptions, client: EngineClient) -> None:
        # -P: neither the working directory nor a script's directory may shadow a module of the engine.
        argv = [
            sys.executable, "-P", "-m", "engine.server.process.engine_process",
            f"--uds={client.path}", f"--parent-pid={os.getpid()}",
            f"--log-level={options.log_level}", f"--log-format={options.log_format}", *engine_argv(options.engine),
        ]
        super().__init__(
            argv, stop_seconds=STOP_SECONDS, stdout=sys.stderr.fileno(), env=_environment(),
            start_new_session=True,  # Ctrl-C in the terminal reaches only us; we stop the engine
        )
        self.client = client
        self._restarts = Restarts(options.max_restarts, first_delay=0.5)
        self._was_ready = False
        self._stalled = False  # we kill this process because its loop hangs

    def spawn(self) -> None:
        super().spawn()
        self._stalled = False
        log.debug("started the engine", extra={"fields": {"pid": self.pid}})

    async def supervise(self) -> None:
        """Keep the engine running until `stop`. Raises EngineFailedError to give up."""
        watcher = asyncio.create_task(self._watch_for_stall())
        try:
            await super().supervise()
        finally:
            watcher.cancel()

    async def stop(self) -> bool:
        killed = await super().stop()
        if killed:
            log.warning("the engine did not stop within %.0f s and was killed", STOP_SECONDS)
        return killed

    async def ended(self, status: int) -> float:
        self._was_ready = self._was_ready or self.client.info is not None
        await asyncio.sleep(LAST_WORDS_SECONDS)
        return self.delay_after(status, self.client.last_error)

    def delay_after(self, status: int, last_words: str) -> float:
        """Seconds until the next start. Raises EngineFailedError."""
        how, delay = how_it_ended(status), self._restarts.delay_after(status)
        if status == -signal.SIGKILL and not self._stalled:
            log.error("the engine %s", how, extra={"fields": {"error_id": KILLED}})
        if status in FINAL_STATUSES:
            raise EngineFailedError(msg("The engine could not start: {last_words}", last_words=last_words or how),
                                    status)
        count = self._restarts.count
        if not self._was_ready and count >= LOAD_ATTEMPTS:
            raise EngineFailedError(msg("The engine {how} while loading, {count} times.", how=how, count=count),
                                    EXIT_UNHEALTHY,
                                    msg("Its last log lines say why."))
        if delay is None:
            raise EngineFailedError(msg("The engine {how}, {count} times in {restart_window_seconds} minutes.",
                                        how=how, count=count,
                                        restart_window_seconds=f"{RESTART_WINDOW_SECONDS / 60:.0f}"),
                                    EXIT_UNHEALTHY, msg("Its last log lines say why; restarting has been given up."))
        log.error("the engine %s; restarting it in %.1f s", how, delay, extra={"fields": {"restart": count}})
        return delay

    async def _watch_for_stall(self) -> None:
        """If the engine's loop hangs, have its stacks dumped and kill it; `supervise` then starts a new engine."""
        while True:
            await asyncio.sleep(STALL_POLL_SECONDS)
            if self.client.stalled(STALL_KILL_SECONDS) and self._process is not None and self.running:
                log.error("the engine's loop has stalled; its stacks follow, then it is killed")
                self._process.send_signal(signal.SIGUSR1)  # faulthandler writes the stacks
                await asyncio.sleep(1)
                self._stalled = True
                self._process.kill()


def _environment() -> dict[str, str]:
    """Our environment, with the checkout on the child's Python path if we run from one: -P keeps the working directory
    off it."""
    environment = dict(os.environ)
    root = str(Path(engine_package.__file__).resolve().parents[1])
    if root not in site.getsitepackages():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    return environment
