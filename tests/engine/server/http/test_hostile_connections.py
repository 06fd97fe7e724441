"""Two thousand connections without a key hold nothing for long, and a client with a key is served beside them."""

import asyncio
import contextlib
import json
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from certificates import self_signed
from key_file import KEY, entry, write

HERE = Path(__file__).parent
SHORT = {"header_seconds": 2.0, "handshake_seconds": 2.0, "idle_seconds": 2.0, "linger_seconds": 1.0,
         "send_seconds": 3.0, "max_connections": 1500, "max_connections_per_address": 300}  # fmt: skip
GONE_SECONDS = 15.0     # by then a connection must be closed, whatever it does
SERVED_SECONDS = 10.0   # for a short answer, on a busy machine
HEADERS = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
POST = HEADERS + b"Content-Length: 1000000\r\n\r\n"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}


@dataclass
class Gateway:
    process: subprocess.Popen
    port: int
    context: ssl.SSLContext | None

    @property
    def url(self) -> str:
        return f"http{'s' if self.context else ''}://localhost:{self.port}"

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def resident(self) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the gateway is gone")


@contextlib.contextmanager
def gateway(tmp_path: Path, engine: tuple[Path, Path], *, tls: bool = False, **limits: float) -> Iterator[Gateway]:
    write(tmp_path / "keys.json", entry(KEY))
    pair = self_signed(tmp_path) if tls else None
    options = {"limits": SHORT | limits, "model": str(engine[1]), "engine": str(engine[0]),
               "keys": str(tmp_path / "keys.json"), "tls": [str(p) for p in pair] if pair else None}  # fmt: skip
    with subprocess.Popen([sys.executable, HERE / "bounded_gateway.py", json.dumps(options)], stdout=subprocess.PIPE,
                          text=True) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            context = ssl.create_default_context(cafile=str(pair[0])) if pair else None
            running = Gateway(process, int(process.stdout.readline()), context)
            with httpx.Client(verify=context or True) as http:
                deadline = time.monotonic() + 60
                while not healthy(http, running.url):
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            yield running
        finally:
            process.terminate()
            process.wait(20)


def healthy(http: httpx.Client, url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return http.get(f"{url}/health").status_code == 200
    return False


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- what they do: each is given a fresh connection, and tries to keep it until the server ends it --------------------

Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def drip(wire: Wire, data: bytes) -> None:
    while True:
        wire[1].write(data)
        await wire[1].drain()
        await asyncio.sleep(0.3)


async def says_nothing(wire: Wire) -> None:
    await wire[0].read()


async def drips_headers(wire: Wire) -> None:
    wire[1].write(b"GET / HTTP/1.1\r\n")
    await drip(wire, b"A: b\r\n")


async def trickles_a_body_that_nobody_reads(wire: Wire) -> None:
    wire[1].write(POST)
    assert b" 401 " in await wire[0].readline()
    await drip(wire, b"x")


async def idles_with_line_feeds(wire: Wire) -> None:
    wire[1].write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 " in await wire[0].readline()
    await drip(wire, b"\r\n")


async def never_reads(wire: Wire) -> None:
    """Asks for more than the connection can hold."""
    wire[1].transport.pause_reading()  # type: ignore[attr-defined]
    request = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n"
    while True:
        wire[1].write(request)
        await wire[1].drain()
        await asyncio.sleep(0.002)


async def half_a_handshake(wire: Wire) -> None:
    wire[1].write(b"\x16\x03\x01\x02\x00\x01\x00")
    await wire[0].read()


async def attack(port: int, how: Callable[[Wire], Awaitable[None]], address: str,
                 context: ssl.SSLContext | None = None) -> float:
    """Seconds until the server ended the connection. Raises TimeoutError if it does not."""
    began = time.monotonic()
    async with asyncio.timeout(GONE_SECONDS + 10):  # the rest is the client's own slowness
        with contextlib.suppress(ConnectionError, ssl.SSLError, AssertionError):
            wire = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=(address, 0), limit=4096, ssl=context,
                server_hostname="localhost" if context else None,
            )
            began = time.monotonic()
            try:
                await how(wire)
            finally:
                wire[1].transport.abort()
    return time.monotonic() - began


@contextlib.asynccontextmanager
async def honest_client(server: Gateway) -> AsyncIterator[list[float]]:
    """Asks one short question after another, on fresh and on kept connections; gives the seconds that each took."""
    seconds: list[float] = []

    async def ask() -> None:
        async with httpx.AsyncClient(verify=server.context or True, headers={"Authorization": f"Bearer {KEY}"},
                                     timeout=SERVED_SECONDS) as http:  # fmt: skip
            for turn in range(1000):
                began = time.monotonic()
                headers = {"Connection": "close"} if turn % 2 else {}
                reply = await http.post(f"{server.url}/v1/chat/completions", json=CHAT, headers=headers)
                assert reply.status_code == 200, reply.text
                seconds.append(time.monotonic() - began)
                await asyncio.sleep(0.05)

    task = asyncio.create_task(ask())
    try:
        yield seconds
    finally:
        await asyncio.sleep(0.3)
        ended = task.done()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert not ended


async def after(server: Gateway, condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.1)


