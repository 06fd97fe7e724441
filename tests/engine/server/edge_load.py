"""What the HTTP edge costs: a real gateway process, a canned engine behind it, many clients in front of it.

    python tests/engine/server/edge_load.py [--streams 256] [--tokens 200] [--requests 4000] [--rounds 5]

CPU seconds of the gateway process count, so that a busy machine blurs the figures less. Prints one JSON row a round,
and last the medians.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

LETTERS = "bcdfgjklmopquvwxy"  # the tokenizer merges none of them with another


class Edge:
    """`atoll gateway` on a free port, with one canned engine."""

    def __init__(self, directory: Path, *, step_seconds: float = 0.0, flags: tuple[str, ...] = ()) -> None:
        from ports import listening_port
        from tiny_llama import save_byte_tokenizer

        model = directory / "model"
        model.mkdir()
        save_byte_tokenizer(model)
        (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        uds = directory / "engine/canned/engine.sock"
        uds.parent.mkdir(parents=True)
        config = directory / "atoll.toml"
        config.write_text(f'[gateway]\nport = 0\n[models.canned]\nmodel = "{model}"\n')
        self._log = directory / "log"
        with self._log.open("wb") as log:
            self.engine = subprocess.Popen(
                [sys.executable, str(HERE / "canned_engine.py"), f"--uds={uds}", f"--step-seconds={step_seconds}"],
                stdout=log, stderr=log)
            self.gateway = subprocess.Popen(
                [sys.executable, "-m", "appliance.cli", "gateway", "--config", str(config), "--engines",
                 str(directory / "engine"), "--log-format", "json", "--disable-access-log", *flags],
                stdout=log, stderr=log)
        self.process = psutil.Process(self.gateway.pid)
        self.port = listening_port(self.gateway)
        self._wait_ready()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            assert self.gateway.poll() is None, self._log.read_text()
            time.sleep(0.05)
        raise AssertionError(self._log.read_text())

    @property
    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def stop(self) -> None:
        for process in (self.gateway, self.engine):
            process.terminate()
            process.wait(20)


@contextlib.contextmanager
def edge(**options) -> Iterator[Edge]:
    with tempfile.TemporaryDirectory(prefix="atoll-edge-") as directory:
        found = Edge(Path(directory), **options)
        try:
            yield found
        finally:
            found.stop()


def request(path: str, body: dict) -> bytes:
    data = json.dumps(body).encode()
    head = (f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n")
    return head.encode() + data


def prompt_of(number: int) -> str:
    """A prompt of five single-letter tokens, another one for each of the first eighty thousand numbers."""
    return "".join(LETTERS[(number // len(LETTERS) ** digit) % len(LETTERS)] for digit in range(4)) + "z"


async def read_body(reader: asyncio.StreamReader) -> bytes:
    """The body of one response, chunked or of a given length."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return await reader.readexactly(int(line.partition(b":")[2]))
    body = bytearray()
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return bytes(body)


async def stream(port: int, number: int, tokens: int) -> str:
    """The text of one streamed completion."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        writer.write(request("/v1/completions", {
            "model": "canned", "prompt": prompt_of(number), "max_tokens": tokens, "stream": True, "ignore_eos": True}))
        body = await read_body(reader)
    finally:
        writer.close()
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices)


async def answers(port: int, connections: int, count: int) -> None:
    """`count` short answers over kept-alive connections."""
    body = {"model": "canned", "prompt": "abc", "max_tokens": 1, "ignore_eos": True}
    message = request("/v1/completions", body)

    async def client(times: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(times):
            writer.write(message)
            await read_body(reader)
        writer.close()

    await asyncio.gather(*(client(count // connections) for _ in range(connections)))


async def measure(found: Edge, streams: int, tokens: int, requests: int) -> dict:
    before, began = found.cpu_seconds, time.monotonic()
    await answers(found.port, 32, requests)
    middle, then = found.cpu_seconds, time.monotonic()
    await asyncio.gather(*(stream(found.port, number, tokens) for number in range(streams)))
    after, end = found.cpu_seconds, time.monotonic()
    done = requests // 32 * 32
    return {
        "requests_per_second": round(done / (then - began), 1),
        "cpu_us_per_request": round((middle - before) / done * 1e6, 1),
        "tokens_per_second": round(streams * tokens / (end - then), 1),
        "cpu_us_per_token": round((after - middle) / (streams * tokens) * 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with edge() as found:
        asyncio.run(measure(found, 16, 16, 320))  # warm-up
        rows = []
        for _ in range(options.rounds):
            rows.append(asyncio.run(measure(found, options.streams, options.tokens, options.requests)))
            print(json.dumps(rows[-1]), flush=True)
        print(json.dumps({name: statistics.median(row[name] for row in rows) for name in rows[0]}
                         | {"resident_mib": found.process.memory_info().rss >> 20}))


if __name__ == "__main__":
    main()
