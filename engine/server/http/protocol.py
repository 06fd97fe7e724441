"""HTTP/1.1 for uvicorn, with the bounds that a LAN needs: headers limited in size and time, errors in OpenAI's shape.

uvicorn over httptools bounds neither: a client could send headers for ever, or none at all. No connection lives without
a timer or a request:

    headers     header_seconds, from the connection or from a request's first byte
    body        body_seconds (body.py)
    answer      send_seconds while the peer takes nothing of what is to be written (streams: sse.py)
    the rest of a body that nobody reads      linger_seconds, then closed
    idle        idle_seconds; bytes that begin no request do not count
"""

from asyncio import TimerHandle, Transport
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from engine.server.http.connections import Connection, Connections
from engine.server.http.errors import ApiError, overloaded
from engine.server.http.limits import Limits

CLOSE_SECONDS = 2.0  # between two looks at a connection that closes; that a peer with nothing left to read gets


class BoundedHttpProtocol(HttpToolsProtocol):
    """What a server's connections share are class attributes: it is uvicorn that constructs a protocol for each."""

    limits = Limits()
    connections_open = Connections(Limits())

    @classmethod
    def with_limits(cls, limits: Limits) -> "type[BoundedHttpProtocol]":
        """The class for one server."""
        return type(cls.__name__, (cls,), {"limits": limits, "connections_open": Connections(limits)})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.connection = Connection(None)  # the acceptor's, where there is one
        self._reading_headers = False
        self._header_bytes = 0
        self._unfinished = 0  # bytes that came since the headers began
        self._header_timer: TimerHandle | None = None
        self._linger_timer: TimerHandle | None = None
        self._unread_timer: TimerHandle | None = None
        self._discarded = 0   # bytes of a request that nobody reads
        self._unsent = 0      # bytes in the write buffer when it was last looked at
        self._unsent_since = 0.0

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.connection.close = transport.abort
        if self.connections_open.ended:
            self.shutdown()
            return
        if self.connection.refused:
            self._refuse(overloaded("The server has as many connections as it takes.",
                                    self.limits.retry_after_seconds))
            return
        self.connections_open.arriving.add(self)
        self._start_header_timer()  # a connection on which nothing ever comes costs a descriptor

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_idle_timer()
        for timer in (self._linger_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        self.connections_open.arriving.discard(self)
        self.connections_open.gone(self.connection)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._linger_timer is not None:
            self._discarded += len(data)
            if self._discarded > self.limits.max_discarded_bytes:
                self._close()
            return
        super().data_received(data)
        if self._reading_headers:
            # The parser keeps an unfinished header to itself, and reports its size only when it is whole.
            self._unfinished += len(data)
            if self._unfinished > self.limits.max_header_bytes:
                self._header_bytes = self._unfinished
                self.send_400_response("")
        if self._reading_headers and self._header_timer is None and not self._closing:
            self._start_header_timer()  # a kept-alive connection began its next request

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._stop_idle_timer()
        self.connections_open.arriving.add(self)
        self._reading_headers, self._header_bytes, self._unfinished = True, 0, 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._reading_headers = False
        self._stop_header_timer()
        super().on_headers_complete()
        self.connections_open.arriving.discard(self)
        self.connections_open.working(self.connection)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Run the application; if it answers before it has read the request's body, the connection closes behind the
        answer, because whoever sends the rest could hold it for ever."""

        async def closing(scope: Any, receive: Any, send: Any) -> None:
            async def closing_send(message: Any) -> None:
                if cycle.more_body and not cycle.response_started:
                    cycle.keep_alive = False
                    cycle.transport = _Gently(self)  # type: ignore[assignment]
                await send(message)

            await app(scope, receive, closing_send)

        super()._start_asgi_task(cycle, closing)

    def pause_writing(self) -> None:
        """The peer does not read, and what waits for it has become much: it gets a while, not for ever."""
        super().pause_writing()
        self._await_reading(self.transport.get_write_buffer_size())

    def _await_reading(self, unsent: int) -> None:
        self._unread_timer = self.loop.call_later(self.limits.send_seconds, self._abort_unless_read, unsent)

    def _abort_unless_read(self, unsent: int) -> None:
        """Somebody who reads slowly goes on; who took nothing is dropped."""
        left = self.transport.get_write_buffer_size()
        if left < unsent:
            self._await_reading(left)
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        super().resume_writing()

    def _unset_keepalive_if_required(self) -> None:
        """uvicorn stops the idle timer at any byte. Here only a request does: `on_message_begin`."""

    def _stop_idle_timer(self) -> None:
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def shutdown(self) -> None:
        """The server ends: close now if idle, after the answer if not."""
        if self._linger_timer is not None:
            self._close()
            return
        super().shutdown()
        self._watch_closing()

    def on_response_complete(self) -> None:
        if self._linger_timer is not None:
            self.connections_open.waits(self.connection, known=False)
            return
        caller = self.cycle.scope.get("caller")  # of RequestContext, once somebody has looked for a key
        super().on_response_complete()
        if self.pipeline and not self.transport.is_closing():
            self.flow.pause_reading()  # uvicorn has resumed it: requests would queue up without end
        if self.transport.is_closing():
            self._watch_closing()
        elif self.cycle.response_complete:
            self.connections_open.waits(self.connection, known=getattr(caller, "key", None) is not None)

    def send_400_response(self, msg: str) -> None:
        """What cannot be parsed as HTTP, and headers over the limit (the parser reports our exception as its own)."""
        if self._header_bytes > self.limits.max_header_bytes:
            self._refuse(ApiError(431, f"The request's headers exceed {self.limits.max_header_bytes} bytes.",
                                  code="request_too_large"))
        else:
            self._refuse(ApiError(400, msg))

    @property
    def _closing(self) -> bool:
        return self._linger_timer is not None or self.transport.is_closing()

    def linger(self) -> None:
        """Everything is said, but the peer may still be sending. Closed now, its next bytes would be answered with a
        reset, and it might never see what we said: so read and drop them for a moment."""
        if self._closing:
            return
        self._stop_header_timer()
        self._stop_idle_timer()
        self._linger_timer = self.loop.call_later(self.limits.linger_seconds, self._close)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _close(self) -> None:
        self.transport.close()
        self._watch_closing()

    def _watch_closing(self) -> None:
        """A closing transport first sends what it still has, and over TLS awaits the peer's farewell: both for ever,
        unless somebody looks."""
        if self.transport.is_closing():
            self._unsent, self._unsent_since = self.transport.get_write_buffer_size(), self.loop.time()
            self.loop.call_later(CLOSE_SECONDS, self._abort_if_stuck)

    def _abort_if_stuck(self) -> None:
        unsent, now = self.transport.get_write_buffer_size(), self.loop.time()
        if unsent < self._unsent:
            self._unsent, self._unsent_since = unsent, now
        if unsent and now - self._unsent_since < self.limits.send_seconds:  # somebody who reads slowly
            self.loop.call_later(CLOSE_SECONDS, self._abort_if_stuck)
        else:
            self.transport.abort()

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self.limits.max_header_bytes:
            raise ValueError("headers too large")  # stops the parser

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.limits.header_seconds, self._header_timeout)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _header_timeout(self) -> None:
        self._header_timer = None
        if self._reading_headers and not self._closing:
            self._refuse(ApiError(408, f"The request's headers did not arrive within {self.limits.header_seconds:g} "
                                       "seconds.", code="request_timeout"))
        else:
            self._close()

    def _refuse(self, error: ApiError) -> None:
        if self._closing:
            return
        body = error.body()
        headers = {"content-type": "application/json", "connection": "close", "content-length": str(len(body)),
                   **error.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + lines.encode("latin-1") + b"\r\n" + body)
        self.linger()


class _Gently:
    """The transport of a request that is answered before it has been read: closing it lingers."""

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        self._protocol = protocol

    def write(self, data: bytes) -> None:
        self._protocol.transport.write(data)

    def is_closing(self) -> bool:
        return self._protocol.transport.is_closing()

    def close(self) -> None:
        self._protocol.linger()
