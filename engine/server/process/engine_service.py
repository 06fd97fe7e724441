"""The engine's loop: steps of its core, and between two of them the requests of its clients.

One thread does both, so that a core that hangs feeds no watchdog.
"""

import gc
import logging
import os
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, EngineStats, FinishReason, StepOutput
from engine.errors import InvalidRequestError
from engine.message import joined, to_json
from engine.server.ipc import messages as m
from engine.server.ipc.server import Connected, Connection, Disconnected, Incoming, IpcServer
from engine.server.process.heartbeat import Heartbeat
from engine.server.process.notify import Notifier

log = logging.getLogger("atoll.engine")

IDLE_SECONDS = 30.0       # longest block in `poll` when idle; the watchdog may ask for less
DRAIN_SECONDS = 10.0      # for running requests after SIGTERM
PROGRESS_SECONDS = 0.1    # between two progress messages
LOAD_PATIENCE_SECONDS = 300.0  # silence that systemd accepts while loading, such as a cold import or one large kernel
WARMUP_TOKENS = 3
MAX_IDLE_TURNS = 8

ProgressCallback = Callable[[str, int, int], None]


class Core(Protocol):
    """The part of `EngineCore` that this process uses."""

    on_moved: Callable[[list[str], list[str]], None] | None

    def add_request(self, request: EngineRequest) -> None: ...
    def abort(self, request_ids: list[str]) -> None: ...
    def step(self) -> list[StepOutput]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def info(self) -> dict: ...


