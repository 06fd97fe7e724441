"""How engine processes start and end: refusals, signals, a dead parent, systemd, kill -9, a stall."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from process_kit import READY_SECONDS, Engine, connected, greedy, tokens_of, until

from engine.core.request import EngineRequest
from engine.errors import EngineDeadError
from engine.server.ipc.client import EngineClient
from engine.server.process.engine_child import EngineChild
from engine.server.settings.commands import parse_serve


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
    (["--max-model-len=512", "--kv-cache-memory-bytes=1k"], 2, "is too small for a single token"),
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


@pytest.mark.parametrize("flags, error_id", [
    (["--max-model-len=512", "--kv-cache-memory-bytes=1k"], "out-of-memory"),
    (["--max-model-len=100000"], "settings"),
])
def test_the_log_record_of_a_fatal_error_has_an_id(
    tiny_llama_dir: Callable[..., Path], tmp_path: Path, flags: list[str], error_id: str
) -> None:
    engine = Engine(tiny_llama_dir(), tmp_path / "s", *flags)
    assert engine.process.wait(READY_SECONDS) == 2
    records = [json.loads(line) for line in engine.log.read_text().splitlines() if line.startswith("{")]
    assert [record["error_id"] for record in records if "error_id" in record] == [error_id]


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
        "child = subprocess.Popen([sys.executable, '-m', 'engine.server.process.engine_process',"
        " f'--parent-pid={os.getpid()}',"
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
        child.wait(30)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_systemd_hears_of_loading_readiness_life_and_the_end(
    tiny_llama_dir: Callable[..., Path], tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(READY_SECONDS)
        engine = Engine(tiny_llama_dir(), tmp_path / "s", "--kv-cache-memory-bytes=4M",
                        NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="300000")
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
    tiny_llama_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("engine.server.ipc.client.PING_SECONDS", 0.2)
    monkeypatch.setattr("engine.server.process.engine_child.STALL_KILL_SECONDS", 1.0)
    monkeypatch.setattr("engine.server.process.engine_child.STALL_POLL_SECONDS", 0.2)
    options = parse_serve([str(tiny_llama_dir()), "--kv-cache-memory-bytes=4M", "--log-format=json"])
    client = EngineClient(tmp_path / "s", stall_seconds=0.5)
    child = EngineChild(options, client)
    child.spawn()
    await client.start()
    supervisor = asyncio.create_task(child.supervise())
    try:
        await client.wait_ready(READY_SECONDS)
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)  # the socket stays open, the loop does not turn
        await until(lambda: not client.healthy(), 5)
        await until(lambda: child.pid not in (first, None), 10)
        await until(client.healthy, READY_SECONDS)
        assert len((await tokens_of(client, EngineRequest("r", [1], greedy(2))))[0]) == 2
        second = child.pid
        assert second is not None
        os.kill(second, signal.SIGKILL)  # as the kernel does when memory runs out
        await until(lambda: child.pid not in (second, None), 10)
        assert [getattr(record, "fields", {}).get("error_id") for record in caplog.records].count("killed") == 1
        assert not await child.stop()
        await supervisor
    finally:
        child.kill()
        await client.close()
