"""Requests and tokens a minute: each key has its own, refusals say when to come back, and time refills both."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from gateways import RunningServer

from engine.server.access.auth import ApiKey, KeyFile
from engine.server.access.caller import Caller
from engine.server.access.key_rates import Rates
from engine.server.http.errors import ApiError
from engine.server.http.limits import Limits
from engine.server.ipc.client import EngineClient
from engine.server.openai.serving import Gateway, ServedModel


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_refill_steadily_and_keys_do_not_share() -> None:
    clock = Clock()
    rates = Rates(6, 0, clock)
    assert [rates.admit("a") for _ in range(7)] == [0.0] * 6 + [pytest.approx(10.0)]
    assert rates.admit("a") == pytest.approx(10.0), "a refusal is not counted"
    assert rates.admit("b") == 0
    clock.now += 9.9
    assert 0 < rates.admit("a") <= 0.2
    clock.now += 0.2
    assert rates.admit("a") == 0
    clock.now += 3600
    assert [rates.admit("a") == 0 for _ in range(7)] == [True] * 6 + [False], "an idle hour saves up one minute"


def test_tokens_are_counted_at_the_end_and_paid_back_by_waiting() -> None:
    clock = Clock()
    rates = Rates(0, 600, clock)
    assert rates.admit("a") == 0
    rates.spend("a", 1000)
    assert rates.admit("a") == pytest.approx(40.1)
    assert rates.admit("b") == 0
    clock.now += 41
    assert rates.admit("a") == 0


def test_without_bounds_nothing_is_kept() -> None:
    rates = Rates(0, 0)
    assert all(rates.admit("a") == 0 for _ in range(1000))
    rates.spend("a", 10**9)
    assert rates.admit("a") == 0


@pytest.fixture
def server(tiny_engine: tuple[Path, Path], tmp_path: Path) -> Iterator[RunningServer]:
    socket, directory = tiny_engine
    keys = [{"id": name, "name": name, "sha256": hashlib.sha256(f"sk-{name}".encode()).hexdigest()}
            for name in ("requests", "tokens", "other")]
    (tmp_path / "keys").write_text(json.dumps({"keys": keys}))
    limits = Limits(max_requests_per_minute_per_key=3, max_tokens_per_minute_per_key=60)
    server = RunningServer({"tiny": ServedModel.load("tiny", directory, EngineClient(socket))}, limits=limits,
                           auth=KeyFile(tmp_path / "keys"))
    server.wait_ready()
    yield server
    server.stop()


def complete(server: RunningServer, key: str, tokens: int, **fields) -> httpx.Response:
    body = {"prompt": "abc", "max_tokens": tokens, "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer sk-{key}"})


def refused(reply: httpx.Response, at_least: int, at_most: int) -> None:
    assert reply.status_code == 429
    assert reply.json()["error"]["code"] == "rate_limit_exceeded"
    assert reply.json()["error"]["type"] == "rate_limit_error"
    assert at_least <= int(reply.headers["retry-after"]) <= at_most


@pytest.mark.parametrize("stream", [False, True])
def test_the_endpoint_refuses_with_the_time_to_wait(server: RunningServer, stream: bool) -> None:
    assert [complete(server, "requests", 1).status_code for _ in range(3)] == [200] * 3
    refused(complete(server, "requests", 1), 1, 20)
    assert complete(server, "tokens", 200, stream=stream).status_code == 200
    refused(complete(server, "tokens", 1, stream=stream), 100, 160)
    assert complete(server, "other", 1).status_code == 200
    assert httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer sk-tokens"}).status_code == 200
    server.wait_idle()


def test_one_key_leaves_places_for_others(tiny_server: RunningServer) -> None:
    limits = Limits(max_in_flight=16)
    gateway = Gateway(tiny_server.gateway.models, limits=limits, metrics=tiny_server.gateway.metrics)
    busy, other, nobody = (Caller("id", ApiKey(name, name, b"")) if name else Caller("id") for name in ("a", "b", ""))
    with ExitStack() as stack:
        for _ in range(14):
            stack.enter_context(gateway.admitted(busy))
        with pytest.raises(ApiError, match="for other keys") as refused:
            stack.enter_context(gateway.admitted(busy))
        assert refused.value.status == 429
        stack.enter_context(gateway.admitted(other))
        stack.enter_context(gateway.admitted(other))
        with pytest.raises(ApiError, match="request limit") as refused:
            stack.enter_context(gateway.admitted(other))
        assert refused.value.status == 503
    with ExitStack() as stack:
        for _ in range(16):  # without keys all places are for everybody
            stack.enter_context(gateway.admitted(nobody))
