"""A real engine process with a tiny model, and its clients' requests: streamed, aborted, lost, refused."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from process_kit import READY_SECONDS, Engine, connected, greedy, tokens_of, until

from engine.core.request import EngineRequest, FinishReason
from engine.errors import EngineDeadError, InvalidRequestError


@pytest.fixture(scope="module")
def engine(tiny_llama_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    flags = ("--kv-cache-memory-bytes=4M", "--max-num-seqs=8", "--served-model-name", "tiny")
    engine = Engine(tiny_llama_dir(), tmp_path_factory.mktemp("engine") / "s", *flags)
    yield engine
    assert engine.stop() == 0, engine.log.read_text()


async def test_ready_means_that_tokens_came(engine: Engine) -> None:
    async with connected(engine.uds) as client:
        assert client.state == "connecting"
        assert not client.healthy()
        info = await client.wait_ready(READY_SECONDS)
        assert client.healthy()
        assert info.model_names == ["tiny"]
        assert info.max_model_len == 512
        assert info.pid == engine.process.pid
        assert client.stats.generation_tokens >= 1  # the warm-up


async def test_generate_streams_and_many_requests_share_the_engine(engine: Engine) -> None:
    async with connected(engine.uds) as client:
        await client.wait_ready(READY_SECONDS)
        alone, last = await tokens_of(client, EngineRequest("alone", [5, 6, 7], greedy(20)))
        assert len(alone) == 20
        assert last.finish_reason is FinishReason.LENGTH
        assert last.times is not None
        assert last.times.finished >= last.times.first_token >= last.times.scheduled >= last.times.arrival > 0
        requests = [EngineRequest(f"r{i}", [5, 6, 7], greedy(20)) for i in range(30)]  # more than run at a time
        together = await asyncio.gather(*(tokens_of(client, request) for request in requests))
        assert all(tokens == alone for tokens, _ in together)
        await until(lambda: client.stats.num_running == 0 and client.stats.pages_in_use == 0)


async def test_closing_the_iterator_aborts_in_the_engine(engine: Engine) -> None:
    async with connected(engine.uds) as client:
        await client.wait_ready(READY_SECONDS)
        outputs = client.generate(EngineRequest("long", [1, 2, 3], greedy(500)))
        assert (await anext(outputs)).new_token_ids
        assert client.stats.pages_in_use > 0
        await outputs.aclose()
        await until(lambda: client.stats.num_running == 0 and client.stats.pages_in_use == 0, 2)
        assert (await tokens_of(client, EngineRequest("long", [1, 2], greedy(2))))[1].finish_reason  # the id is free


async def test_a_lost_client_loses_only_its_own_requests(engine: Engine) -> None:
    async with connected(engine.uds) as stays, connected(engine.uds) as leaves:
        await stays.wait_ready(READY_SECONDS)
        await leaves.wait_ready(READY_SECONDS)
        mine = asyncio.create_task(tokens_of(stays, EngineRequest("same-id", [1, 2, 3], greedy(300))))
        theirs = leaves.generate(EngineRequest("same-id", [3, 2, 1], greedy(500)))
        await anext(theirs)
        assert leaves._writer is not None
        leaves._writer.transport.abort()  # as if the gateway had been killed
        with pytest.raises(EngineDeadError):
            async for _ in theirs:
                pass
        tokens, last = await mine
        assert (len(tokens), last.finish_reason) == (300, FinishReason.LENGTH)
        await until(lambda: stays.stats.num_running == 0 and stays.stats.pages_in_use == 0)
        await leaves.wait_ready(10)  # it came back by itself


@pytest.mark.parametrize("prompt, word", [
    ([], "empty"), ([320], "vocabulary"), ([-1], "0 and 319"), (list(range(300)) * 2, "maximum context length"),
])
async def test_requests_that_can_never_run_are_rejected_with_a_reason(
    engine: Engine, prompt: list[int], word: str
) -> None:
    async with connected(engine.uds) as client:
        await client.wait_ready(READY_SECONDS)
        with pytest.raises(InvalidRequestError, match=word):
            await tokens_of(client, EngineRequest("bad", prompt, greedy(2)))
        assert len((await tokens_of(client, EngineRequest("good", [1], greedy(2))))[0]) == 2


async def test_an_id_in_flight_cannot_be_used_twice(engine: Engine) -> None:
    async with connected(engine.uds) as client:
        await client.wait_ready(READY_SECONDS)
        first = client.generate(EngineRequest("twice", [1, 2], greedy(400)))
        await anext(first)
        with pytest.raises(InvalidRequestError, match="in flight"):
            await tokens_of(client, EngineRequest("twice", [1, 2], greedy(2)))
        assert (await anext(first)).new_token_ids
        await first.aclose()


async def test_bad_frames_do_not_disturb_running_requests(engine: Engine) -> None:
    async with connected(engine.uds) as client:
        await client.wait_ready(READY_SECONDS)
        task = asyncio.create_task(tokens_of(client, EngineRequest("victim", [9, 9, 9], greedy(200))))
        for data in (b"\xff" * 64, b"GET / HTTP/1.0\r\n\r\n", b"\x00\x00\x00\x05ab"):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(str(engine.uds))
                raw.sendall(data)
            await asyncio.sleep(0.01)
        assert len((await task)[0]) == 200


async def test_an_idle_engine_uses_no_cpu(engine: Engine) -> None:
    async with connected(engine.uds) as client:
        await client.wait_ready(READY_SECONDS)
        process = psutil.Process(engine.process.pid)
        await asyncio.sleep(0.3)
        before = sum(process.cpu_times()[:2])
        await asyncio.sleep(1.5)
        assert sum(process.cpu_times()[:2]) - before <= 0.05
