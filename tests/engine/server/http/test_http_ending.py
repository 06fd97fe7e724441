"""The end of the HTTP server loses no request: who had connected is heard, and who says nothing not awaited long."""

import asyncio
import contextlib
import gc
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from certificates import self_signed
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from engine.server.gateway import http_server
from engine.server.http.limits import Limits

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
SHUTDOWN_SECONDS = 30.0


class Ending:
    """A server under uvloop, as the gateway runs it. A GET of /slow is answered when `release` is set."""

    def __init__(self, directory: Path, *, tls: bool) -> None:
        certificate, key = self_signed(directory) if tls else (None, None)
        self.context = ssl.create_default_context(cafile=str(certificate)) if tls else None
        self.release = threading.Event()
        app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("fine")), Route("/slow", self._slow)])
        self.server = http_server.make_server(app, Limits(), access_log=False, shutdown_timeout=SHUTDOWN_SECONDS,
                                              ssl_certfile=certificate, ssl_keyfile=key)
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self._thread = threading.Thread(target=self._run, args=(listener,), daemon=True)
        self._thread.start()
        self.ask(self.connect())

    async def _slow(self, request: Request) -> PlainTextResponse:
        while not self.release.is_set():
            await asyncio.sleep(0.01)
        return PlainTextResponse("at last")

    def _run(self, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.server.serve(sockets=[listener]))

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=10)

    def agree(self, peer: socket.socket) -> socket.socket:
        """Do the handshake where there is one."""
        return self.context.wrap_socket(peer, server_hostname="localhost") if self.context else peer

    def ask(self, peer: socket.socket, request: bytes = GET) -> bytes:
        with self.agree(peer) if not isinstance(peer, ssl.SSLSocket) else peer as agreed:
            agreed.sendall(request)
            return read_reply(agreed)

    def stop(self) -> None:
        self.server.should_exit = True
        while self.accepts():
            time.sleep(0.01)

    def accepts(self) -> bool:
        with contextlib.suppress(ConnectionRefusedError), self.connect():
            return True
        return False

    def ended(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()


def read_reply(peer: socket.socket) -> bytes:
    """Headers and the short body, which came in one piece or two."""
    reply = b""
    while b"\r\n\r\n" not in reply or not reply.partition(b"\r\n\r\n")[2]:
        piece = peer.recv(4096)
        if not piece:
            break
        reply += piece
    return reply


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def ending(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ending]:
    ending = Ending(tmp_path, tls=request.param)
    yield ending
    ending.release.set()
    ending.server.should_exit = ending.server.force_exit = True
    assert ending.ended(20)


def test_who_connected_before_the_end_is_answered(ending: Ending, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "ARRIVAL_SECONDS", 20.0)
    silent, agreed, begun, kept = ending.connect(), *(ending.agree(ending.connect()) for _ in range(3))
    begun.sendall(GET[:10])
    kept.sendall(GET)
    assert b" 200 " in read_reply(kept)
    kept.sendall(GET[:10])
    ending.ask(ending.connect())  # all of them have been accepted
    ending.stop()
    time.sleep(0.3)
    for peer, rest in ((agreed, GET), (begun, GET[10:]), (kept, GET[10:])):
        assert b" 200 " in ending.ask(peer, rest)
    assert b" 200 " in ending.ask(silent)  # TLS is agreed only now
    assert ending.ended(5)


def test_who_says_nothing_holds_it_up_for_a_moment_only(ending: Ending, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "ARRIVAL_SECONDS", 0.5)
    with ending.connect(), ending.agree(ending.connect()) as agreed:
        agreed.sendall(GET[:10])
        ending.ask(ending.connect())
        began = time.monotonic()
        ending.stop()
        assert ending.ended(SHUTDOWN_SECONDS / 2)
        assert time.monotonic() - began >= 0.5


def test_who_left_without_a_word_is_not_awaited(ending: Ending, monkeypatch: pytest.MonkeyPatch):
    """As a probe of the port does, which never begins TLS."""
    monkeypatch.setattr(http_server, "ARRIVAL_SECONDS", SHUTDOWN_SECONDS)
    gc.disable()  # it must not depend on when Python next looks for garbage
    try:
        for _ in range(5):
            ending.connect().close()
        ending.ask(ending.connect())
        ending.stop()
        assert ending.ended(5)
    finally:
        gc.enable()


def test_who_comes_out_of_the_handshake_after_that_is_not_waited_for(ending: Ending, monkeypatch: pytest.MonkeyPatch):
    """The server is still there, for somebody else's answer."""
    monkeypatch.setattr(http_server, "ARRIVAL_SECONDS", 0.2)
    with ending.connect() as late, ending.agree(ending.connect()) as slow:
        slow.sendall(GET.replace(b"/ ", b"/slow "))
        ending.ask(ending.connect())
        ending.stop()
        time.sleep(1)
        with contextlib.suppress(OSError), ending.agree(late) as agreed:
            assert agreed.recv(1) == b""
        assert not ending.ended(0)
        ending.release.set()
        assert b"at last" in read_reply(slow)
        assert ending.ended(5)
