"""One engine takes over from another, as `systemctl reload` does it: real processes, and a socket that stands for
systemd's and takes down what they say."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_kit import READY_SECONDS, Engine, connected, greedy, tokens_of

from engine.core.request import EngineRequest
from engine.server.process.notify import Notifier


class Listener:
    """What systemd would hear, in its order; `said[-1]` is the last. Barriers are answered at once."""

    def __init__(self, path: Path) -> None:
        self.path, self.said = path, list[str]()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))

    def hear(self, word: str, seconds: float = READY_SECONDS) -> str:
        """Wait for a message with this word; returns it."""
        end = time.monotonic() + seconds
        seen = 0
        while True:
            for text in self.said[seen:]:
                if word in text:
                    return text
            seen = len(self.said)
            assert select.select([self._socket], [], [], max(0.0, end - time.monotonic()))[0], (word, self.said)
            data, descriptors, *_ = socket.recv_fds(self._socket, 4096, 4)
            self.said.append(data.decode())
            for descriptor in descriptors:
                os.close(descriptor)

    def forget(self) -> None:
        self.said.clear()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def tiny_llama(tiny_llama_dir: Callable[..., Path]) -> Path:
    return tiny_llama_dir()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(tmp_path / "notify")
    yield listener
    listener.close()


@pytest.fixture
def serving(tmp_path: Path, tiny_llama: Path, systemd: Listener) -> Iterator[Engine]:
    engine = Engine(tiny_llama, tmp_path / "s", "--device=cpu", NOTIFY_SOCKET=str(systemd.path))
    systemd.hear("READY=1")
    yield engine
    engine.stop()


def reload(engine: Engine, systemd: Listener, *flags: str) -> "subprocess.Popen[bytes]":
    """What the unit's ExecReload= starts."""
    log = engine.log.open("ab")
    return subprocess.Popen([*engine._argv, f"--take-over={engine.process.pid}", "--watchdog=9", *flags],
                            stdout=log, stderr=log, env=os.environ | {"NOTIFY_SOCKET": str(systemd.path)})  # fmt: skip


def end(pid: int) -> None:
    """A successor is nobody's child here."""
    os.kill(pid, signal.SIGTERM)
    descriptor = os.pidfd_open(pid)
    assert select.select([descriptor], [], [], 20)[0]
    os.close(descriptor)


async def test_the_old_engine_serves_until_the_new_one_is_prepared(serving: Engine, systemd: Listener):
    systemd.forget()
    asked = reload(serving, systemd)
    async with connected(serving.uds) as client:
        await client.wait_ready(10)
        assert client.info is not None
        assert client.info.pid == serving.process.pid
        assert (await tokens_of(client, EngineRequest("one", [1], greedy(2))))[0]
    handed = await asyncio.to_thread(systemd.hear, "MAINPID=")
    assert "RELOADING=1" in handed
    pid = int(handed.partition("MAINPID=")[2].split()[0])
    try:
        assert await asyncio.to_thread(asked.wait, 20) == 0
        assert await asyncio.to_thread(serving.process.wait, 20) == 0
        await asyncio.to_thread(systemd.hear, "READY=1")
        said = "\n".join(systemd.said)
        assert said.index("MAINPID=") < said.index("WATCHDOG_USEC=300000000") < said.index("WATCHDOG_USEC=9000000")
        assert "STOPPING" not in said, "the old one speaks no more for the service"
        assert len({os.getpid(), asked.pid, serving.process.pid, pid}) == 4
        assert int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) != asked.pid, "its parent"
        async with connected(serving.uds) as client:
            info = await client.wait_ready(10)
            assert info.pid == pid
            assert (await tokens_of(client, EngineRequest("two", [1], greedy(2))))[0]
    finally:
        end(pid)
    assert not serving.uds.exists()


@pytest.mark.parametrize("flags, status", [
    (["--max-num-seqs=0"], 2), (["--max-model-len=99999999"], 2), (["--model=/nowhere"], 11),
])  # fmt: skip
async def test_what_cannot_serve_leaves_the_old_engine_alone(serving: Engine, systemd: Listener, flags, status: int):
    systemd.forget()
    assert await asyncio.to_thread(reload(serving, systemd, *flags).wait, READY_SECONDS) == status
    assert systemd.said == []
    async with connected(serving.uds) as client:
        info = await client.wait_ready(10)
        assert info.pid == serving.process.pid
        assert (await tokens_of(client, EngineRequest("one", [1], greedy(2))))[0]


def test_a_reload_that_is_killed_leaves_no_successor(serving: Engine, systemd: Listener):
    asked = reload(serving, systemd)
    time.sleep(0.3)
    asked.kill()
    asked.wait()
    deadline = time.monotonic() + READY_SECONDS
    while others(serving):  # it ends when it finds nobody to hand over to it
        assert time.monotonic() < deadline, others(serving)
        time.sleep(0.05)
    assert serving.process.poll() is None


def others(engine: Engine) -> list[int]:
    """Processes of this engine's command line but for itself."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"--uds={engine.uds}".encode() in path.read_bytes() and int(path.parent.name) != engine.process.pid:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_predecessor_that_is_gone_is_an_error(tmp_path: Path, tiny_llama: Path, systemd: Listener):
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    words = [sys.executable, "-m", "engine.server.process.engine_process",
             f"--uds={tmp_path / 's'}", f"--model={tiny_llama}",
             "--device=cpu", f"--take-over={gone.pid}"]  # fmt: skip
    done = subprocess.run(words, capture_output=True, env=os.environ | {"NOTIFY_SOCKET": str(systemd.path)})
    assert done.returncode == 1
    assert b"is not there" in done.stderr


@pytest.mark.parametrize("flags, status", [([], 0), (["--model=/nowhere"], 11), (["--block-size=7"], 2)])
def test_check_says_whether_it_would_start(tiny_llama: Path, flags, status: int):
    words = [sys.executable, "-m", "engine.server.process.engine_process",
             f"--model={tiny_llama}", "--device=cpu", "--check"]  # fmt: skip
    assert subprocess.run([*words, *flags], capture_output=True).returncode == status


def test_a_start_imports_no_symbolic_algebra(tiny_llama: Path):
    """It once cost a second of every start, and more where nobody had compiled it."""
    code = ("import sys\nfrom engine.server.settings.commands import parse_engine\n"
            "from engine.server.process.engine_service import _warm_up\n"
            "from engine.worker.startup.build import build_engine\n"
            "core = build_engine(parse_engine(sys.argv[1:]).engine)\n_warm_up(core)\n"
            "print([name for name in ('sympy', 'networkx', 'torch._dynamo') if name in sys.modules])")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, f"--model={tiny_llama}", "--device=cpu", "--uds=/"],
                          capture_output=True, text=True)  # fmt: skip
    assert done.stdout == "[]\n", done.stderr


def test_a_barrier_is_passed_when_it_was_read(systemd: Listener, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NOTIFY_SOCKET", str(systemd.path))
    notifier = Notifier()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        notifier.hand_over(77)
        os.write(write, b"x")
        os._exit(0)
    assert not select.select([read], [], [], 0.3)[0], "it did not wait"
    assert "MAINPID=77" in systemd.hear("MAINPID=")
    assert systemd.hear("BARRIER=1") == "BARRIER=1"
    assert select.select([read], [], [], 10)[0]
    os.waitpid(child, 0)
