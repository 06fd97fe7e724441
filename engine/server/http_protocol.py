"""HTTP/1.1 for uvicorn, with the bounds that a LAN needs: headers limited in size and time, errors in OpenAI's shape.

uvicorn over httptools bounds neither: a client could send headers for ever, or none at all.
"""

import gc
from asyncio import TimerHandle, Transport
from typing import Any
from weakref import WeakSet

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from engine.server.errors import ApiError
from engine.server.limits import Limits

CLOSE_SECONDS = 2.0  # that a peer with nothing left to read gets to close its side when the server ends


class Arrivals:
    """The connections of one server whose request is on its way: accepted (TLS may not be agreed yet), or begun.

    A server that ends and drops one of these loses a request that no other server can see.
    """

    def __init__(self) -> None:
        self.awaited: WeakSet[BoundedHttpProtocol] = WeakSet()
        self.ended = False  # nobody is awaited any more

    def pending(self) -> bool:
        """Whether anybody is awaited. A connection that failed before TLS was agreed tells nobody: it is only garbage,
        in a cycle with its parser."""
        if any(connection.transport is None for connection in self.awaited):
            gc.collect()
        return bool(self.awaited)


class BoundedHttpProtocol(HttpToolsProtocol):
    """What a server's connections share are class attributes: it is uvicorn that constructs a protocol for each."""

    limits = Limits()
    arrivals = Arrivals()

    @classmethod
    def with_limits(cls, limits: Limits) -> "type[BoundedHttpProtocol]":
        """The class for one server."""
        return type(cls.__name__, (cls,), {"limits": limits, "arrivals": Arrivals()})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.arrivals.awaited.add(self)
        self._reading_headers = False
        self._header_bytes = 0
        self._unfinished = 0  # bytes that came since the headers began
        self._header_timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.arrivals.ended:
            self.shutdown()
            return
        self._start_header_timer()  # a connection on which nothing ever comes costs a descriptor

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self.arrivals.awaited.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._reading_headers:
            # The parser keeps an unfinished header to itself, and reports its size only when it is whole.
            self._unfinished += len(data)
            if self._unfinished > self.limits.max_header_bytes:
                self._header_bytes = self._unfinished
                self.send_400_response("")
        if self._reading_headers and self._header_timer is None and not self.transport.is_closing():
            self._start_header_timer()  # a kept-alive connection began its next request

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.arrivals.awaited.add(self)
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
        self.arrivals.awaited.discard(self)

    def shutdown(self) -> None:
        """The server ends: close now if idle, after the answer if not."""
        super().shutdown()
        self._bound_closing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.arrivals.ended:
            self._bound_closing()

    def send_400_response(self, msg: str) -> None:
        """What cannot be parsed as HTTP, and headers over the limit (the parser reports our exception as its own)."""
        if self._header_bytes > self.limits.max_header_bytes:
            self._refuse(ApiError(431, f"The request's headers exceed {self.limits.max_header_bytes} bytes.",
                                  code="request_too_large"))
        else:
            self._refuse(ApiError(400, msg))

    def _bound_closing(self) -> None:
        """A TLS peer that does not answer our close_notify must not hold the server's end up."""
        if self.transport.is_closing():
            self.loop.call_later(CLOSE_SECONDS, self._abort_if_written)

    def _abort_if_written(self) -> None:
        if self.transport.get_write_buffer_size():  # somebody who reads slowly
            self._bound_closing()
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
        if self._reading_headers and not self.transport.is_closing():
            self._refuse(ApiError(408, f"The request's headers did not arrive within {self.limits.header_seconds:g} "
                                       "seconds.", code="request_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        body = error.body()
        self.transport.write(b"".join((
            STATUS_LINE[error.status], b"content-type: application/json\r\nconnection: close\r\ncontent-length: ",
            str(len(body)).encode(), b"\r\n\r\n", body,
        )))
        self.transport.close()
