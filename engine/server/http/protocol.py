"""HTTP/1.1 for uvicorn, with the limits that a LAN needs: headers limited in size and time, errors in OpenAI's format.

uvicorn with httptools limits neither: a client could send endless headers, or none at all. Here, every connection has a
request that is being answered or one of these timers:

    headers     header_seconds, from the connection or from a request's first byte
    body        body_seconds (body.py)
    answer      send_seconds while the client reads nothing of what is to be written (reader_watch.py; streams: sse.py)
    the rest of a body that nobody reads      linger_seconds, then closed
    idle        idle_seconds; bytes that do not begin a request do not count

Pipelined requests wait as raw bytes, not as parsed requests: the parser sees one request at a time. An error behind a
request (not HTTP, headers that are too large or too slow) is answered after that request.
"""

from asyncio import TimerHandle, Transport
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from engine.server.http.connections import Connection, Connections
from engine.server.http.errors import ApiError
from engine.server.http.limits import Limits
from engine.server.http.reader_watch import ReaderWatch

HEADER_PIECE_BYTES = 4096         # at most this much is parsed at once, until the headers end
BODY_PIECE_BYTES = 1024           # smaller, because after the end of a body it could contain some fifty short requests
SHORTEST_REQUEST_BYTES = 18       # GET / HTTP/1.1: a client that sends only line ends must not cost a call for each
WRITE_BUFFER_BYTES = 64 << 10     # uvloop's default for TLS is eight times larger: a slow reader would seem not to read
_END_OF_HEADERS = b"\n\r\n"


