"""The bounds of the HTTP layer below the app: sizes and times of headers, and what is no HTTP at all."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from engine.server.http.limits import Limits
from engine.server.http.protocol import BoundedHttpProtocol

HEADER_SECONDS = 0.5
GET = b"GET / HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("fine")),
                            Route("/stream", lambda _: StreamingResponse(iter(["data: 1\n\n", "data: 2\n\n"])))])
    limits = Limits(header_seconds=HEADER_SECONDS, max_header_bytes=1000)
    server = uvicorn.Server(uvicorn.Config(
        app, http=BoundedHttpProtocol.with_limits(limits), ws="none", lifespan="off", log_config=None))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def peer(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=30) as peer:
        yield peer


def read_all(peer: socket.socket) -> bytes:
    data = b""
    try:
        while piece := peer.recv(65536):
            data += piece
    except ConnectionError:
        pass
    return data


@pytest.mark.parametrize("request_bytes, status, word", [
    (b"\x16\x03\x01\x02\x00 TLS to a plain port\r\n\r\n", 400, "Invalid HTTP"),
    (b"GET / HTTP/9.9\r\n\r\n", 400, "Invalid HTTP"),
    (b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\n\r\n", 431, "1000 bytes"),
    (GET + b"X: " + b"a" * 2000 + b"\r\n\r\n", 431, "1000 bytes"),
    (GET + b"A: b\r\n" * 300 + b"\r\n", 431, "1000 bytes"),
])
def test_refusals_are_openai_shaped(peer: socket.socket, request_bytes: bytes, status: int, word: str) -> None:
    peer.sendall(request_bytes)
    reply = read_all(peer)
    assert reply.startswith(b"HTTP/1.1 %d " % status)
    assert b'{"error":{"message":' in reply
    assert word.encode() in reply


def test_headers_up_to_the_bound_pass(peer: socket.socket) -> None:
    peer.sendall(GET + b"X: " + b"a" * 900 + b"\r\n\r\n")
    assert b"200 OK" in peer.recv(4096)


@pytest.mark.parametrize("start", [b"", b"GET / HT", GET])
def test_headers_that_do_not_arrive_are_not_awaited_for_ever(peer: socket.socket, start: bytes) -> None:
    began = time.monotonic()
    peer.sendall(start)
    reply = read_all(peer)
    assert HEADER_SECONDS * 0.8 < time.monotonic() - began < 20
    assert (b" 408 " in reply) == bool(start)  # a connection on which nothing came is closed without a word


def test_a_dripping_sender_gets_no_more_time(peer: socket.socket) -> None:
    began = time.monotonic()
    peer.sendall(GET)
    with pytest.raises(OSError):
        for _ in range(100):
            peer.sendall(b"A: b\r\n")
            time.sleep(0.1)
    assert time.monotonic() - began < 8


def test_a_kept_alive_connection_is_bounded_request_by_request(peer: socket.socket) -> None:
    for _ in range(3):
        peer.sendall(GET + b"\r\n")
        assert b"200 OK" in peer.recv(4096)
        time.sleep(HEADER_SECONDS * 1.2)  # idle between requests is allowed
    peer.sendall(GET)
    assert b" 408 " in read_all(peer)


def test_a_stream_to_http_1_0_ends_with_the_connection_and_has_no_chunks(peer: socket.socket) -> None:
    peer.sendall(b"GET /stream HTTP/1.0\r\n\r\n")
    headers, _, body = read_all(peer).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in headers.lower()
    assert b"connection: close" in headers.lower()
    assert body == b"data: 1\n\ndata: 2\n\n"
