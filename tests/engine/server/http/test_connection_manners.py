"""What a connection does for peers that read slowly, send ahead, or send what is no HTTP: real sockets, a real server,
plain and with TLS. No test may leave an exception in the log."""

import contextlib
import json
import logging
import socket
import ssl
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from connection_kit import BIG, GET, PATIENCE, POST, SLOW, Running, read_all, read_reply, read_until, until
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

WATCHED = b"GET /watched HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path, tls=request.param)
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def clean_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    records = [*caplog.get_records("setup"), *caplog.get_records("call")]
    assert [r.getMessage() for r in records if r.exc_info or r.levelno >= logging.ERROR] == []


def error_in(reply: bytes) -> str:
    return json.loads(reply.rpartition(b"\r\n\r\n")[2])["error"]["message"]


# -- reading


@pytest.mark.parametrize("path", [b"/big", b"/stream"])
def test_who_does_not_read_is_left(running: Running, path: bytes):
    began = time.monotonic()
    with running.connect(receive=4096) as peer:
        peer.sendall(GET.replace(b"/ ", path + b" "))
        until(lambda: running.open == 1)
        until(lambda: running.open == 0, 2 * PATIENCE)
        assert time.monotonic() - began < 2 * PATIENCE
    if path == b"/stream":
        until(lambda: running.done == ["stream"])


def test_who_asks_again_and_again_without_reading_is_left(running: Running):
    """Without a key too: refusals fill the buffers as well as answers do."""
    with running.connect(receive=4096) as peer:
        peer.settimeout(0.5)
        with contextlib.suppress(OSError):
            for _ in range(200_000):
                peer.sendall(GET)
        until(lambda: running.open == 0, 2 * PATIENCE)


def test_who_leaves_without_reading_is_left(running: Running):
    """The end of what it sends closes the connection, and what is buffered still goes out first."""
    with running.connect(receive=4096) as peer:
        peer.sendall(GET.replace(b"/ ", b"/big "))
        until(lambda: any(p.flow.write_paused for p in running.protocols))
        if not isinstance(peer, ssl.SSLSocket):
            peer.shutdown(socket.SHUT_WR)
        until(lambda: running.open == 0, 2 * PATIENCE)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("headers", [b"", b"Connection: close\r\n"], ids=["kept", "closed"])
def test_who_reads_slowly_but_reads_gets_everything(tmp_path: Path, tls: bool, headers: bytes):
    """The answer takes far longer than any one of the times, also where the connection closes with it."""
    running = Running(tmp_path, tls=tls, send_seconds=0.5, linger_seconds=0.2)
    try:
        with running.connect(receive=1 << 16) as peer:
            peer.sendall(b"GET /big HTTP/1.1\r\nHost: x\r\n%s\r\n" % headers)
            size, began = 0, time.monotonic()
            while size < BIG and (piece := peer.recv(1 << 20)):
                size += len(piece)
                if time.monotonic() - began < 4:
                    time.sleep(0.02)
        assert size >= BIG
        assert time.monotonic() - began > 4
    finally:
        running.stop()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_trickle_is_reading_too(tmp_path: Path, tls: bool):
    """Far less at a time than the kernel's buffers and the transport's hold."""
    running = Running(tmp_path, tls=tls, send_seconds=1.0)
    try:
        with running.connect(receive=1 << 14) as peer:
            peer.sendall(GET.replace(b"/ ", b"/big "))
            until(lambda: any(p.flow.write_paused for p in running.protocols))
            for _ in range(60):  # 100 kB/s: the server's buffers alone last longer than it would wait
                assert peer.recv(10_000)
                time.sleep(0.1)
            assert running.open == 1
    finally:
        running.stop()


def test_not_reading_protects_no_place(tmp_path: Path):
    running = Running(tmp_path, tls=False, max_connections=2, send_seconds=60.0, header_seconds=60.0)
    try:
        with running.connect(receive=4096) as deaf, running.connect() as busy:
            deaf.sendall(GET.replace(b"/ ", b"/stream "))
            busy.sendall(SLOW)
            until(lambda: any(p.flow.write_paused for p in running.protocols))
            with running.connect() as peer:
                peer.sendall(GET)
                assert b" 200 " in read_reply(peer)
            running.release.set()
            assert b"at last" in read_reply(busy)
    finally:
        running.stop()


