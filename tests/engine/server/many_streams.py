"""A thousand streams at once, to a real gateway in front of a real engine with a tiny model: `make test-streams`.

    python tests/engine/server/many_streams.py [--streams 1000] [--tokens 24] [--rounds 4]

Each prompt is another one, and is first asked alone. In each round all are asked at once: every answer must be there,
be the one that its prompt gets alone, and bear one id from its first event to its last. Afterwards nothing is left in
the engine, and the memory of both processes stays as it is after the second round. Prints a JSON row a round; the exit
status is 1 if anything is otherwise.
"""

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from edge_load import prompt_of, request  # noqa: E402 - behind the path

PATIENCE = 600.0  # seconds for one round
SLACK_MIB = 24


class Service:
    """`atoll gateway` and `atoll engine`, two processes, as units run them."""

    def __init__(self, directory: Path, seats: int) -> None:
        from ports import listening_port
        from tiny_llama import TINY_LLAMAS, save_tiny_llama

        model, uds = directory / "model", directory / "engine/tiny/engine.sock"
        model.mkdir()
        uds.parent.mkdir(parents=True)
        save_tiny_llama(model, **TINY_LLAMAS["gqa"])
        config = directory / "atoll.toml"
        config.write_text(f'[gateway]\nport = 0\n[gateway.limits]\nmax-in-flight = {2 * seats}\n'
                          f'max-connections-per-address = {2 * seats}\n[models.tiny]\nmodel = "{model}"\n')
        self._log = directory / "log"
        with self._log.open("wb") as log:
            self.engine = subprocess.Popen(
                [sys.executable, "-m", "engine.server.process.engine_process", f"--uds={uds}", f"--model={model}",
                 "--max-num-seqs", str(seats), "--kv-cache-memory-bytes", "24000000"], stdout=log, stderr=log)
            self.gateway = subprocess.Popen(
                [sys.executable, "-m", "appliance.cli", "gateway", "--config", str(config), "--engines",
                 str(directory / "engine"), "--disable-access-log"], stdout=log, stderr=log)
        self.port = listening_port(self.gateway)

    async def wait_ready(self) -> None:
        deadline = time.monotonic() + 120
        while (await self.get("/health"))[:12] != b"HTTP/1.1 200":
            assert time.monotonic() < deadline, self._log.read_text()[-3000:]
            await asyncio.sleep(0.1)

    async def get(self, path: str) -> bytes:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return b""
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        found = await reader.read()
        writer.close()
        return found

    async def left(self) -> dict[str, float]:
        """What runs, waits, or holds pages."""
        found = {}
        for line in (await self.get("/metrics")).decode().splitlines():
            if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{", "atoll:kv_pages_in_use")):
                name, _, value = line.partition("{")[0], *line.rpartition(" ")[1:]
                found[name] = float(value)
        return found

    @property
    def memory(self) -> dict[str, int]:
        """MiB of each process."""
        return {name: psutil.Process(process.pid).memory_info().rss >> 20
                for name, process in (("gateway_mib", self.gateway), ("engine_mib", self.engine))}

    def stop(self) -> None:
        for process in (self.gateway, self.engine):
            process.terminate()
            process.wait(30)


async def stream(port: int, number: int, tokens: int) -> tuple[str, int]:
    """The text of one streamed answer, and how many ids its events bear. Raises if it is not whole."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        writer.write(request("/v1/completions", {
            "model": "tiny", "prompt": prompt_of(number), "max_tokens": tokens, "stream": True, "ignore_eos": True,
            "temperature": 0, "return_token_ids": True}))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        body = bytearray()
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
    finally:
        writer.close()
    events = [event.removeprefix(b"data: ") for event in bytes(body).split(b"\n\n") if event.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    chunks = [json.loads(event) for event in events]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or []]
    assert len(ids) == tokens, f"{len(ids)} of {tokens} tokens"
    return json.dumps(ids), len({chunk["id"] for chunk in chunks})


async def one_round(service: Service, alone: list[str], tokens: int) -> dict[str, Any]:
    began = time.monotonic()
    async with asyncio.timeout(PATIENCE):
        got = await asyncio.gather(*(stream(service.port, number, tokens) for number in range(len(alone))),
                                   return_exceptions=True)
        took = time.monotonic() - began
        while any((left := await service.left()).values()):
            await asyncio.sleep(0.1)
    lost = [answer for answer in got if isinstance(answer, BaseException)]
    whole = [(answer, expected) for answer, expected in zip(got, alone, strict=True) if isinstance(answer, tuple)]
    row = {"streams": len(alone), "lost": len(lost), "mixed_up": sum(a[0] != b for a, b in whole),
           "with_more_than_one_id": sum(answer[1] != 1 for answer, _ in whole), "left": left,
           "seconds": round(took, 1), "tokens_per_second": round(len(alone) * tokens / took), **service.memory}
    if lost:
        row["first_loss"] = repr(lost[0])[:300]
    return row


async def measure(service: Service, streams: int, tokens: int, rounds: int) -> bool:
    await service.wait_ready()
    alone = [(await stream(service.port, number, tokens))[0] for number in range(streams)]
    assert len(set(alone)) > streams * 0.9, "prompts whose answers are alike show no mixing"
    rows = []
    for _ in range(rounds):
        rows.append(await one_round(service, alone, tokens))
        print(json.dumps(rows[-1]), flush=True)
    growth = {name: rows[-1][name] - rows[1][name] for name in ("gateway_mib", "engine_mib")}
    print(json.dumps({"growth_since_the_second_round": growth}))
    return not any(row["lost"] or row["mixed_up"] or row["with_more_than_one_id"] for row in rows) and all(
        mib <= SLACK_MIB for mib in growth.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 16_384), most))  # a socket a stream, here and in the gateway
    with tempfile.TemporaryDirectory(prefix="atoll-streams-") as directory:
        service = Service(Path(directory), options.streams)
        try:
            return 0 if asyncio.run(measure(service, options.streams, options.tokens, max(2, options.rounds))) else 1
        finally:
            service.stop()


if __name__ == "__main__":
    sys.exit(main())