async def test_two_thousand_hostile_connections_beside_a_client(tmp_path: Path, tiny_engine: tuple[Path, Path]):
    kinds = [says_nothing, drips_headers, trickles_a_body_that_nobody_reads, idles_with_line_feeds]
    with many_descriptors(), gateway(tmp_path, tiny_engine) as server:
        before, memory = server.descriptors(), server.resident()
        async with honest_client(server) as answers:
            await after(server, lambda: bool(answers), 60)
            first, lived = len(answers), []
            while len(answers) < first + 5 and len(lived) < 3 * 2000:  # on a busy machine one wave can be too short
                lived += await asyncio.gather(*(
                    attack(server.port, kinds[i % len(kinds)], f"127.0.0.{2 + i // 200}") for i in range(2000)
                ))
            during = len(answers) - first
        assert max(lived) < GONE_SECONDS
        assert during >= 5, "the client was served all the while"
        await after(server, lambda: server.descriptors() <= before + 4)
        assert server.resident() - memory < 100 << 20


async def test_over_tls_too(tmp_path: Path, tiny_engine: tuple[Path, Path]):
    kinds = [half_a_handshake, says_nothing, trickles_a_body_that_nobody_reads, drips_headers]
    with many_descriptors(), gateway(tmp_path, tiny_engine, tls=True) as server:
        before = server.descriptors()
        async with honest_client(server) as answers:
            await after(server, lambda: bool(answers), 60)
            first, lived = len(answers), []
            while len(answers) < first + 5 and len(lived) < 3 * 200:
                lived += await asyncio.gather(*(
                    attack(server.port, how, "127.0.0.2", None if how is half_a_handshake else server.context)
                    for how in kinds * 50
                ))
            during = len(answers) - first
        assert max(lived) < GONE_SECONDS
        assert during >= 5
        await after(server, lambda: server.descriptors() <= before + 4)


async def test_who_never_reads_is_not_waited_for(tmp_path: Path, tiny_engine: tuple[Path, Path]):
    with gateway(tmp_path, tiny_engine) as server:
        before = server.descriptors()
        async with honest_client(server) as answers:
            assert max(await asyncio.gather(*(attack(server.port, never_reads, "127.0.0.2") for _ in range(5)))) < 25
            assert answers
        await after(server, lambda: server.descriptors() <= before + 4)


async def test_a_refusal_closes_the_connection_and_arrives_whole(tmp_path: Path, tiny_engine: tuple[Path, Path]):
    """Also for a client that sends its whole body before it reads."""
    with gateway(tmp_path, tiny_engine) as server:
        for size in (10, 1_000_000):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as peer:
                peer.sendall(HEADERS + b"Content-Length: %d\r\n\r\n" % (size + 1))
                time.sleep(0.2)
                peer.sendall(b"x" * size)  # one byte never comes
                reply = b""
                while piece := peer.recv(65536):
                    reply += piece
            head, _, body = reply.partition(b"\r\n\r\n")
            assert b" 401 " in head
            assert b"connection: close" in head.lower()
            assert json.loads(body)["error"]["code"] == "invalid_api_key"


async def test_a_full_server_reads_no_body(tmp_path: Path, tiny_engine: tuple[Path, Path]):
    headers = HEADERS + b"Authorization: Bearer " + KEY.encode() + b"\r\nContent-Length: 1000\r\n\r\n"
    with gateway(tmp_path, tiny_engine, max_in_flight=1) as server:
        wires = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        for _, writer in wires:
            writer.write(headers)
            await asyncio.sleep(0.5)
        assert b" 503 " in await asyncio.wait_for(wires[1][0].readline(), 30)
        for _, writer in wires:
            writer.close()


async def test_when_all_are_at_work_one_is_told_so(tmp_path: Path, tiny_engine: tuple[Path, Path]):
    body = json.dumps(CHAT | {"max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    key = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
    request = HEADERS + key + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with gateway(tmp_path, tiny_engine, max_connections=3) as server:
        busy = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        for reader, writer in busy:
            writer.write(request)
            assert b" 200 " in await reader.readline()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        told = await reader.read()
        assert b" 503 " in told.splitlines()[0]
        assert b"retry-after: 5" in told.lower()
        assert b'"too_many_connections"' in told
        writer.close()
        for other in busy:
            other[1].close()


async def test_an_address_at_its_share_is_told_so_and_displaces_nobody_else(
    tmp_path: Path, tiny_engine: tuple[Path, Path]
):
    body = json.dumps(CHAT | {"max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    key = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
    request = HEADERS + key + b"Content-Length: %d\r\n\r\n" % len(body) + body
    bounds = {"max_connections": 3, "max_connections_per_address": 2, "header_seconds": 60.0}
    with gateway(tmp_path, tiny_engine, **bounds) as server:
        wires = [await asyncio.open_connection("127.0.0.1", server.port, local_addr=("127.0.0.2", 0)) for _ in range(2)]
        for reader, writer in wires:
            writer.write(request)
            assert b" 200 " in await reader.readline()
        waiting = await asyncio.open_connection("127.0.0.1", server.port)  # the last place, of another address
        await asyncio.sleep(0.2)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, local_addr=("127.0.0.2", 0))
        told = await reader.read()
        assert b" 429 " in told.splitlines()[0]
        assert b"retry-after: 5" in told.lower()
        assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["type"] == "rate_limit_error"
        waiting[1].write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await waiting[0].readline()
        for other in (*wires, waiting, (reader, writer)):
            other[1].close()


async def test_who_waits_longest_makes_room(tmp_path: Path, tiny_engine: tuple[Path, Path]):
    with gateway(tmp_path, tiny_engine, max_connections=3, idle_seconds=60.0, header_seconds=60.0) as server:
        waiting = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        await asyncio.sleep(0.3)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await reader.readline()
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(waiting[0][0].read(), 30) == b""
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waiting[2][0].read(), 0.3)
        for other in (*waiting, (reader, writer)):
            other[1].close()
