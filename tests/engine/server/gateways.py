"""Gateways in front of real engine processes, for the fixtures in `conftest.py`."""

import asyncio
import contextlib
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import uvicorn

from engine.server.access.auth import KeyFile
from engine.server.gateway.app import create_app
from engine.server.http.limits import Limits
from engine.server.http.protocol import BoundedHttpProtocol
from engine.server.observe.access_log import AccessLog
from engine.server.openai.serving import Gateway, ServedModel


class RunningServer:
    """A gateway under uvicorn in a thread of this process, so that a test can look at its insides."""

    def __init__(self, models: dict[str, ServedModel], *, limits: Limits, auth: KeyFile | None = None,
                 traces_endpoint: str = "") -> None:
        self.app = create_app(models, limits=limits, auth=auth, traces_endpoint=traces_endpoint)
        self.gateway: Gateway = self.app.state.gateway
        self.client = next(iter(models.values())).client
        config = uvicorn.Config(
            AccessLog(self.app),
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
        deadline = time.monotonic() + 60
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
        command = [sys.executable, "-m", "engine.server.process.engine_process",
                   "--uds", str(socket), "--model", str(model)]  # fmt: skip
        with (Path(directory) / "log").open("w+") as log:
            process = subprocess.Popen(
                [*command, "--kv-cache-memory-bytes", "64000000", *flags], stdout=log, stderr=log
            )
            try:
                yield socket
            finally:
                process.terminate()
                process.wait(timeout=20)


def keys_of(path: Path, *names: str) -> KeyFile:
    """A file of API keys: the key of each name is `sk-NAME`."""
    entries = [{"id": name, "sha256": hashlib.sha256(f"sk-{name}".encode()).hexdigest()} for name in names]
    path.write_text(json.dumps({"keys": entries}))
    return KeyFile(path)


def ask(server: RunningServer, key: str, request_id: str, tokens: int, **fields: object) -> threading.Thread:
    """Send a request in a thread; its end is the answer's."""
    body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, **fields}
    headers = {"Authorization": f"Bearer sk-{key}", "X-Request-Id": request_id}
    thread = threading.Thread(
        target=lambda: httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120))
    thread.start()
    return thread
