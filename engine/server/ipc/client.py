"""The gateway's end of the engine's socket: submits requests, yields `StepOutput`s, and knows the engine's health."""

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from engine.core.request import EngineRequest, EngineStats, FinishReason, StepOutput
from engine.errors import AtollError, EngineDeadError, InvalidRequestError
from engine.message import from_json, msg
from engine.server.ipc import messages as m
from engine.server.ipc.framing import FrameError, FrameReader, PeerCredentials, PeerPolicy, frame
from engine.server.ipc.quarantine import Quarantine

log = logging.getLogger("atoll.client")

BACKOFF_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # between attempts to connect; the last one repeats
PING_SECONDS = 5.0         # after this silence the engine is asked whether its loop runs
STALL_SECONDS = 60.0       # without a step although there is work, or without a Pong: then the engine is unhealthy
DROP_SECONDS = 240.0       # after this stall the connection is dropped; a supervisor kills the engine sooner
MAX_UNSENT_BYTES = 64 << 20    # requests that the engine has not read yet; above this, new ones are refused
MAX_BACKLOG_BYTES = 256 << 20  # outputs not read yet, approximately; above this, the slowest readers are aborted
READ_BYTES = 256 << 10

_Ran = list[tuple[EngineRequest, int]]  # requests, and the tokens of their answers so far