class EngineService:
    """A core and its clients. Call `load`, then `run`: both serve the socket, so clients can follow the loading,
    too."""

    def __init__(self, server: IpcServer, notifier: Notifier, *, watchdog: float = 0.0) -> None:
        self._server = server
        self._notifier = notifier
        self._watchdog = watchdog  # the timeout once ready, in seconds; 0: the one that systemd announced
        self._core: Core | None = None
        self._info: m.EngineInfo | None = None
        self._progress = m.Progress("starting")
        self._progress_sent = 0.0
        self._owners: dict[str, tuple[Connection, str]] = {}  # engine-wide request id -> (client, its own id)
        self._stop_at: float | None = None                    # monotonic deadline of the drain; None: serving
        self._silent = False                                  # do not report the stop to systemd
        self._idle_told = True                                # clients know the stats of the idle state

    def stop(self, *, silently: bool = False) -> None:
        """Begin to drain (from a signal handler or the loop): accept no new requests, give running ones a little time.

        `silently`: another process is the service's main process now, and reports to systemd.
        """
        if self._stop_at is None:
            self._stop_at = time.monotonic() + DRAIN_SECONDS
            self._silent = silently

    def load(self, build: Callable[[ProgressCallback], Core], started: float) -> None:
        """Build the core, make it produce real tokens, and only then be ready."""
        self.progress("starting", 0, 0)
        core = build(self.progress)
        self.progress("warm-up", 0, 0)
        _warm_up(core)
        gc.collect()
        gc.freeze()  # weights and tables live until the end: keep collections from traversing them
        facts = {**core.info(), "pid": os.getpid(), "load_seconds": round(time.monotonic() - started, 3)}
        info = msgspec.convert(facts, m.EngineInfo)
        self._core, self._info = core, info
        core.on_moved = self._tell_moved
        self._server.broadcast(m.Ready(info, core.stats()))
        if self._watchdog:
            self._notifier.set_watchdog(self._watchdog)
        self._notifier.ready(f"serving {info.model_names[0]}, {info.max_model_len} tokens of context")
        log.info("ready", extra={"fields": {"seconds": info.load_seconds, "device": info.device,
                                            "max_model_len": info.max_model_len, "pages": info.num_pages}})

    def progress(self, stage: str, done: int, total: int) -> None:
        """A callback for `build_engine` while it loads. It also answers clients and asks systemd for patience."""
        changed = stage != self._progress.stage
        now = time.monotonic()
        if not changed and done < total and now - self._progress_sent < PROGRESS_SECONDS:
            return
        if changed:
            log.info("%s", stage)  # so the journal shows where a start spends its time
        self._progress, self._progress_sent = m.Progress(stage, done, total), now
        self._notifier.loading(str(self._progress), LOAD_PATIENCE_SECONDS)
        self._notifier.watchdog()
        self._server.broadcast(self._progress)
        self._serve(self._server.poll(0))

    def run(self) -> None:
        """Serve until `stop`. Raises errors that `EngineCore` could not attribute to single requests."""
        assert self._core is not None, "load first"
        core, server = self._core, self._server
        pause = min(IDLE_SECONDS, self._notifier.watchdog_seconds / 3 or IDLE_SECONDS)
        heartbeat = Heartbeat(self._notifier)
        told_stopping = False
        idle_turns = 0  # consecutive steps that moved nothing: then pause, so that waiting does not spin
        while True:
            if core.has_work():
                timeout = 0 if idle_turns < MAX_IDLE_TURNS else 0.001
            else:
                timeout = pause if self._stop_at is None else 0  # stopped while the model loaded: do not sleep
            self._serve(server.poll(timeout))
            if core.has_work():
                steps, failures = core.stats().steps, core.stats().step_failures
                outputs = core.step()
                self._send_outputs(outputs, core)
                self._idle_told = False
                stats = core.stats()
                moved = bool(outputs) or stats.steps != steps
                heartbeat.step_done(
                    moved=moved, failed=stats.step_failures != failures, succeeded=stats.steps != steps)
                idle_turns = 0 if moved else idle_turns + 1
            if heartbeat.doubtful and not core.has_work():
                log.error("steps fail one after another; asking the device for a token")
                _warm_up(core)  # raises if none comes: this process ends, and a new one opens the device again
                heartbeat.device_works()
            if not core.has_work() and not self._idle_told:
                self._idle_told = True  # aborts and ends change gauges without an output for every client
                server.broadcast(m.Outputs([], core.stats()))
            heartbeat.beat(idle=not core.has_work())
            if self._stop_at is not None:
                if not told_stopping:
                    told_stopping = True
                    if not self._silent:
                        self._notifier.stopping("draining")
                    server.broadcast(m.Goodbye("The engine is stopping."))
                if not core.has_work() or time.monotonic() > self._stop_at:
                    return

    def farewell(self, reason: str, hint: str = "", *, patience: float = 0.0) -> None:
        """Send last words to all clients before a non-zero exit, including those that connected while we were busy.

        If no client is connected, wait up to `patience` seconds for the first one.
        """
        for _ in range(2):  # accept, then read their Hello
            self._serve(self._server.poll(0))
        deadline = time.monotonic() + patience
        while not self._server.clients and (left := deadline - time.monotonic()) > 0:
            self._serve(self._server.poll(left))
        message = to_json(joined(filter(None, (reason, hint)), " "))
        self._server.broadcast(m.Goodbye(str(reason), str(hint), fatal=True, message=message))
        self._server.close()

    def _serve(self, incoming: list[Incoming]) -> None:
        for connection, what in incoming:
            match what:
                case Connected():
                    self._server.send(connection, self._present_state())
                case Disconnected():
                    self._abort([key for key, owner in self._owners.items() if owner[0] is connection])
                case m.Submit():
                    self._submit(connection, what.request)
                case m.Abort():
                    self._abort([_key(connection, request_id) for request_id in what.request_ids])
                case m.Ping():
                    stats = self._core.stats() if self._core else EngineStats()
                    self._server.send(connection, m.Pong(what.nonce, stats))

    def _present_state(self) -> m.Event:
        if self._core is None or self._info is None:
            return self._progress
        return m.Ready(self._info, self._core.stats())

    def _submit(self, connection: Connection, request: EngineRequest) -> None:
        own_id = request.request_id
        key = request.request_id = _key(connection, own_id)
        if self._core is None or self._stop_at is not None:
            return self._refuse(connection, own_id, "The engine is not serving at the moment.")
        try:
            self._core.add_request(request)
        except InvalidRequestError as error:
            self._server.send(connection, m.Rejected(own_id, error.message, error.param, error.code))
        except Exception as error:  # a defect in checking one request must not end the others
            log.exception("a request could not be added")
            self._refuse(connection, own_id, f"{type(error).__name__} while the request was added.")
        else:
            self._owners[key] = (connection, own_id)
        return None

    def _refuse(self, connection: Connection, request_id: str, why: str) -> None:
        stats = self._core.stats() if self._core else EngineStats()
        output = StepOutput(request_id, finish_reason=FinishReason.ERROR, error=why)
        self._server.send(connection, m.Outputs([output], stats))

    def _abort(self, keys: list[str]) -> None:
        keys = [key for key in keys if self._owners.pop(key, None)]
        if keys and self._core is not None:
            self._core.abort(keys)
            self._idle_told = False

    def _send_outputs(self, outputs: list[StepOutput], core: Core) -> None:
        """Send each client one frame with all its outputs of this step, under the ids that it knows."""
        frames: dict[Connection, list[StepOutput]] = {}
        for output in outputs:
            key = output.request_id
            if (owner := self._owners.get(key)) is None:
                continue  # aborted while the step ran
            connection, output.request_id = owner
            if output.finish_reason is not None:
                del self._owners[key]
            if (refusal := output.refusal) is not None:
                self._server.send(
                    connection, m.Rejected(output.request_id, refusal.message, refusal.param, refusal.code))
                continue
            frames.setdefault(connection, []).append(output)
        for connection, mine in frames.items():
            self._server.send(connection, m.Outputs(mine, core.stats()))


    def _tell_moved(self, back: list[str], left: list[str]) -> None:
        """Tell each client that follows its requests which of them wait again, and which run now."""
        moved: dict[Connection, m.Moved] = {}
        for waits, keys in ((True, back), (False, left)):
            for key in keys:
                connection, own_id = self._owners.get(key, (None, ""))
                if connection is not None and connection.follows:
                    event = moved.setdefault(connection, m.Moved([], []))
                    (event.waiting if waits else event.running).append(own_id)
        for connection, event in moved.items():
            self._server.send(connection, event)


def _key(connection: Connection, request_id: str) -> str:
    """An engine-wide id. Clients choose their ids freely; the connection's number keeps those of two gateways apart."""
    return f"{connection.number}:{request_id}"


def _warm_up(core: Core) -> None:
    """Generate a few real tokens through the whole engine. Raises RuntimeError if none comes."""
    params = SamplingParams(temperature=0.0, max_tokens=WARMUP_TOKENS, ignore_eos=True)
    core.add_request(EngineRequest("warm-up", [0], params))
    tokens = 0
    while core.has_work():
        for output in core.step():
            tokens += len(output.new_token_ids)
            if output.error:
                raise RuntimeError(f"The first step on this device failed: {output.error}")
    if not tokens:
        raise RuntimeError("The engine loaded, but no token came out of it.")
