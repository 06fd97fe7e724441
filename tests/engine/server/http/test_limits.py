"""Transport under attack: huge, slow, half-sent and abandoned requests leave nothing behind."""
# ruff: noqa: E501 - tables are easier to check one row a line

import concurrent.futures
import contextlib
import json
import random
import socket
import struct
import time
from contextlib import closing

import httpx
import pytest
from gateways import RunningServer

BODY = json.dumps({"prompt": "a", "max_tokens": 2}).encode()


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def head(length: int | None = None, *extra: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *extra]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@pytest.fixture(autouse=True)
def _clean(tiny_server: RunningServer):
    yield
    tiny_server.wait_idle()
    assert httpx.post(f"{tiny_server.url}/v1/completions", content=BODY).status_code == 200


def test_a_body_over_the_limit_is_413(tiny_server: RunningServer) -> None:
    for size in (5 << 20, 10 << 20):
        reply = httpx.post(
            f"{tiny_server.url}/v1/chat/completions",
            content=b'{"messages": "' + b"x" * size,
            headers={"Content-Type": "application/json"},
        )
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "request_too_large"


def test_a_chunked_body_is_counted_as_it_comes(tiny_server: RunningServer) -> None:
    def pieces():
        for _ in range(10):
            yield b"x" * (1 << 20)

    reply = httpx.post(
        f"{tiny_server.url}/v1/completions", content=pieces(), headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == 413


def test_an_absurd_length_is_refused_without_reading(tiny_server: RunningServer) -> None:
    with closing(connect(tiny_server)) as connection:
        connection.sendall(head(10**12))
        assert b" 413 " in read_all(connection).split(b"\r\n", 1)[0]


def test_a_body_below_the_limit_is_read(tiny_server: RunningServer) -> None:
    padded = BODY[:-1] + b', "metadata": {"x": "' + b"y" * (3 << 20) + b'"}}'
    assert httpx.post(f"{tiny_server.url}/v1/completions", content=padded).status_code == 200


@pytest.mark.parametrize("sent", [b"", BODY[:5]])
def test_a_half_sent_body_times_out(tiny_server: RunningServer, sent: bytes) -> None:
    with closing(connect(tiny_server)) as connection:
        started = time.monotonic()
        connection.sendall(head(len(BODY)) + sent)
        reply = read_all(connection)
        assert b" 408 " in reply.split(b"\r\n", 1)[0]
        assert json.loads(reply.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "request_timeout"
        assert time.monotonic() - started < 20


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: "])
def test_half_sent_headers_time_out(tiny_server: RunningServer, sent: bytes) -> None:
    with closing(connect(tiny_server)) as connection:
        started = time.monotonic()
        connection.sendall(sent)
        reply = read_all(connection)
        assert reply == b"" or b" 408 " in reply.split(b"\r\n", 1)[0]
        assert time.monotonic() - started < 20


def test_a_trickle_does_not_extend_the_time(tiny_server: RunningServer) -> None:
    with closing(connect(tiny_server)) as connection:
        started = time.monotonic()
        connection.sendall(head(1000))
        try:
            for _ in range(200):
                connection.sendall(b" ")
                time.sleep(0.1)
        except OSError:
            pass
        assert time.monotonic() - started < 18


def test_headers_over_the_limit_are_refused(tiny_server: RunningServer) -> None:
    reply = httpx.get(f"{tiny_server.url}/version", headers={"X-Big": "x" * 40_000})
    assert reply.status_code == 431
    many = {f"X-{i}": "y" * 100 for i in range(500)}
    assert httpx.get(f"{tiny_server.url}/version", headers=many).status_code == 431


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nX-Endless: "])
def test_a_header_without_end_is_refused(tiny_server: RunningServer, start: bytes) -> None:
    with closing(connect(tiny_server)) as connection:
        connection.sendall(start)
        with contextlib.suppress(OSError):
            for _ in range(1000):
                connection.sendall(b"x" * 10_000)
        with contextlib.suppress(OSError):
            assert connection.recv(100)[:12] in (b"HTTP/1.1 431", b"")


@pytest.mark.parametrize("garbage", [
    b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n\r\n", b"GET \xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
])  # fmt: skip
def test_bytes_that_are_not_http(tiny_server: RunningServer, garbage: bytes) -> None:
    with closing(connect(tiny_server)) as connection:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        reply = read_all(connection)
        assert reply == b"" or reply.split(b" ", 2)[1] in (b"400", b"404", b"408", b"415")


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_pages(tiny_server: RunningServer, stream: bool) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 450, "ignore_eos": True, "n": 4, "stream": stream}).encode()
    for _ in range(3):
        connection = connect(tiny_server)
        connection.sendall(head(len(body)) + body)
        deadline = time.monotonic() + 60
        while not tiny_server.client.stats.num_running:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        connection.close()
        tiny_server.wait_idle()


def test_a_disconnect_before_the_body_is_whole(tiny_server: RunningServer) -> None:
    for _ in range(5):
        connection = connect(tiny_server)
        connection.sendall(head(len(BODY)) + BODY[:7])
        connection.close()


def test_many_requests_with_random_disconnects_leave_nothing(tiny_server: RunningServer) -> None:
    rng = random.Random(1)

    def one(seed: int, cut: int | None) -> None:
        body = {"prompt": "ab" * (seed % 40 + 1), "max_tokens": seed % 90 + 1, "n": seed % 3 + 1, "seed": seed,
                "stream": bool(seed % 2), "stop": ["e"] if seed % 5 == 0 else None}  # fmt: skip
        if cut is None:
            assert httpx.post(f"{tiny_server.url}/v1/completions", json=body, timeout=60).status_code == 200
            return
        data = json.dumps(body).encode()
        with closing(connect(tiny_server)) as connection:
            connection.sendall((head(len(data)) + data)[: None if cut > 3 else -5])
            time.sleep(cut / 100)

    cuts = [rng.choice([None, None, 0, 2, 5, 15]) for _ in range(120)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        list(pool.map(one, range(len(cuts)), cuts))
    tiny_server.wait_idle()
    stats = tiny_server.client.stats
    assert (stats.pages_in_use, stats.num_running, stats.num_waiting) == (0, 0, 0)


def test_a_reset_before_the_answer_is_no_defect(tiny_server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    """Found by the fuzzer: ending our side of a connection that was reset was logged as a failed request."""
    request = head(len(BODY) + 1, "Content-Encoding: gzip") + BODY  # refused, while its body seems to go on
    for i in range(400):
        with closing(connect(tiny_server)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing it is a reset
            connection.sendall(request)
            time.sleep(i % 20 / 4000)
    tiny_server.wait_idle()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
