"""Server-sent events: keep-alive comments, slow readers, clients that disappear."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.server.http.errors import ApiError, from_exception
from engine.server.http.limits import Limits

log = logging.getLogger("atoll.server")

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx would buffer the stream
]
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # exactly this comment: some clients take others for the end


class EventStream(Response):
    """A response that sends each item of `events` (JSON bytes) as one event, then ``[DONE]``. With `named`, items are
    complete events with their names, and the last one's name says that it is the last.

    An exception within `first_output_seconds` is raised to the caller, who can still answer with a status; a later one
    becomes an error event, because the status has been sent. When the client disconnects, `events` is closed at once,
    which aborts the work behind it.
    """

    def __init__(self, events: AsyncIterator[bytes], limits: Limits, *, named: bool = False) -> None:
        self.background = None
        self._events = events
        self._begin = b"" if named else b"data: "
        self._limits = limits
        self._next: asyncio.Task[bytes] | None = None
        self._clock = asyncio.get_running_loop().time
        self._sent_at = self._clock()
        self._sending_since = 0.0  # 0: nothing is being sent
        self._over = False

    async def prime(self, more_seconds: float = 0.0) -> None:
        """Wait a moment for the first event, so that an early failure can be answered with an HTTP status. Raises that
        failure."""
        try:
            self._next = asyncio.ensure_future(anext(self._events))  # type: ignore[arg-type]
            await asyncio.wait({self._next}, timeout=self._limits.first_output_seconds + more_seconds)
            if self._next.done() and (error := self._next.exception()) and not isinstance(error, StopAsyncIteration):
                raise error
        except BaseException:
            await self._close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump, guard, _ = tasks = [
            asyncio.ensure_future(work) for work in (self._pump(send), self._guard(send), _disconnected(receive))
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close()
        for task in (pump, guard):
            if not task.cancelled() and (error := task.exception()) is not None:
                if not isinstance(error, OSError | TimeoutError):
                    raise error
                log.info("stream ended early: %s", error or "the client did not read")

    async def _pump(self, send: Send) -> None:
        self._sending_since = self._clock()
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._sending_since = 0.0
        try:
            if self._next is not None:  # primed
                task, self._next = self._next, None
                await self._body(send, self._begin + await task + b"\n\n")
            async for event in self._events:
                await self._body(send, self._begin + event + b"\n\n")
        except StopAsyncIteration:  # primed, and empty
            pass
        except OSError:  # from send: the connection is closed
            raise
        except Exception as error:
            if not isinstance(error, ApiError):
                log.warning("stream failed: %s: %s", type(error).__name__, error)
            await self._body(send, self._error(from_exception(error)))
        if self._begin:
            await self._body(send, DONE)
        self._over = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _error(self, error: ApiError) -> bytes:
        if self._begin:
            return b"data: " + error.body() + b"\n\n"
        detail = error.detail
        return b"event: error\ndata: " + msgspec.json.encode({
            "type": "error", "code": detail.code, "message": detail.message, "param": detail.param,
            "sequence_number": 0}) + b"\n\n"

    async def _body(self, send: Send, body: bytes) -> None:
        self._sending_since = self._clock()
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._sent_at, self._sending_since = self._clock(), 0.0

    async def _guard(self, send: Send) -> None:
        """Send keep-alive comments. Raises TimeoutError if the client does not read, because it must not hold KV pages.

        One slow timer per stream, because a timer for each event would cost more than the event.
        """
        limits = self._limits
        while not self._over:
            await asyncio.sleep(min(limits.keep_alive_seconds, limits.send_seconds) / 4)
            now = self._clock()
            if self._sending_since:
                if now - self._sending_since > limits.send_seconds:
                    raise TimeoutError
            elif not self._over and now - self._sent_at >= limits.keep_alive_seconds:
                async with asyncio.timeout(limits.send_seconds):
                    await self._body(send, KEEP_ALIVE)
        await asyncio.sleep(limits.send_seconds)  # for the last piece
        raise TimeoutError

    async def _close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            with contextlib.suppress(BaseException):
                await self._next
            self._next = None
        await self._events.aclose()  # type: ignore[attr-defined]


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
