"""The real server on a GPU, both processes: from a request over HTTP to its answer, and down again."""

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_kit import DEVICE
from tiny_llama import save_tiny_llama

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)
for package in ("fastapi", "uvicorn", "httptools", "uvloop", "msgspec", "prometheus_client", "transformers"):
    pytest.importorskip(package, reason=f"the gateway needs {package}, which this machine's Python lacks")

START_SECONDS = 120
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "the rest is easier"}], "temperature": 0,
        "max_tokens": 12, "ignore_eos": True}  # fmt: skip


class Server:
    """`atoll serve` with a tiny random model on the GPU."""

    def __init__(self, directory: Path) -> None:
        model = directory / "model"
        save_tiny_llama(model, hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
        self.log = directory / "log"
        flags = ["--port=0", f"--device={DEVICE.type}", "--dtype=bfloat16", "--served-model-name=tiny",
                 "--max-num-seqs=16", "--kv-cache-memory-bytes=64M", "--gpu-memory-utilization=0.3",
                 "--log-format=json"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine.server.cli.serve", str(model), *flags], stdout=log, stderr=log,
                env=os.environ | {"XDG_RUNTIME_DIR": str(directory)},
            )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while not (ready := [line for line in self.lines() if "url" in line]):
            assert self.process.poll() is None, f"the server ended: {self.log.read_text()}"
            assert time.monotonic() < deadline, f"not ready in {START_SECONDS} s: {self.log.read_text()}"
            time.sleep(0.1)
        self.port = int(ready[0]["url"].split(":")[2].split("/")[0])

    def lines(self) -> list[dict[str, Any]]:
        """The log, as far as it is whole lines of JSON."""
        found = []
        for line in self.log.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def ask(self, method: str, path: str, body: dict | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        finally:
            connection.close()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


def test_health_means_that_a_token_came_from_the_gpu(server: Server) -> None:
    assert server.ask("GET", "/health")[0] == 200
    devices = [line["device"] for line in server.lines() if "device" in line]
    assert devices, server.log.read_text()
    assert all(device.startswith(DEVICE.type) for device in devices), devices
    assert f"on {DEVICE.type}" in server.log.read_text(), "the memory plan names the device"


def test_models(server: Server) -> None:
    status, text = server.ask("GET", "/v1/models")
    assert status == 200, text
    assert [model["id"] for model in json.loads(text)["data"]] == ["tiny"]


def test_a_chat_completion_and_the_same_one_as_a_stream(server: Server) -> None:
    status, text = server.ask("POST", "/v1/chat/completions", CHAT)
    assert status == 200, text
    answer = json.loads(text)
    assert answer["usage"]["completion_tokens"] == 12
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"]

    status, text = server.ask("POST", "/v1/chat/completions", CHAT | {"stream": True})
    assert status == 200, text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1]
    deltas = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
    assert "".join(deltas) == choice["message"]["content"]
    assert len([delta for delta in deltas if delta]) > 1


def test_a_bad_request_gets_its_reason_and_the_next_one_works(server: Server) -> None:
    status, text = server.ask("POST", "/v1/chat/completions", CHAT | {"temperature": -1})
    assert status == 400, text
    assert "temperature" in text
    assert server.ask("POST", "/v1/completions", {"model": "tiny", "prompt": "the", "max_tokens": 3})[0] == 200


def test_metrics_count_what_the_gpu_did(server: Server) -> None:
    status, text = server.ask("GET", "/metrics")
    assert status == 200
    values = {line.split("{")[0].split(" ")[0]: float(line.rsplit(" ", 1)[1])
              for line in text.splitlines() if line and not line.startswith("#")}
    assert values["vllm:generation_tokens_total"] >= 24
    assert values["atoll:engine_step_failures_total"] == 0
    assert values["vllm:num_requests_running"] == 0


def test_sigterm_ends_both_processes_in_order(server: Server) -> None:
    status = server.stop()
    log = server.log.read_text()
    assert status == 0, log
    assert "Traceback" not in log, log
    assert [line for line in server.lines() if line.get("message", line.get("msg")) == "stopped"], log