class EngineClient:
    """One engine process behind a Unix socket. Reconnects by itself, to a restarted engine, too.

    `state` is "connecting", "loading", "ready" or "dead" (the connection was lost; attempts go on). `info` is None
    until the engine is ready, and is kept while it restarts. `progress` describes the stage of loading. `on_step` is
    called with (previous, current) stats for every frame of outputs, for metrics.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        name: str = "gateway",
        policy: PeerPolicy | None = None,
        stall_seconds: float = STALL_SECONDS,
        on_step: Callable[[EngineStats, EngineStats], None] | None = None,
    ) -> None:
        self.path = Path(path)
        self.info: m.EngineInfo | None = None
        self.stats = EngineStats()
        self.state = "connecting"
        self.progress = ""
        self.last_error = ""   # the engine's own last words, or why the connection failed
        self.restarts = 0      # how often a ready engine was lost
        self.on_step = on_step
        self._name = name
        self._policy = policy or PeerPolicy()
        self._stall_seconds = stall_seconds
        self._streams: dict[str, _Stream] = {}
        self._backlog = _Backlog(self._streams)
        self.quarantine = Quarantine()
        self._ran: _Ran = []           # requests that ran when the connection was lost: a new process means a crash
        self._failed_first: _Ran = []  # the requests of the first step in a series of failing steps
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._heard = 0.0       # monotonic time of the last frame
        self._asked = 0.0       # monotonic time of the unanswered ping; 0: there is none
        self._leaves = False    # the engine announced that it stops: running requests are not to blame
        self._progressed = 0.0  # monotonic time when the step counter last moved, or work began
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Begin to connect, in the background. Returns at once; `wait_ready` waits."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="engine-client")

    async def close(self, why: str = "The gateway is stopping.") -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._lost(why)

    async def wait_ready(self, timeout: float | None = None) -> m.EngineInfo:
        """Wait until the engine is ready. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            while self.state != "ready" or self.info is None:
                self._changed.clear()
                await self._changed.wait()
            return self.info

    def healthy(self) -> bool:
        """Whether the engine is ready (a real token came from the device), connected and not stalled."""
        connected = self._writer is not None and not self._writer.is_closing()
        return self.state == "ready" and connected and not self.stalled()

    def stalled(self, seconds: float | None = None) -> bool:
        """Whether a ready engine owes a step or a Pong, and its loop has not run for this long (`stall_seconds`)."""
        limit, now = seconds or self._stall_seconds, time.monotonic()
        if self.state != "ready":
            return False
        if self._asked and now - self._asked > limit:
            return True
        busy = bool(self._streams) or self.stats.num_running > 0
        return busy and now - self._progressed > limit

    @property
    def in_flight(self) -> int:
        """Requests that it was given and that have not ended."""
        return len(self._streams)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[StepOutput, None]:
        """Submit `request` and yield its outputs; the last has a `finish_reason`.

        Closing the iterator early aborts the request in the engine. Raises EngineDeadError (the engine is not ready, or
        was lost meanwhile), InvalidRequestError (it cannot serve this request) and QuarantinedError (this request
        crashed it twice).
        """
        trial = await self.quarantine.admit(request) if self.quarantine else None
        stream: _Stream | None = None
        finished = False
        try:
            stream = self._submit(request)
            while not finished:
                output = await stream.next()
                finished = output.finish_reason is not None
                if trial is not None and (finished or trial.passed(stream.tokens)):
                    trial.end(cleared=output.finish_reason is not FinishReason.ERROR)
                    trial = None
                yield output
        except (EngineDeadError, InvalidRequestError):
            finished = True
            raise
        finally:
            if trial is not None:
                trial.end(cleared=False)
            if stream is not None:
                self._streams.pop(request.request_id, None)
                stream.clear()
                if not finished:
                    self._send(m.Abort([request.request_id]))

    def _submit(self, request: EngineRequest) -> "_Stream":
        if self.state != "ready":
            raise EngineDeadError(self._not_ready())
        if self._unsent() > MAX_UNSENT_BYTES:
            raise EngineDeadError("The engine does not take requests at the moment.")
        key = request.request_id
        if key in self._streams:
            raise InvalidRequestError(f"The request id {key} is already in flight.", "request_id")
        if not self._streams:
            self._progressed = time.monotonic()  # idle until now: the stall timer starts with this request
        stream = self._streams[key] = _Stream(request, self._backlog)
        self._send(m.Submit(request))
        return stream

    def stage(self, request_id: str) -> str:
        """"waiting" or "running", as the engine last reported; "" if it has not yet."""
        stream = self._streams.get(request_id)
        return stream.stage if stream is not None else ""

    # -- below: the connection

    async def _run(self) -> None:
        attempt = 0
        while True:
            try:
                await self._connection()
                attempt = 0
            except (OSError, FrameError, m.MessageError) as error:
                if not isinstance(error, FileNotFoundError | ConnectionRefusedError):
                    log.warning("engine connection: %s", error)
                self.last_error = self.last_error or str(error)
            if self.state in ("ready", "loading"):
                attempt = 0
            self._lost(self.last_error or msg("The engine process closed its connection."))
            await asyncio.sleep(BACKOFF_SECONDS[min(attempt, len(BACKOFF_SECONDS) - 1)])
            attempt += 1

    async def _connection(self) -> None:
        """Run one connection from its start to its end."""
        reader, writer = await asyncio.open_unix_connection(str(self.path), limit=READ_BYTES)
        try:
            sock: socket.socket = writer.get_extra_info("socket")
            peer = PeerCredentials.of(sock)
            if not self._policy.allows(peer):
                raise FrameError(f"{self.path} is served by uid {peer.uid}, which is not allowed")
            self._writer = writer
            self._asked = 0.0
            self.last_error = ""
            self._send(m.Hello(m.PROTOCOL, self._name, follows=True))
            frames = FrameReader(m.MAX_EVENT_BYTES)
            pinger = asyncio.create_task(self._ping())
            try:
                while data := await reader.read(READ_BYTES):
                    self._heard = time.monotonic()
                    for payload in frames.feed(data):
                        self._handle(m.decode_event(payload))
            finally:
                pinger.cancel()
        finally:
            self._writer = None
            writer.close()

    async def _ping(self) -> None:
        """Ping after a silence, and remember when the ping was sent."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            if self.stalled(DROP_SECONDS) and self._writer is not None:
                self.last_error = msg("The engine has not answered for {seconds} s.", seconds=f"{DROP_SECONDS:.0f}")
                self._writer.transport.abort()
                return
            if not self._asked and time.monotonic() - self._heard >= PING_SECONDS:
                self._asked = time.monotonic()
                self._send(m.Ping())

    def _handle(self, event: m.AnyEvent) -> None:
        match event:
            case m.Outputs():
                self._note_failures(event)
                self._advance(event.stats)
                for output in event.outputs:
                    if stream := self._streams.get(output.request_id):
                        stream.put(output)
                if slow := self._backlog.cut():
                    self._send(m.Abort(slow))
            case m.Moved():
                for ids, stage in ((event.waiting, "waiting"), (event.running, "running")):
                    for request_id in ids:
                        if stream := self._streams.get(request_id):
                            stream.stage = stage
            case m.Pong():
                self._advance(event.stats)
            case m.Rejected():
                if stream := self._streams.get(event.request_id):
                    stream.fail(InvalidRequestError(event.message, event.param, event.code))
            case m.Welcome():
                if event.protocol != m.PROTOCOL:
                    raise m.MessageError(f"the engine speaks protocol {event.protocol}, this gateway {m.PROTOCOL}")
                self._leaves = False
                self._become("loading")
            case m.Progress():
                self.progress = str(event)
                self._become("loading")
            case m.Ready():
                if self._ran and self.info is not None and self.info.pid != event.info.pid:
                    self.quarantine.crashed(self._ran)
                self._ran = []
                self.info, self.stats, self.progress = event.info, event.stats, ""
                self._progressed = time.monotonic()
                self._become("ready")
            case m.Goodbye():
                self.last_error = from_json(event.message) or f"{event.reason} {event.hint}".strip()
                self.progress = ""
                self._leaves = not event.fatal
                self._become("dead")

    def _advance(self, stats: EngineStats) -> None:
        before, self.stats = self.stats, stats
        self._asked = 0.0  # any message shows that the loop runs: the Pong may be queued behind outputs
        if stats.steps != before.steps or not before.num_running:
            self._progressed = time.monotonic()
        if self.on_step is not None:
            self.on_step(before, stats)

    def _note_failures(self, event: m.Outputs) -> None:
        """Remember the first of a series of failing steps: after a sticky device error every step fails until the
        process ends, but only the first one contained the cause."""
        if event.stats.step_failures == self.stats.step_failures:
            if event.stats.steps != self.stats.steps:
                self._failed_first = []
        elif not self._failed_first:
            failed = [output.request_id for output in event.outputs if output.finish_reason is FinishReason.ERROR]
            streams = [self._streams[key] for key in failed if key in self._streams]
            self._failed_first = [(stream.request, stream.tokens) for stream in streams]

    def _send(self, message: m.Command) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(m.encode(message)))

    def _unsent(self) -> int:
        return self._writer.transport.get_write_buffer_size() if self._writer is not None else 0

    def _become(self, state: str) -> None:
        if state != self.state:
            log.debug("engine %s -> %s", self.state, state)
        self.state = state
        self._changed.set()

    def _lost(self, why: str) -> None:
        if self.state == "ready":
            self.restarts += 1
        if not self._leaves:
            ran = [stream for stream in self._streams.values() if stream.stage == "running"]
            self._ran = self._failed_first or [(stream.request, stream.tokens) for stream in ran] or self._ran
        self._failed_first = []
        self.progress = ""
        if self.state != "connecting":
            self._become("dead")
        self.stats.num_running = self.stats.num_waiting = self.stats.pages_in_use = 0
        self.stats.kv_usage = 0.0
        for stream in self._streams.values():
            stream.fail(EngineDeadError(f"The engine stopped while it worked on this request: {why}"))

    def _not_ready(self) -> str:
        if self.state == "dead":
            return f"The engine is down: {self.last_error or 'no reason known'}"
        return f"The model is still loading{f' ({self.progress})' if self.progress else ''}."


class SlowReaderError(AtollError):
    """A client read its answer so slowly that the request had to be aborted."""


class _Stream:
    """Outputs of one request on their way to its coroutine."""

    __slots__ = ("_backlog", "_error", "_items", "_waiter", "bytes", "request", "stage", "tokens")

    def __init__(self, request: EngineRequest, backlog: "_Backlog") -> None:
        self.request = request
        self.bytes = 0   # size of the outputs that wait to be read
        self.stage = ""  # "waiting" or "running", as the engine last reported
        self.tokens = 0  # tokens of the answer so far
        self._backlog = backlog
        self._items: deque[tuple[StepOutput, int]] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: StepOutput) -> None:
        if self._error is not None:
            return
        size = _size(output)
        self.tokens += len(output.new_token_ids)
        self._items.append((output, size))
        self._count(size)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def clear(self) -> None:
        self._items.clear()
        self._count(-self.bytes)

    async def next(self) -> StepOutput:
        while not self._items:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output, size = self._items.popleft()
        self._count(-size)
        return output

    def _count(self, size: int) -> None:
        self.bytes += size
        self._backlog.bytes += size

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Backlog:
    """The unread outputs of all streams. The engine does not wait for clients, so outputs for slow readers pile up;
    they are kept while there is room."""

    def __init__(self, streams: dict[str, _Stream]) -> None:
        self.bytes = 0
        self._streams = streams

    def cut(self) -> list[str]:
        """Abort the requests that are furthest behind until the rest fits. Returns their ids."""
        given_up = []
        while self.bytes > MAX_BACKLOG_BYTES:
            key, stream = max(self._streams.items(), key=lambda item: item[1].bytes)
            log.warning("request %s is given up: its client reads too slowly", key)
            stream.clear()
            stream.fail(SlowReaderError("The answer was read too slowly, and too much of it was waiting."))
            given_up.append(key)
        return given_up


def _size(output: StepOutput) -> int:
    """Approximate bytes of memory."""
    size = 500 + 32 * len(output.new_token_ids) + len(output.embedding or b"")
    for position in (*(output.logprobs or ()), *(output.prompt_logprobs or ())):
        size += 200 + 100 * len(position.top) if position is not None else 16
    return size
