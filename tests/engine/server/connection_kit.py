"""A server with short time limits, in this process, and what peers do to it: for the tests of connections."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import uvloop
from certificates import self_signed
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from engine.server.gateway.http_server import HttpServer, make_server
from engine.server.http.limits import Limits

TIMES = {"handshake_seconds": 1.0, "header_seconds": 1.0, "idle_seconds": 1.0, "linger_seconds": 0.5,
         "send_seconds": 1.0, "body_seconds": 1.0}  # fmt: skip
PATIENCE = 12.0  # for the longest chain of these times, on a busy machine
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
SLOW = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
BIG = 24 << 20  # bytes: more than the kernel's buffers hold


class Running:
    """A server under uvloop, as the gateway runs it. GET /slow is answered when `release` is set."""

    def __init__(self, directory: Path, *, tls: bool, unix: Path | None = None, **limits: float) -> None:
        certificate, key = self_signed(directory) if tls else (None, None)
        self.context = ssl.create_default_context(cafile=str(certificate)) if tls else None
        self.release = threading.Event()
        self.begun: list[str] = []
        self.done: list[str] = []
        routes = [Route("/", lambda _: PlainTextResponse("fine")), Route("/slow", self._slow),
                  Route("/big", lambda _: PlainTextResponse(b"x" * BIG)), Route("/stream", self._stream),
                  Route("/watched", self._watched, methods=["GET", "POST"]),
                  Route("/echo", self._echo, methods=["POST"]),
                  Route("/refused", lambda _: PlainTextResponse("no key", 401), methods=["POST"])]  # fmt: skip
        self.server: HttpServer = make_server(
            Starlette(routes=routes), Limits(**{**TIMES, **limits}),  # type: ignore[arg-type]
            access_log=False, shutdown_timeout=1, ssl_certfile=certificate, ssl_keyfile=key)
        if unix is not None:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(unix))
            listener.listen()
        else:
            listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self._thread = threading.Thread(target=lambda: uvloop.run(self.server.serve(sockets=[listener])), daemon=True)
        self._thread.start()
        while not self.server.started:
            time.sleep(0.01)

    async def _slow(self, request: Request) -> PlainTextResponse:
        while not self.release.is_set():
            await asyncio.sleep(0.01)
        return PlainTextResponse("at last")

    async def _stream(self, request: Request) -> StreamingResponse:
        async def pieces():
            try:
                for _ in range(BIG >> 16):
                    yield b"x" * (1 << 16)
            finally:
                self.done.append("stream")

        return StreamingResponse(pieces())

    async def _watched(self, request: Request) -> PlainTextResponse:
        """As the generating endpoints: reads its body, then looks whether its client leaves while it works."""
        self.begun.append("watched")
        await request.body()
        gone = asyncio.ensure_future(self._disconnected(request))
        while not self.release.is_set() and not gone.done():
            await asyncio.sleep(0.01)
        self.done.append("left" if gone.done() else "answered")
        gone.cancel()
        return PlainTextResponse("at last")

    async def _disconnected(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    async def _echo(self, request: Request) -> PlainTextResponse:
        try:
            return PlainTextResponse(b"%d bytes\n" % len(await request.body()))
        except ClientDisconnect:
            return PlainTextResponse("nobody reads this")

    @property
    def open(self) -> int:
        return len(self.server.connections)

    @property
    def protocols(self) -> list:
        return list(self.server.server_state.connections)

    def connect(self, source: str = "127.0.0.1", *, agree: bool = True, receive: int = 0) -> socket.socket:
        peer = socket.socket()
        if receive:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        peer.settimeout(15)
        peer.bind((source, 0))
        peer.connect(self.address)
        return self.context.wrap_socket(peer, server_hostname="localhost") if self.context and agree else peer

    def stop(self) -> None:
        self.release.set()
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def read_all(peer: socket.socket) -> bytes:
    data = bytearray()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while piece := peer.recv(1 << 16):
            data += piece
    return bytes(data)


def read_reply(peer: socket.socket) -> bytes:
    """Headers and a short body."""
    reply = b""
    while b"\r\n\r\n" not in reply or not reply.partition(b"\r\n\r\n")[2]:
        if not (piece := peer.recv(4096)):
            break
        reply += piece
    return reply


def read_until(peer: socket.socket, end: bytes) -> bytes:
    reply = b""
    while end not in reply:
        if not (piece := peer.recv(4096)):
            break
        reply += piece
    return reply
