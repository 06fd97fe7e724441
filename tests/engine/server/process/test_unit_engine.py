"""An engine whose device fails for good ends itself, and its unit starts a new one; single failures do not end it."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_kit import connected, greedy, tokens_of, until

from engine.core.request import EngineRequest, EngineStats, FinishReason, StepOutput
from engine.server.ipc.framing import PeerPolicy, listen
from engine.server.ipc.server import IpcServer
from engine.server.process.engine_service import EngineService
from engine.server.process.heartbeat import MAX_FAILED_STEPS
from engine.server.process.notify import Notifier


class FailingCore:
    """Fails its steps as `EngineCore` does, request by request, while `sick`; and answers at once otherwise."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.sick = ""                 # "": well; "prompts": requests of clients fail; "device": everything does
        self.steps = self.failures = self.probes = 0

    def add_request(self, request: EngineRequest) -> None:
        self.requests.append(request.request_id)

    def abort(self, request_ids: list[str]) -> None:
        self.requests = [key for key in self.requests if key not in request_ids]

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[StepOutput]:
        key = self.requests.pop()
        self.probes += key == "warm-up"
        if self.sick == "device" or (self.sick and key != "warm-up"):
            self.failures += 1
            return [StepOutput(key, finish_reason=FinishReason.ERROR, error="CUDA error: an illegal memory access")]
        self.steps += 1
        return [StepOutput(key, [1], finish_reason=FinishReason.LENGTH)]

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.requests), steps=self.steps, step_failures=self.failures)

    def info(self) -> dict:
        return {"model_names": ["x"], "max_model_len": 100, "vocab_size": 10, "eos_token_ids": [], "dtype": "x",
                "device": "x", "num_pages": 1, "page_size": 16, "max_num_seqs": 4}  # fmt: skip


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[FailingCore, Path, list[Exception]]]:
    """(core, socket, what ended the loop)"""
    core, path, errors = FailingCore(), tmp_path / "s", list[Exception]()
    server = IpcServer(listen(path), PeerPolicy(), pid=os.getpid())
    service = EngineService(server, Notifier())

    def run() -> None:
        try:
            service.load(lambda progress: core, time.monotonic())
            service.run()
        except Exception as error:
            errors.append(error)
            service.farewell("It broke.")
        else:
            server.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield core, path, errors
    service.stop()
    with contextlib.suppress(OSError):
        os.write(server.wake_fd, b"x")
    thread.join(10)


async def ask(path: Path, times: int) -> None:
    async with connected(path) as client:
        await client.wait_ready(10)
        for number in range(times):
            _, last = await tokens_of(client, EngineRequest(f"r{number}", [1], greedy(1)))
            assert last.error


async def test_prompts_that_fail_do_not_end_an_engine_whose_device_is_well(running):
    core, path, errors = running
    await until(lambda: core.probes == 1)  # the warm-up of the start
    core.sick = "prompts"
    await ask(path, 3 * MAX_FAILED_STEPS)
    core.sick = ""
    async with connected(path) as client:
        await client.wait_ready(10)
        assert (await tokens_of(client, EngineRequest("good", [1], greedy(1))))[0] == [1]
    assert core.probes == 1 + 3  # it asked the device each time, and was answered
    assert not errors


async def test_a_device_that_fails_everything_ends_the_engine(running):
    core, path, errors = running
    await until(lambda: core.probes == 1)
    core.sick = "device"
    await ask(path, MAX_FAILED_STEPS)
    await until(lambda: bool(errors))
    assert "illegal memory access" in str(errors[0])


async def test_last_words_wait_for_a_gateway_that_has_not_come_yet(tmp_path: Path) -> None:
    """It starts beside the engine, and on a busy machine later than an engine that fails at once."""
    path = tmp_path / "s"
    service = EngineService(IpcServer(listen(path), PeerPolicy(), pid=os.getpid()), Notifier())
    ending = threading.Thread(target=service.farewell, args=("No memory.", "Take less."), kwargs={"patience": 10.0})
    ending.start()
    await asyncio.sleep(0.3)
    async with connected(path) as client:
        await until(lambda: client.last_error == "No memory. Take less.")
    ending.join(30)
    assert not ending.is_alive()


def test_last_words_do_not_wait_for_ever(tmp_path: Path) -> None:
    service = EngineService(IpcServer(listen(tmp_path / "s"), PeerPolicy(), pid=os.getpid()), Notifier())
    began = time.monotonic()
    service.farewell("No memory.", patience=0.2)
    assert 0.2 <= time.monotonic() - began < 20
