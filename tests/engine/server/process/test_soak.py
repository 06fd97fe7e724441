"""200 mixed requests with random disconnects through the real gateway, the real engine and the real small model."""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

REQUESTS = 200
CONCURRENCY = 24
WORDS = ("the", "of", "a", "sea", "reef", "island", "lagoon", "coral", "wave", "sand", "light", "fish", "boat", "wind")


@pytest.fixture(scope="module")
def service(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """(base URL, pid) of `atoll serve` with few pages, so that requests also wait and are preempted."""
    directory = tmp_path_factory.mktemp("soak")
    log = directory / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.server.cli.serve", str(smollm2_dir),
             "--served-model-name", "smollm2", "--port=0",
             "--max-model-len=1024", "--max-num-seqs=16", "--kv-cache-memory-bytes=48M", "--log-format=json"],
            stdout=file, stderr=file, env=os.environ | {"XDG_RUNTIME_DIR": str(directory)})
    try:
        deadline, url = time.monotonic() + 120, None
        while url is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
            url = next((line["url"] for line in map(json.loads, log.read_text().splitlines()) if "url" in line), None)
        yield url.removesuffix("/v1"), process.pid
    finally:
        process.terminate()
        status = process.wait(60)
    assert status == 0, log.read_text()
    assert "Traceback" not in log.read_text()


def gauges(http: httpx.Client) -> dict[str, float]:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {s.name: s.value for f in families if f.type in ("gauge", "counter") for s in f.samples
            if "finished_reason" not in s.labels and "handler" not in s.labels}


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def random_request(rng: random.Random) -> tuple[str, dict]:
    text = " ".join(rng.choices(WORDS, k=rng.choice((1, 5, 20, 80, 200))))
    shared = "You are a patient guide to reefs and islands. " * 4  # prefix-cache hits
    body = {
        "model": "smollm2", "stream": rng.random() < 0.6, "max_tokens": rng.choice((1, 3, 8, 16, 40)),
        "temperature": rng.choice((0, 0.7, 1.0)), "seed": rng.randrange(1000), "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.2:
        body["top_p"] = 0.9
    if rng.random() < 0.2:
        body["stop"] = [" the", "\n"]
    if rng.random() < 0.1:
        body["n"] = 2
    if rng.random() < 0.1:
        body["frequency_penalty"] = 0.5
    if rng.random() < 0.5:
        return "/v1/completions", body | {"prompt": text}
    messages = [{"role": "system", "content": shared}, {"role": "user", "content": text}]
    return "/v1/chat/completions", body | {"messages": messages}


async def one_request(http: httpx.AsyncClient, rng: random.Random) -> str:
    """Send one, or walk away from it; returns what became of it."""
    path, body = random_request(rng)
    leave_after = rng.choice((0.0, 0.05, 0.3, 1.0)) if rng.random() < 0.3 else None
    if leave_after is None:
        return await exchange(http, path, body)
    task = asyncio.create_task(exchange(http, path, body | {"max_tokens": 300, "ignore_eos": True}))
    await asyncio.wait({task}, timeout=leave_after)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, httpx.TransportError):
        return await task
    return "left"


async def exchange(http: httpx.AsyncClient, path: str, body: dict) -> str:
    if not body["stream"]:
        reply = await http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        assert len(answer["choices"]) == body.get("n", 1)
        assert all(choice["finish_reason"] in ("stop", "length") for choice in answer["choices"])
        if body["ignore_eos"] and "stop" not in body:
            assert answer["usage"]["completion_tokens"] == body["max_tokens"] * body.get("n", 1)
        return "answered"
    finished = 0
    async with http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200
        lines = [line.removeprefix("data: ") async for line in reply.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    for line in lines[:-1]:
        chunk = json.loads(line)
        assert "error" not in chunk, line
        finished += sum(choice["finish_reason"] is not None for choice in chunk["choices"])
    assert finished == body.get("n", 1)
    return "streamed"


async def soak(url: str) -> Counter[str]:
    gate, fates = asyncio.Semaphore(CONCURRENCY), Counter[str]()
    limits = httpx.Limits(max_connections=CONCURRENCY + 4)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:

        async def run(i: int) -> None:
            async with gate:
                fates[await one_request(http, random.Random(i))] += 1

        await asyncio.gather(*(run(i) for i in range(REQUESTS)))
    return fates


def test_soak_ends_with_zero_pages_in_use(service: tuple[str, int]) -> None:
    url, _ = service
    with httpx.Client(base_url=url, timeout=30) as http:
        fates = asyncio.run(soak(url))
        assert fates.total() == REQUESTS
        assert fates["answered"] > 20
        assert fates["streamed"] > 40
        assert fates["left"] > 20

        def settled() -> bool:
            now = gauges(http)
            return not any(now[name] for name in ("vllm:num_requests_running", "vllm:num_requests_waiting",
                                                  "atoll:kv_pages_in_use", "vllm:kv_cache_usage_perc"))

        until(settled, 15)
        assert http.get("/health").status_code == 200
        now = gauges(http)
        assert now["vllm:prefix_cache_hits_total"] > 0
        assert now["atoll:engine_step_failures_total"] == 0
        assert now["atoll:engine_restarts_total"] == 0


def test_a_killed_engine_fails_its_requests_and_comes_back(service: tuple[str, int]) -> None:
    url, pid = service
    body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "temperature": 0}

    async def killed_in_the_middle() -> tuple[list[str], httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            plain = asyncio.create_task(http.post("/v1/completions", json=body))
            lines = []
            async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
                async for line in reply.aiter_lines():
                    lines += [line.removeprefix("data: ")] if line.startswith("data: ") else []
                    if len(lines) == 3:
                        (engine,) = psutil.Process(pid).children()
                        engine.kill()
            return lines, await plain

    lines, plain = asyncio.run(killed_in_the_middle())
    assert plain.status_code in (500, 503)
    assert plain.json()["error"]["type"] == "server_error"
    errors = [line for line in lines if '"error"' in line]
    assert len(errors) == 1
    assert json.loads(errors[0])["error"]["type"] == "server_error"
    with httpx.Client(base_url=url, timeout=120) as http:
        until(lambda: http.get("/health").status_code == 200, 60)
        assert http.post("/v1/completions", json=body | {"max_tokens": 4}).json()["usage"]["completion_tokens"] == 4
