"""The engine process's loop and its client, with a core that does what a test wants."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_kit import connected, greedy, tokens_of, until

from engine.core.request import EngineRequest, EngineStats, FinishReason, StepOutput
from engine.errors import EngineDeadError
from engine.server.ipc.framing import PeerPolicy, listen
from engine.server.ipc.server import IpcServer
from engine.server.process.engine_service import EngineService
from engine.server.process.notify import Notifier


class ScriptedCore:
    """Speaks `EngineCore`'s protocol; each request gets the tokens 0, 1, 2 … one a step."""

    def __init__(self) -> None:
        self.requests: dict[str, tuple[int, int]] = {}
        self.steps = 0
        self.step_seconds = 0.0
        self.blow_up: Exception | None = None

    def add_request(self, request: EngineRequest) -> None:
        if request.prompt_token_ids == [666]:
            raise RuntimeError("a defect in the check")
        self.requests[request.request_id] = (0, request.params.max_tokens or 16)

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[StepOutput]:
        time.sleep(self.step_seconds)
        if self.blow_up:
            raise self.blow_up
        self.steps += 1
        outputs = []
        for request_id, (done, total) in list(self.requests.items()):
            self.requests[request_id] = (done + 1, total)
            output = StepOutput(request_id, [done])
            if done + 1 == total:
                output.finish_reason = FinishReason.LENGTH
                del self.requests[request_id]
            outputs.append(output)
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.requests), steps=self.steps)

    def info(self) -> dict:
        return {"model_names": ["scripted"], "max_model_len": 100, "vocab_size": 10, "eos_token_ids": [], "dtype": "x",
                "device": "x", "num_pages": 1, "page_size": 16, "max_num_seqs": 4, "something": "newer"}


class Loop:
    """An `EngineService` in a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.core = ScriptedCore()
        self.load_gate = threading.Event()
        self.error: Exception | None = None
        self.server = IpcServer(listen(path), PeerPolicy(), pid=os.getpid())
        self.service = EngineService(self.server, Notifier())
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _build(self, progress: Callable[[str, int, int], None]) -> ScriptedCore:
        done = 0
        while not self.load_gate.wait(0.02):
            done += 1
            progress("loading weights", done, 1000)
        return self.core

    def _run(self) -> None:
        try:
            self.service.load(self._build, time.monotonic())
            self.service.run()
        except Exception as error:
            self.error = error
            self.service.farewell("It broke.", "Look.")
        else:
            self.server.close()

    def stop(self) -> None:
        self.load_gate.set()
        self.core.blow_up, self.core.step_seconds = None, 0
        if self.thread.is_alive():
            self.service.stop()
            with contextlib.suppress(OSError):
                os.write(self.server.wake_fd, b"x")
        self.thread.join(10)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    loop = Loop(tmp_path / "s")
    yield loop
    loop.stop()


async def test_loading_is_told_and_requests_must_wait(loop: Loop) -> None:
    async with connected(loop.path) as client:
        await until(lambda: client.progress.startswith("loading weights "))
        assert client.state == "loading"
        assert not client.healthy()
        with pytest.raises(EngineDeadError, match="still loading"):
            await tokens_of(client, EngineRequest("r", [1], greedy(2)))
        loop.load_gate.set()
        await client.wait_ready(5)
        assert (await tokens_of(client, EngineRequest("r", [1], greedy(3))))[0] == [0, 1, 2]


async def test_a_fatal_error_is_told_to_every_client(loop: Loop) -> None:
    loop.load_gate.set()
    async with connected(loop.path) as client:
        await client.wait_ready(5)
        loop.core.step_seconds, loop.core.blow_up = 0.05, MemoryError("gone")
        with pytest.raises(EngineDeadError, match="It broke"):
            await tokens_of(client, EngineRequest("r", [1], greedy(3)))
        assert isinstance(loop.error, MemoryError)
        assert client.last_error == "It broke. Look."


async def test_a_defect_while_adding_fails_that_request_only(loop: Loop) -> None:
    loop.load_gate.set()
    async with connected(loop.path) as client:
        await client.wait_ready(5)
        _, last = await tokens_of(client, EngineRequest("bad", [666], greedy(3)))
        assert (last.finish_reason, last.error) == (FinishReason.ERROR, "RuntimeError while the request was added.")
        assert (await tokens_of(client, EngineRequest("r", [1], greedy(3))))[0] == [0, 1, 2]


async def test_stopping_lets_running_requests_end_and_takes_no_new_ones(loop: Loop) -> None:
    loop.load_gate.set()
    loop.core.step_seconds = 0.02
    async with connected(loop.path) as client:
        await client.wait_ready(5)
        outputs = client.generate(EngineRequest("r", [1], greedy(20)))
        await anext(outputs)
        loop.service.stop()
        await until(lambda: client.state == "dead")
        with pytest.raises(EngineDeadError, match="stopping"):
            await tokens_of(client, EngineRequest("late", [1], greedy(2)))
        assert len([output async for output in outputs]) == 19
        loop.thread.join(30)
        assert not loop.thread.is_alive()
        assert loop.error is None


async def test_health_is_step_progress_not_an_open_socket(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.ipc.client.PING_SECONDS", 0.1)
    loop.load_gate.set()
    async with connected(loop.path, stall_seconds=1.5) as client:
        await client.wait_ready(5)
        await asyncio.sleep(2)
        assert client.healthy()  # idle: the pings are answered
        loop.core.step_seconds = 5
        task = asyncio.create_task(tokens_of(client, EngineRequest("slow", [1], greedy(1))))
        await asyncio.sleep(0.2)
        assert client.healthy()
        await asyncio.sleep(3)
        assert not client.healthy()
        assert client.stalled()
        await task
        assert client.healthy()


async def test_work_of_others_is_no_stall_of_ours(loop: Loop) -> None:
    loop.load_gate.set()
    loop.core.step_seconds = 0.05
    async with connected(loop.path) as busy:
        await busy.wait_ready(5)
        task = asyncio.create_task(tokens_of(busy, EngineRequest("r", [1], greedy(40))))
        await asyncio.sleep(0.2)
        async with connected(loop.path, stall_seconds=0.5) as idle:
            await idle.wait_ready(5)
            assert idle.stats.num_running == 1
            assert idle.healthy()
        await task


async def test_told_to_stop_at_the_end_of_loading_it_stops_at_once(loop: Loop) -> None:
    loop.service.stop()
    loop.load_gate.set()
    loop.thread.join(30)
    assert not loop.thread.is_alive()


async def test_two_clients_may_use_the_same_request_ids(loop: Loop) -> None:
    loop.load_gate.set()
    async with connected(loop.path) as one, connected(loop.path) as two:
        await one.wait_ready(5)
        await two.wait_ready(5)
        got = await asyncio.gather(*(tokens_of(client, EngineRequest("x", [1], greedy(n)))
                                     for client, n in ((one, 5), (two, 9))))
        assert [len(tokens) for tokens, _ in got] == [5, 9]
        assert loop.core.requests == {}


async def test_an_engine_of_a_stranger_is_not_trusted(loop: Loop) -> None:
    policy = PeerPolicy(own_uid=os.geteuid() + 1)
    if os.geteuid() == 0:
        pytest.skip("root is trusted by everybody")
    async with connected(loop.path, policy=policy) as client:
        await until(lambda: "not allowed" in client.last_error)
        assert client.state == "connecting"
