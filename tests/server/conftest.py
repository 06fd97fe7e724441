"""Fixtures of the HTTP surface: the real tokenizer, and gateways in front of real engine processes."""

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn

from engine.server.app import create_app
from engine.server.auth import KeyFile
from engine.server.client import EngineClient
from engine.server.http_protocol import BoundedHttpProtocol
from engine.server.limits import Limits
from engine.server.serving import Gateway, ServedModel
from engine.text.tokenizer import TextTokenizer


@pytest.fixture(scope="session")
def smol_tokenizer(smollm2_dir: Path) -> TextTokenizer:
    return TextTokenizer.load(smollm2_dir)


class RunningServer:
    """A gateway under uvicorn in a thread of this process, so that a test can look at its insides."""

    def __init__(self, models: dict[str, ServedModel], *, limits: Limits, auth: KeyFile | None = None) -> None:
        self.app = create_app(models, limits=limits, auth=auth)
        self.gateway: Gateway = self.app.state.gateway
        self.client = next(iter(models.values())).client
        config = uvicorn.Config(
            self.app,
            port=0,
            http=BoundedHttpProtocol.with_limits(limits),
            ws="none",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve()), daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self._server.started:
            assert self._thread.is_alive(), "the gateway ended"
            assert time.monotonic() < deadline, "the gateway did not start"
            time.sleep(0.02)
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def wait_ready(self, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while httpx.get(f"{self.url}/health").status_code != 200:
            assert time.monotonic() < deadline, self.client.progress or self.client.last_error
            time.sleep(0.1)

    def wait_idle(self, seconds: float = 20) -> None:
        """Until the engine holds no request and no page: what a finished or abandoned request must lead to."""
        deadline = time.monotonic() + seconds
        while (
            self.gateway.in_flight
            or self.client.stats.num_running
            or self.client.stats.num_waiting
            or (self.client.stats.pages_in_use)
        ):
            assert time.monotonic() < deadline, (self.gateway.in_flight, self.client.stats)
            time.sleep(0.05)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)


@contextlib.contextmanager
def engine_process(model: Path, *flags: str) -> Iterator[Path]:
    """A real engine process on a socket of its own."""
    with tempfile.TemporaryDirectory(prefix="atoll-") as directory:
        socket = Path(directory) / "engine.sock"
        command = [sys.executable, "-m", "engine.server.engine_process", "--uds", str(socket), "--model", str(model)]
        with (Path(directory) / "log").open("w+") as log:
            process = subprocess.Popen(
                [*command, "--kv-cache-memory-bytes", "64000000", *flags], stdout=log, stderr=log
            )
            try:
                yield socket
            finally:
                process.terminate()
                process.wait(timeout=20)


@pytest.fixture(scope="session")
def tiny_engine(tiny_llama_dir: Callable[..., Path]) -> Iterator[tuple[Path, Path]]:
    """(socket, model directory) of a random tiny Llama: fast, and its text is full of broken characters."""
    directory = tiny_llama_dir("gqa")
    with engine_process(directory, "--served-model-name", "tiny") as socket:
        yield socket, directory


@pytest.fixture(scope="session")
def tiny_server(tiny_engine: tuple[Path, Path]) -> Iterator[RunningServer]:
    socket, directory = tiny_engine
    model = ServedModel.load("tiny", directory, EngineClient(socket))
    server = RunningServer({"tiny": model, "org/tiny": model}, limits=Limits(body_seconds=1.5, header_seconds=1.5))
    server.wait_ready()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def smol_server(smollm2_dir: Path) -> Iterator[RunningServer]:
    """The real small model."""
    with engine_process(smollm2_dir, "--served-model-name", "smollm2", "--max-model-len", "2048") as socket:
        model = ServedModel.load("smollm2", smollm2_dir, EngineClient(socket))
        server = RunningServer({"smollm2": model}, limits=Limits())
        server.wait_ready()
        yield server
        server.stop()
