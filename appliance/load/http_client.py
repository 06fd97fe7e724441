"""A lean HTTP/1.1 client for load: httptools parses, asyncio connects. Body bytes go to a callback as they arrive, with
the time, so that nothing waits in a queue between the socket and the clock."""

import asyncio
import hmac
import ssl
import time
from collections.abc import Callable
from types import TracebackType

import httptools

from appliance.load.target import Target
from installer.base.i18n import t

MOST_BODY = 64 << 20     # of one response: a target that sends more is not answering our question
MOST_IDLE = 4096         # connections kept for the next request

OnData = Callable[[bytes, float], None]


class HttpError(Exception):
    """The exchange failed. `began`: at least one byte of a response had come."""

    def __init__(self, detail: str, *, began: bool = False) -> None:
        super().__init__(detail)
        self.began = began


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.used = 0
        self._done: asyncio.Future[None] | None = None

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.close()  # bytes of no request
            return
        self._now, self._began = time.perf_counter(), True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as error:
            inner = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            self._fail(str(inner or error) or type(error).__name__)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if self._done is not None and not self._done.done():
            if self._ends_with_connection and error is None and self.status:
                self._done.set_result(None)
            else:
                self._fail(str(error) if error else t("the connection was closed"))

    # -- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False
        if len(self.headers) < 200:
            self.headers[lower] = value

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > MOST_BODY:
            raise ValueError(t("the answer is larger than 64 MiB"))
        self._on_data(body, self._now)

    def on_message_complete(self) -> None:
        self._keep = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    # -- one exchange

    async def exchange(self, request: bytes, on_data: OnData) -> tuple[int, dict[bytes, bytes]]:
        assert self.transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._on_data, self._size, self._began, self._keep = on_data, 0, False, False
        self._ends_with_connection = True
        self.status, self.headers = 0, {}
        self._done = asyncio.get_running_loop().create_future()
        self.used += 1
        self.transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        if not self._keep:
            self.close()
        return self.status, self.headers

    def _fail(self, detail: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(HttpError(detail, began=self._began))
        self.close()

    @property
    def usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort() if self.transport.is_closing() else self.transport.close()


class HttpClient:
    """Connections to one target, reused. Use as an async context manager: leaving closes them all."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._tls = target.tls_context()
        self._pinned = target.pinned_der()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        host = f"[{target.host}]" if ":" in target.host else target.host
        lines = [f"Host: {host}:{target.port}", "User-Agent: atoll-bench", "Accept: */*"]
        lines += [f"{name}: {value}" for name, value in target.headers]
        if target.key:
            lines.append(f"Authorization: Bearer {target.key}")
        self._head = "".join(f"{line}\r\n" for line in lines)

    async def __aenter__(self) -> "HttpClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._idle.clear()
        await asyncio.sleep(0)  # lets transports close

    async def request(
        self, method: str, path: str, body: bytes | None, on_data: OnData, *, headers: str = ""
    ) -> tuple[int, dict[bytes, bytes]]:
        """Status and headers, when the body has ended. Raises HttpError, OSError, ssl.SSLError. Cancelling closes the
        connection, so that the server notices that nobody reads."""
        head = f"{method} {path} HTTP/1.1\r\n{self._head}{headers}"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        data = head.encode() + b"\r\n" + (body or b"")
        while True:
            connection = await self._connection()
            fresh = connection.used == 0
            try:
                return await connection.exchange(data, on_data)
            except HttpError as error:
                if fresh or error.began:
                    raise
                # A kept connection that the server closed just now: no byte came, so the request may go again.
            finally:
                self._give_back(connection)

    async def get(self, path: str, timeout: float = 30.0) -> tuple[int, bytes]:
        """A whole small answer."""
        pieces: list[bytes] = []
        async with asyncio.timeout(timeout):
            status, _ = await self.request("GET", path, None, lambda data, now: pieces.append(data))
        return status, b"".join(pieces)

    async def post(self, path: str, body: bytes, timeout: float = 600.0) -> tuple[int, bytes]:
        """A whole small answer to a JSON body."""
        pieces: list[bytes] = []
        async with asyncio.timeout(timeout):
            status, _ = await self.request("POST", path, body, lambda data, now: pieces.append(data))
        return status, b"".join(pieces)

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            self._open.discard(connection)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self.target.connect_timeout):
            transport, connection = await loop.create_connection(
                _Connection, self.target.host, self.target.port, ssl=self._tls,
                server_hostname=self.target.host if self._tls else None,
            )  # fmt: skip
        self._open.add(connection)
        if self._pinned is not None:
            secured: ssl.SSLObject = transport.get_extra_info("ssl_object")
            if not hmac.compare_digest(secured.getpeercert(binary_form=True) or b"", self._pinned):
                connection.close()
                raise OSError(t("the endpoint serves another certificate than {certificate}; restart the service",
                                certificate=self.target.pinned))
        return connection

    def _give_back(self, connection: _Connection) -> None:
        if connection.usable and len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.close()
            self._open.discard(connection)