# -- sending ahead


def test_many_requests_at_once_wait_as_bytes(running: Running):
    """Parsed, a request of 18 bytes takes kilobytes. Who sends many holds one of them, and the rest in the kernel."""
    short = b"GET / HTTP/1.1\r\n\r\n"
    with running.connect() as peer:
        peer.sendall(SLOW)
        until(lambda: running.open == 1)
        tracemalloc.start()
        try:
            peer.settimeout(1)
            with contextlib.suppress(OSError):
                for _ in range(200):
                    peer.sendall(short * 1000)
            (protocol,) = running.protocols
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(protocol.pipeline) <= 1
        assert protocol.flow.read_paused
        assert held < 4 << 20
        if isinstance(peer, ssl.SSLSocket):  # it was cut off in the middle of a record
            return
        peer.settimeout(15)
        running.release.set()
        replies = b""
        while replies.count(b"fine") < 5000:
            piece = peer.recv(1 << 16)
            assert piece
            replies += piece
        assert replies.index(b"at last") < replies.index(b"fine")


def test_requests_are_answered_in_their_order_with_their_bodies(running: Running):
    """A body that comes before its request has its turn is read then, whole."""
    sizes = [5, 300_000, 0, 70_000, 4096, 1_000_000]
    with running.connect() as peer:
        peer.sendall(SLOW + b"".join(POST % (b"/echo", size) + b"\r\n\r\n" * (size // 4) + b"x" * (size % 4)
                                     for size in sizes[:1]))  # fmt: skip
        time.sleep(0.2)
        running.release.set()
        for size in sizes[1:]:
            peer.sendall(POST % (b"/echo", size) + b"\r\n\r\n" * (size // 4) + b"x" * (size % 4))
        replies = read_until(peer, b"1000000 bytes\n")
    assert b"at last" in replies
    assert [int(line.partition(b" ")[0]) for line in replies.splitlines() if line.endswith(b" bytes")] == sizes


def test_a_body_with_a_request_behind_it_is_read_whole(running: Running):
    """The request behind it may not stop the reading that the one in front needs."""
    with running.connect() as peer:
        body = b"x" * 500_000
        peer.sendall(POST % (b"/echo", len(body)) + body[:1000])
        time.sleep(0.1)
        peer.sendall(body[1000:] + SLOW + POST % (b"/echo", 200_000) + body[:200_000] + GET)
        assert b"500000 bytes" in read_reply(peer)
        running.release.set()
        replies = read_until(peer, b"fine")
        assert replies.index(b"at last") < replies.index(b"200000 bytes") < replies.index(b"fine")


def test_who_leaves_is_noticed_with_a_request_waiting(running: Running):
    """What works for it is told, although it was not the last request that came."""
    peer = running.connect()
    peer.sendall(WATCHED + GET * 3)
    until(lambda: running.begun == ["watched"])
    time.sleep(0.2)
    peer.close()
    until(lambda: running.done == ["left"], 3)
    until(lambda: running.open == 0)


def test_a_request_that_begins_early_is_not_cut_off_as_idle(tmp_path: Path):
    running = Running(tmp_path, tls=False, idle_seconds=0.5, header_seconds=5.0)
    try:
        with running.connect() as peer:
            peer.sendall(SLOW + SLOW[:20])
            time.sleep(0.2)
            running.release.set()
            assert b"at last" in read_reply(peer)
            running.release.clear()
            time.sleep(0.2)
            peer.sendall(SLOW[20:])
            time.sleep(1.5)
            running.release.set()
            assert b"at last" in read_reply(peer)
    finally:
        running.stop()


def test_headers_behind_a_request_are_bounded_and_spare_its_answer(running: Running):
    for rest, status in ((b"GET / HTTP/1.1\r\n", b"408"), (b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000, b"431")):
        running.release.clear()
        with running.connect() as peer:
            peer.sendall(SLOW + rest)
            time.sleep(1.5)
            running.release.set()
            replies = read_all(peer)
        assert replies.startswith(b"HTTP/1.1 200 ")
        assert replies.count(b"HTTP/1.1 ") == 2
        assert b"at last" + b"HTTP/1.1 " + status in replies


def test_line_ends_cost_no_call_for_each(running: Running, monkeypatch: pytest.MonkeyPatch):
    calls, parse = [], HttpToolsProtocol.data_received
    monkeypatch.setattr(HttpToolsProtocol, "data_received", lambda self, data: (calls.append(0), parse(self, data)))
    with running.connect() as peer:
        peer.sendall(POST % (b"/echo", 400_000) + b"\r\n\r\n" * 100_000)
        assert b"400000 bytes" in read_reply(peer)
        assert len(calls) < 1000
        peer.sendall(b"\r\n" * 90_000 + GET)
        assert b"fine" in read_reply(peer)
        assert len(calls) < 12_000


# -- sending what is no HTTP


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("request_", [SLOW, WATCHED, SLOW + GET], ids=["slow", "watched", "two"])
def test_garbage_behind_a_request_spares_its_answer(running: Running, request_: bytes, apart: bool):
    with running.connect() as peer:
        peer.sendall(request_ + (b"" if apart else b"no HTTP at all\r\n\r\n" * 3))
        time.sleep(0.2)
        if apart:
            peer.sendall(b"no HTTP at all\r\n\r\n" * 3)
        time.sleep(0.2)
        running.release.set()
        replies = read_all(peer)
    assert replies.startswith(b"HTTP/1.1 200 ")
    assert b"at last" in replies
    assert replies.count(b" 200 OK") == request_.count(b"GET")
    assert replies.count(b"HTTP/1.1 400 ") == 1
    assert error_in(replies) == "Invalid HTTP request received."
    until(lambda: running.open == 0)


def test_garbage_behind_an_answered_request_is_a_400(running: Running):
    with running.connect() as peer:
        peer.sendall(GET)
        assert b"fine" in read_reply(peer)
        peer.sendall(b"no HTTP at all\r\n\r\n")
        assert read_all(peer).startswith(b"HTTP/1.1 400 ")


def test_a_malformed_body_is_a_400(running: Running):
    chunked = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with running.connect() as peer:
        peer.sendall(chunked + b"5\r\nhello\r\nno size\r\n")
        replies = read_all(peer)
    assert replies.startswith(b"HTTP/1.1 400 ")
    with running.connect() as peer:  # and where it waits for its turn
        peer.sendall(SLOW + chunked + b"5\r\nhello\r\nno size\r\n")
        time.sleep(0.2)
        running.release.set()
        replies = read_all(peer)
    assert replies.startswith(b"HTTP/1.1 200 ")
    assert b"at last" + b"HTTP/1.1 400 " in replies
    assert replies.count(b"HTTP/1.1 ") == 2


@pytest.mark.parametrize("start, status", [
    (b"no HTTP at all\r\n\r\n", b"400"), (b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000, b"431"),
    (POST % (b"/refused", 8 << 20), b"401"), (SLOW + b"no HTTP at all\r\n\r\n", b"200"),
], ids=["garbage", "headers", "body", "behind"])  # fmt: skip
def test_an_error_arrives_whole_although_the_client_still_sends(running: Running, start: bytes, status: bytes):
    """Closing with unread bytes in the socket would reset it, and the client would see no reply."""
    running.release.set()
    with running.connect() as peer:
        with contextlib.suppress(OSError):
            peer.sendall(start)
            for _ in range(8):
                peer.sendall(b"x" * (1 << 20))
        reply = read_all(peer)
    assert reply.startswith(b"HTTP/1.1 " + status)
    assert b"connection: close" in reply
    assert reply.endswith((b"}}", b"no key"))


def test_an_upgrade_that_nobody_knows_ends_with_its_answer(running: Running):
    """The parser is deaf from there on: a client that is not told would wait for its next answer."""
    with running.connect() as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n")
        reply = read_all(peer)
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in reply