class BoundedHttpProtocol(HttpToolsProtocol):
    """What a server's connections share is in class attributes, because uvicorn constructs the protocol objects."""

    limits = Limits()
    connections_open = Connections(Limits())

    @classmethod
    def with_limits(cls, limits: Limits) -> "type[BoundedHttpProtocol]":
        """The class for one server."""
        return type(cls.__name__, (cls,), {"limits": limits, "connections_open": Connections(limits)})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.connection = Connection(None)  # replaced by the acceptor's, if there is one
        self._reading_headers = False
        self._header_bytes = 0
        self._unfinished = 0  # bytes received since the headers began
        self._header_timer: TimerHandle | None = None
        self._linger_timer: TimerHandle | None = None
        self._reader: ReaderWatch | None = None
        self._running: RequestResponseCycle | None = None  # the last request that was handed to the application
        self._held = bytearray()  # bytes received after it that are not parsed yet
        self._refusal: ApiError | None = None  # an error in the bytes after it; sent when it has been answered
        self._discarded = 0   # bytes that were received and dropped

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self.flow = _Flow(transport, self)
        self._reader = ReaderWatch(transport, self.loop, self.limits.send_seconds)
        self.connection.close = transport.abort
        if self.connections_open.ended:
            self.shutdown()
            return
        if self.connection.refused is not None:
            self._refuse(self.connection.refused)
            return
        self.connections_open.arriving.add(self)
        self._start_header_timer()  # a silent connection takes a descriptor

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_idle_timer()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        if self._reader is not None:
            self._reader.stop()
        self.connections_open.arriving.discard(self)
        self.connections_open.gone(self.connection)
        if self._running is not None:  # uvicorn only tells the latest request
            _disconnect(self._running)
        self.pipeline.clear()
        self._held.clear()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The transport now sends its remaining bytes and closes itself."""
        self.loop.call_soon(self._watch_closing)

    # -- what the client sends

    def data_received(self, data: bytes) -> None:
        if self._linger_timer is None and self._refusal is None:
            self._held += data
            self._parse_held()
            return
        self._discarded += len(data)
        if self.crowded:
            self.flow.pause_reading()
        elif self._discarded > self.limits.max_discarded_bytes:
            self._close()

    @property
    def crowded(self) -> bool:
        """Whether more bytes have arrived than this connection may hold before its current request is answered."""
        deaf = self._refusal is not None and self._discarded > self.limits.max_discarded_bytes
        return deaf or len(self._held) > HIGH_WATER_LIMIT

    def _parse_held(self) -> None:
        """Feed the parser, up to and including the headers of a request that must wait for the previous one.

        So a connection holds one parsed waiting request: once parsed, small requests take a hundred times their bytes.
        """
        while self._held and not self.pipeline and self._refusal is None and not self._closing:
            size = self._piece()
            piece = bytes(self._held[:size])
            del self._held[:size]
            self._parse(piece)
        if self._refusal is not None or self._closing:
            self._held.clear()
        if self.crowded:
            self.flow.pause_reading()
        elif self.pipeline and len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()  # uvicorn paused it: we would not notice a disconnect

    def _piece(self) -> int:
        """How many bytes to parse now: at most one request, if its end can be found."""
        if self.cycle is not None and self.cycle.more_body and not self._reading_headers:
            return BODY_PIECE_BYTES
        end = self._held.find(_END_OF_HEADERS, SHORTEST_REQUEST_BYTES - len(_END_OF_HEADERS), HEADER_PIECE_BYTES)
        return HEADER_PIECE_BYTES if end < 0 else end + len(_END_OF_HEADERS)

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self._reading_headers:
            # The parser reports a header only when it is complete, so count the bytes of unfinished ones here.
            self._unfinished += len(data)
            if self._unfinished > self.limits.max_header_bytes:
                self._header_bytes = self._unfinished
                self.send_400_response("")
        if self._reading_headers and self._header_timer is None and self._refusal is None and not self._closing:
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

    def _unsupported_upgrade_warning(self) -> None:
        """The parser accepts no further bytes on this connection, so it is closed after the answer."""
        self.cycle.keep_alive = False

    # -- what the client gets

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Run the application. If it answers before it has read the request's body, the connection closes after the
        answer, because a client that never sends the rest could keep it open."""
        self._running = cycle
        cycle.transport = _Reply(self)  # type: ignore[assignment]

        async def closing(scope: Any, receive: Any, send: Any) -> None:
            async def closing_send(message: Any) -> None:
                if cycle.more_body and not cycle.response_started:
                    cycle.keep_alive = False
                if cycle.scope["http_version"] == "1.0":
                    _without_chunks(cycle, message)
                await send(message)

            await app(scope, receive, closing_send)

        super()._start_asgi_task(cycle, closing)

    @property
    def _busy(self) -> bool:
        """Whether the application is working on an answer."""
        running = self._running
        return running is not None and not running.response_complete and not running.disconnected

    @property
    def _known(self) -> bool:
        """Whether the last request came with a valid key."""
        caller = self._running.scope.get("caller") if self._running is not None else None  # of RequestContext
        return getattr(caller, "key", None) is not None

    def pause_writing(self) -> None:
        """The client does not read, and the write buffer is full: start the timer after which the connection is
        closed."""
        super().pause_writing()
        assert self._reader is not None
        self._reader.behind()
        if not self._known:  # a client without a key must not protect its connection by not reading
            self.connections_open.waits(self.connection, known=False)

    def resume_writing(self) -> None:
        if self._reader is not None:
            self._reader.caught_up()
        if self._busy:
            self.connections_open.working(self.connection)
        super().resume_writing()

    def on_response_complete(self) -> None:
        if self._closing:
            self.pipeline.clear()
            self.connections_open.waits(self.connection, known=False)
            return
        known = self._known
        super().on_response_complete()
        self._parse_held()
        if self._busy or self._closing:
            return
        if self._reading_headers:  # the next request has begun: it has a timer of its own
            self._stop_idle_timer()
        self.connections_open.waits(self.connection, known=known)
        if self._refusal is not None:
            self._say(self._refusal)

    def _unset_keepalive_if_required(self) -> None:
        """Do nothing: uvicorn would stop the idle timer at any byte, but here only a request does
        (`on_message_begin`)."""

    def _stop_idle_timer(self) -> None:
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    # -- the end

    def shutdown(self) -> None:
        """The server stops: close now if idle, else after the answer."""
        if self._linger_timer is not None:
            self._close()
            return
        super().shutdown()
        self._watch_closing()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, and headers over the limit (the parser reports our exception as its own)."""
        if self._header_bytes > self.limits.max_header_bytes:
            self._refuse(ApiError(431, f"The request's headers exceed {self.limits.max_header_bytes} bytes.",
                                  code="request_too_large"))
        else:
            self._refuse(ApiError(400, msg))

    def _refuse(self, error: ApiError) -> None:
        """Stop reading and answer with an error. Requests that arrived completely are answered first."""
        if self._closing or self._refusal is not None:
            return
        self._stop_header_timer()
        self.connections_open.arriving.discard(self)
        broken = self.cycle if self.cycle is not None and self.cycle.more_body and not self._reading_headers else None
        if broken is not None and broken is not self._running:
            self.pipeline.clear()  # drop the waiting request: its body is broken
        elif broken is not None and not broken.response_started:
            _disconnect(broken)  # the application waits for a body that will not come
        if self._busy:
            self._refusal = error
        else:
            self._say(error)

    def _say(self, error: ApiError) -> None:
        body = error.body()
        headers = {"content-type": "application/json", "connection": "close", "content-length": str(len(body)),
                   **error.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + lines.encode("latin-1") + b"\r\n" + body)
        self._linger()

    @property
    def _closing(self) -> bool:
        return self._linger_timer is not None or self.transport.is_closing()

    def end(self) -> None:
        """Called when the last answer of this connection is written."""
        if self.cycle.more_body or self._reading_headers or self._held or self.pipeline or self._refusal is not None:
            self._linger()
        else:
            self._close()

    def _linger(self) -> None:
        """Read and drop what the client still sends for a moment before closing. If we closed at once, the kernel would
        answer its next bytes with a reset, and the client might never see our answer."""
        if self._closing:
            return
        self._stop_header_timer()
        self._stop_idle_timer()
        self._held.clear()
        self._linger_timer = self.loop.call_later(self.limits.linger_seconds, self._close)
        self._discarded, self._refusal = 0, None
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            with suppress(OSError):  # the peer is gone already
                self.transport.write_eof()

    def _close(self) -> None:
        self.transport.close()
        self._watch_closing()

    def _watch_closing(self) -> None:
        if self._reader is not None and self.transport.is_closing() and self.parser is not None:  # None: it is closed
            self._reader.closing()

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


class _Flow(FlowControl):
    """The protocol can pause reading, too; then it stays paused whatever a request asks for."""

    def __init__(self, transport: Transport, protocol: BoundedHttpProtocol) -> None:
        super().__init__(transport)
        self._protocol = protocol

    def resume_reading(self) -> None:
        if not self._protocol.crowded:
            super().resume_reading()


class _Reply:
    """The transport as one request sees it: the protocol decides when the connection ends, and nothing is written after
    that."""

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        self._protocol = protocol
        self.close = protocol.end

    def write(self, data: bytes) -> None:
        """Write in pieces: uvloop passes a TLS write to the socket as a whole, and would count none of it as unsent."""
        if self.is_closing():
            return
        if len(data) <= WRITE_BUFFER_BYTES:
            self._protocol.transport.write(data)
            return
        view = memoryview(data)
        for start in range(0, len(view), WRITE_BUFFER_BYTES):
            self._protocol.transport.write(view[start : start + WRITE_BUFFER_BYTES])

    def is_closing(self) -> bool:
        return self._protocol._closing


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tell the application that the client has gone."""
    if not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()


def _without_chunks(cycle: RequestResponseCycle, message: Any) -> None:
    """Let a reply of unknown length, such as a stream, end with the connection: HTTP/1.0 has no chunks, and its clients
    would take their sizes for content. uvicorn sends chunks to everybody."""
    if message["type"] == "http.response.start":
        if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
            cycle.chunked_encoding = False
    elif cycle.expected_content_length == 0:
        cycle.expected_content_length = len(message.get("body", b""))  # uvicorn compares the two
