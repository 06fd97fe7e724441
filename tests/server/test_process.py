"""The engine process and its client: the real process with a tiny model, and the loop with a scripted core."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, EngineStats, FinishReason, StepOutput
from engine.errors import EngineDeadError, InvalidRequestError
from engine.server.args import parse_serve
from engine.server.client import EngineClient
from engine.server.engine_process import EngineService
from engine.server.ipc import PeerPolicy, listen
from engine.server.ipc_server import IpcServer
from engine.server.notify import Notifier
from engine.server.supervisor import EngineChild

READY_SECONDS = 60


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


async def tokens_of(client: EngineClient, request: EngineRequest) -> tuple[list[int], StepOutput]:
    tokens, last = [], StepOutput("none")
    async for last in client.generate(request):
        tokens += last.new_token_ids
    return tokens, last


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def connected(path: Path, **kwargs) -> AsyncIterator[EngineClient]:
    client = EngineClient(path, **kwargs)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


# -- the real process


class Engine:
    def __init__(self, model: Path, uds: Path, *flags: str) -> None:
        self.uds = uds
        self.log = uds.with_suffix(".log")
        self._argv = [sys.executable, "-m", "engine.server.engine_process", f"--uds={uds}", f"--model={model}",
                      "--log-format=json", *flags]
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self, **environment: str) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._argv, stdout=log, stderr=log, env=os.environ | environment)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(20)


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


async def test_kill_9_fails_what_runs_and_the_client_finds_the_next_engine(
    tiny_llama_dir: Callable[..., Path], tmp_path: Path
) -> None:
    engine = Engine(tiny_llama_dir(), tmp_path / "s", "--kv-cache-memory-bytes=4M")
    try:
        async with connected(engine.uds) as client:
            await client.wait_ready(READY_SECONDS)
            outputs = client.generate(EngineRequest("r", [1, 2, 3], greedy(500)))
            await anext(outputs)
            engine.process.kill()
            with pytest.raises(EngineDeadError):
                async for _ in outputs:
                    pass
            await until(lambda: client.state == "dead")
            assert not client.healthy()
            assert client.stats.num_running == 0
            with pytest.raises(EngineDeadError):
                await tokens_of(client, EngineRequest("r2", [1], greedy(2)))
            engine.process.wait()
            engine.start()  # on the socket file that the dead one left
            await until(lambda: client.state == "ready", READY_SECONDS)
            assert client.restarts == 1
            assert len((await tokens_of(client, EngineRequest("r3", [1], greedy(2))))[0]) == 2
    finally:
        assert engine.stop() == 0
    assert not engine.uds.exists()


@pytest.mark.parametrize("flags, status, words", [
    (["--max-model-len=100000"], 2, "--max-model-len"),
    (["--max-model-len=512", "--kv-cache-memory-bytes=1k"], 2, "not even two KV pages"),
    (["--uds=/nonexistent/s"], 2, "/nonexistent"),
    (["--allow-user=no-such-user"], 2, "no-such-user"),
])
def test_a_flag_that_cannot_be_honoured_ends_the_process_with_a_clear_last_line(
    tiny_llama_dir: Callable[..., Path], tmp_path: Path, flags: list[str], status: int, words: str
) -> None:
    engine = Engine(tiny_llama_dir(), tmp_path / "s", *flags)
    assert engine.process.wait(READY_SECONDS) == status
    last = engine.log.read_text().strip().splitlines()[-1]
    assert words in last
    assert "Traceback" not in engine.log.read_text()


def test_a_damaged_model_ends_the_process_with_its_own_status(
    tiny_llama_dir: Callable[..., Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_llama_dir().iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    engine = Engine(model, tmp_path / "s")
    assert engine.process.wait(READY_SECONDS) == 11
    assert "model.safetensors" in engine.log.read_text().splitlines()[-1]


def test_sigterm_while_loading_ends_at_once(tiny_llama_dir: Callable[..., Path], tmp_path: Path) -> None:
    engine = Engine(tiny_llama_dir(), tmp_path / "s")
    deadline = time.monotonic() + READY_SECONDS
    while not engine.uds.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)  # its handlers are installed right after the socket
    engine.process.terminate()
    assert engine.process.wait(10) == 0
    assert not engine.uds.exists()


def test_the_engine_dies_with_its_parent(tiny_llama_dir: Callable[..., Path], tmp_path: Path) -> None:
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'engine.server.engine_process', f'--parent-pid={os.getpid()}',"
        " *sys.argv[1:]])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    uds = tmp_path / "s"
    parent = subprocess.Popen([sys.executable, "-c", script, f"--uds={uds}", f"--model={tiny_llama_dir()}"],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    deadline = time.monotonic() + READY_SECONDS
    while not uds.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        child.wait(5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_systemd_hears_of_loading_readiness_life_and_the_end(
    tiny_llama_dir: Callable[..., Path], tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(READY_SECONDS)
        engine = Engine.__new__(Engine)
        engine.uds, engine.log = tmp_path / "s", tmp_path / "log"
        engine._argv = [sys.executable, "-m", "engine.server.engine_process", f"--uds={engine.uds}",
                        f"--model={tiny_llama_dir()}", "--kv-cache-memory-bytes=4M"]
        engine.start(NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="300000")
        heard: list[str] = []
        while not any("READY=1" in word for word in heard):
            heard.append(notify.recv(4096).decode())
        assert any("EXTEND_TIMEOUT_USEC=" in word and "STATUS=loading weights" in word for word in heard)
        notify.settimeout(0.3)  # idle, and yet the watchdog is fed
        assert {notify.recv(4096).decode() for _ in range(4)} == {"WATCHDOG=1"}
        assert engine.stop() == 0
        notify.settimeout(2)
        while not heard[-1].startswith("STOPPING=1"):
            heard.append(notify.recv(4096).decode())


async def test_a_stalled_engine_is_replaced(
    tiny_llama_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.server.client.PING_SECONDS", 0.2)
    monkeypatch.setattr("engine.server.supervisor.STALL_KILL_SECONDS", 1.0)
    monkeypatch.setattr("engine.server.supervisor.STALL_POLL_SECONDS", 0.2)
    options = parse_serve([str(tiny_llama_dir()), "--kv-cache-memory-bytes=4M", "--log-format=json"])
    child = EngineChild(options, tmp_path / "s")
    child.spawn()
    async with connected(tmp_path / "s", stall_seconds=0.5) as client:
        supervisor = asyncio.create_task(child.supervise(client))
        await client.wait_ready(READY_SECONDS)
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)  # the socket stays open, the loop does not turn
        await until(lambda: not client.healthy(), 5)
        await until(lambda: child.pid != first, 10)
        await until(client.healthy, READY_SECONDS)
        assert len((await tokens_of(client, EngineRequest("r", [1], greedy(2))))[0]) == 2
        await child.stop()
        await supervisor


async def test_work_of_others_is_no_stall_of_ours(loop: "Loop") -> None:
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


# -- the loop, with a core that does what a test wants


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
        loop.thread.join(5)
        assert not loop.thread.is_alive()
        assert loop.error is None


async def test_health_is_step_progress_not_an_open_socket(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.client.PING_SECONDS", 0.1)
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


async def test_told_to_stop_at_the_end_of_loading_it_stops_at_once(loop: Loop) -> None:
    loop.service.stop()
    loop.load_gate.set()
    loop.thread.join(5)
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
