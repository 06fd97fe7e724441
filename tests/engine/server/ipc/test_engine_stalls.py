"""A peer that stalls between gateway and engine: an engine that hangs or does not read, a client that reads slowly."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from process_kit import connected, greedy, until

from engine.core.request import EngineRequest, EngineStats, FinishReason, StepOutput, TokenLogprobs
from engine.errors import AtollError, EngineDeadError
from engine.server.http.errors import ApiError
from engine.server.http.limits import Limits
from engine.server.ipc import client as module
from engine.server.ipc import messages as m
from engine.server.ipc.framing import FrameReader, frame
from engine.server.openai.serving import ServedModel

INFO = m.EngineInfo(["tiny"], max_model_len=100_000, vocab_size=100, eos_token_ids=[2], dtype="float32", device="cpu",
                    num_pages=9, page_size=16, max_num_seqs=8)  # fmt: skip
SECONDS = 10


class Peer:
    """Speaks the engine's protocol, and does only what a test tells it to."""

    def __init__(self) -> None:
        self.heard: list[m.AnyCommand] = []
        self.reads = True
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer, frames = writer, FrameReader(m.MAX_COMMAND_BYTES)
        self.say(m.Welcome(m.PROTOCOL, "0", 1), m.Ready(INFO, EngineStats()))
        with contextlib.suppress(OSError):
            while self.reads and (data := await reader.read(1 << 16)):
                self.heard += [m.decode_command(payload) for payload in frames.feed(data)]
        if not self.reads:
            writer.transport.pause_reading()  # type: ignore[attr-defined]

    def say(self, *events: m.Event) -> None:
        assert self._writer is not None
        for event in events:
            self._writer.write(frame(m.encode(event)))

    def ids(self) -> list[str]:
        return [command.request.request_id for command in self.heard if isinstance(command, m.Submit)]

    def aborted(self) -> list[str]:
        return [key for command in self.heard if isinstance(command, m.Abort) for key in command.request_ids]


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[Peer]:
    peer = Peer()
    server = await asyncio.start_unix_server(peer.serve, tmp_path / "engine.sock")
    yield peer
    server.close()


def request(name: str, tokens: int = 1) -> EngineRequest:
    return EngineRequest(name, [1] * tokens, greedy(1000))


async def test_an_engine_that_hangs_is_given_up(peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In the system form its watchdog ends it, but who waits here must not depend on that."""
    monkeypatch.setattr(module, "PING_SECONDS", 0.05)
    monkeypatch.setattr(module, "DROP_SECONDS", 0.5, raising=False)
    async with connected(tmp_path / "engine.sock", stall_seconds=0.2) as client, asyncio.timeout(SECONDS):
        await client.wait_ready()
        work = asyncio.ensure_future(anext(client.generate(request("a"))))
        await until(client.stalled)
        model = ServedModel("tiny", client, None)  # type: ignore[arg-type]
        with pytest.raises(ApiError) as refused:  # nobody else is let in to wait
            model.ready(Limits())
        assert (refused.value.status, refused.value.headers["Retry-After"]) == (503, "5")
        with pytest.raises(EngineDeadError, match="has not answered"):
            await work
        await until(lambda: client.state == "ready")  # it is asked anew


async def test_an_engine_that_does_not_read_gets_no_requests_without_end(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "MAX_UNSENT_BYTES", 1 << 20, raising=False)
    peer.reads = False
    async with connected(tmp_path / "engine.sock") as client, asyncio.timeout(SECONDS):
        await client.wait_ready()
        work = [asyncio.ensure_future(anext(client.generate(request(str(i), 100_000)))) for i in range(200)]
        done, waiting = await asyncio.wait(work, timeout=2)
        assert len(waiting) < 50
        for task in done:
            with pytest.raises(EngineDeadError, match="does not take requests"):
                task.result()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_client_that_reads_too_slowly_is_cut_and_no_other(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "MAX_BACKLOG_BYTES", 2 << 20, raising=False)
    position = TokenLogprobs(7, -1.0, 1, [(i, -1.0) for i in range(20)])

    def say(name: str, count: int, end: FinishReason | None = None) -> None:
        for _ in range(count):
            peer.say(m.Outputs([StepOutput(name, [7], [position])], EngineStats(num_running=2)))
        if end is not None:
            peer.say(m.Outputs([StepOutput(name, finish_reason=end)], EngineStats(num_running=2)))

    async with connected(tmp_path / "engine.sock") as client, asyncio.timeout(SECONDS):
        await client.wait_ready()
        slow, other = (aiter(client.generate(request(name))) for name in ("slow", "other"))
        first = [asyncio.ensure_future(anext(stream)) for stream in (slow, other)]
        await until(lambda: peer.ids() == ["slow", "other"])
        say("slow", 1)
        say("other", 1)
        await asyncio.gather(*first)
        say("other", 100)
        say("slow", 3000)
        await until(lambda: "slow" in peer.aborted())
        assert peer.aborted() == ["slow"]
        with pytest.raises(AtollError, match="too slowly"):
            await anext(slow)
        say("other", 100, FinishReason.LENGTH)
        assert len([output async for output in other]) == 201
        assert client._backlog.bytes == 0


@pytest.mark.parametrize("leave", [False, True], ids=["finished", "left"])
async def test_what_is_taken_or_left_counts_no_more(peer: Peer, tmp_path: Path, leave: bool):
    async with connected(tmp_path / "engine.sock") as client, asyncio.timeout(SECONDS):
        await client.wait_ready()
        stream = aiter(client.generate(request("a")))
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: peer.ids() == ["a"])
        peer.say(*[m.Outputs([StepOutput("a", [7])], EngineStats(num_running=1))] * 100)
        await first
        await until(lambda: client._backlog.bytes > 90 * 500)
        if leave:
            await stream.aclose()  # type: ignore[attr-defined]
        else:
            peer.say(m.Outputs([StepOutput("a", finish_reason=FinishReason.STOP)], EngineStats()))
            assert len([output async for output in stream]) == 100
        assert client._backlog.bytes == 0
