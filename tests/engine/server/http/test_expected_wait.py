"""The queue is bounded by the time that a request would wait in it, measured; and refusals say when to come back."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from gateways import RunningServer, engine_process, keys_of

from engine.core.request import EngineStats
from engine.server.http.expected_wait import ExpectedWait
from engine.server.http.limits import Limits
from engine.server.ipc.client import EngineClient
from engine.server.openai.serving import ServedModel

MOST_WAIT = 10.5  # one turn of another key takes less on any machine


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_the_wait_is_the_tokens_ahead_by_the_measured_speed() -> None:
    clock = Clock()
    wait, stats = ExpectedWait(clock), EngineStats()
    wait.sample(stats, {"a": 1000})
    assert wait.seconds("a") == 0, "nothing is known yet"
    for _ in range(5):  # idle, however slow
        clock.now += 1
        stats.generation_tokens += 1
        wait.sample(stats, {})
    assert wait.seconds("a") == 0
    stats.num_waiting = 7
    wait.sample(stats, {"a": 6000})
    for _ in range(10):
        clock.now += 1
        stats.generation_tokens += 60
        stats.prompt_tokens += 40
        wait.sample(stats, {"a": 6000, "c": 100})
    assert wait.seconds("a") == pytest.approx(61)
    assert wait.seconds("b") == pytest.approx((256 + 100) / 100), "keys take turns: one turn of a, and all of c"
    for _ in range(200):  # the engine hangs: the wait grows
        clock.now += 1
        wait.sample(stats, {"a": 6000})
    assert wait.seconds("a") > 1000
    clock.now += 1
    wait.sample(EngineStats(num_waiting=1), {"a": 10})  # a new engine counts from 0
    assert wait.seconds("a") > 0


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tiny_llama_dir("gqa")
    keys = keys_of(tmp_path_factory.mktemp("keys") / "keys.json", "alice", "bob")
    with engine_process(directory, "--served-model-name", "tiny", "--max-num-seqs", "1") as socket:
        model = ServedModel.load("tiny", directory, EngineClient(socket))
        limits = Limits(max_wait_seconds=MOST_WAIT, max_requests_per_minute_per_key=15, retry_after_seconds=1)
        server = RunningServer({"tiny": model}, limits=limits, auth=keys)
        server.wait_ready()
        yield server
        server.stop()


async def test_a_queue_that_is_too_long_is_a_503_for_who_filled_it(server: RunningServer) -> None:
    model = server.gateway.model("tiny")
    prompts = [[i % 300 + 5] * 40 for i in range(400)]
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
    alice, bob = ({"Authorization": f"Bearer sk-{name}"} for name in ("alice", "bob"))
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        many = {"prompt": prompts, "max_tokens": 100, "ignore_eos": True}
        flood = [asyncio.create_task(client.post("/v1/completions", json=many, headers=alice)) for _ in range(2)]
        deadline = time.monotonic() + 30
        while model.wait.seconds("alice") <= MOST_WAIT:
            assert time.monotonic() < deadline
            assert not any(task.done() for task in flood)
            await asyncio.sleep(0.1)
        reply = await client.post("/v1/completions", json=body, headers=alice)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "overloaded"
        assert f"longer than the {MOST_WAIT} seconds" in reply.json()["error"]["message"]
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert (await client.post("/tokenize", json=body, headers=alice)).status_code == 200, "it does not queue"
        assert (await client.post("/v1/completions", json=body, headers=bob)).status_code == 200, "keys take turns"
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
    await asyncio.to_thread(server.wait_idle)
    assert httpx.post(f"{server.url}/v1/completions", json=body, headers=alice).status_code == 200


def test_openais_client_reads_the_headers_and_comes_back_in_time(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-bob", max_retries=0)
    seen = []
    with pytest.raises(openai.RateLimitError) as refused:
        for _ in range(16):
            raw = client.completions.with_raw_response.create(model="tiny", prompt="a", max_tokens=1)
            seen.append((raw.headers["x-ratelimit-limit-requests"], int(raw.headers["x-ratelimit-remaining-requests"])))
    assert {limit for limit, _ in seen} == {"15"}
    left = [left for _, left in seen]
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0
    headers = refused.value.response.headers
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"].endswith("s")
    assert "x-ratelimit-limit-tokens" not in headers, "there is no such bound"
    assert 1 <= int(headers["retry-after"]) <= 4
    began = time.monotonic()
    again = client.with_options(max_retries=1).completions.create(model="tiny", prompt="a", max_tokens=1)
    assert again.choices[0].finish_reason == "length"
    assert time.monotonic() - began > 0.5 * int(headers["retry-after"]), "it waited as it was told"
