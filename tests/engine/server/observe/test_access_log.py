"""The access log tells model, key, tokens and times of a generating request, and nothing of what it says."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from gateways import RunningServer, keys_of

from engine.server.http.limits import Limits
from engine.server.ipc.client import EngineClient
from engine.server.openai.serving import ServedModel

MARKER = "Sphinx-of-black-quartz"


@pytest.fixture
def server(tiny_engine: tuple[Path, Path], tmp_path: Path) -> Iterator[RunningServer]:
    socket, directory = tiny_engine
    model = ServedModel.load("tiny", directory, EngineClient(socket))
    server = RunningServer({"tiny": model}, limits=Limits(), auth=keys_of(tmp_path / "keys", "alice"))
    server.wait_ready()
    yield server
    server.stop()


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_and_times(server: RunningServer, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    body = {"model": "tiny", "prompt": [MARKER, MARKER], "max_tokens": 7, "ignore_eos": True, "stream": stream}
    with caplog.at_level(logging.INFO, "atoll.access"):
        headers = {"Authorization": "Bearer sk-alice", "X-Request-Id": "job-1"}
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
        wait_for(lambda: len(caplog.records) >= 2)
    fields, plain = (record.fields for record in caplog.records)  # type: ignore[attr-defined]
    assert (fields["model"], fields["key"], fields["request_id"], fields["status"]) == ("tiny", "alice", "job-1", 200)
    assert fields["output_tokens"] == 14
    assert fields["prompt_tokens"] > 0
    assert 0 < fields["ttft_ms"] <= fields["ms"] + 1
    assert 0 < fields["itl_ms"] < fields["ms"]
    assert "model" not in plain, "only what generates"
    assert MARKER not in caplog.text
