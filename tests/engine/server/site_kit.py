"""A server's settings, engines and gateway as real processes, as systemd would run them."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from ports import free_port

READY_SECONDS = 90


class Site:
    """A settings file with models, their engines, and the gateway. `more` is appended to the file."""

    def __init__(self, directory: Path, models: dict[str, Path], more: str = "") -> None:
        self.directory = directory
        self.config = directory / "atoll.toml"
        self.engines: dict[str, subprocess.Popen[bytes]] = {}
        tables = [f'[models.{name}]\nmodel = "{path}"\n' for name, path in models.items()]
        self.config.write_text(
            f'[gateway]\nhost = "127.0.0.1"\nport = {free_port()}\nshutdown-timeout = 2\n'
            f'[engine]\ndevice = "cpu"\nkv-cache-memory-bytes = "8M"\n{"".join(tables)}{more}')
        self.gateway: subprocess.Popen[bytes] | None = None
        self.url = ""

    def spawn(self, log: str, *words: str, **options: object) -> subprocess.Popen[bytes]:
        with (self.directory / f"{log}.log").open("ab") as file:
            return subprocess.Popen([sys.executable, "-m", "appliance.cli", *words], stdout=file, stderr=file,
                                    **options)  # type: ignore[call-overload]

    def start_engine(self, name: str) -> None:
        sockets = self.directory / "engine" / name
        sockets.mkdir(parents=True, exist_ok=True)
        self.engines[name] = self.spawn(name, "engine", "--model", name, "--config", str(self.config),
                                        "--uds", str(sockets / "engine.sock"))

    def start_gateway(self, *flags: str, **options: object) -> None:
        self.gateway = self.spawn("gateway", "gateway", "--config", str(self.config), "--engines",
                                  str(self.directory / "engine"), "--log-format", "json", *flags, **options)
        until(lambda: '"ready"' in self.log("gateway"), 30, self.gateway)
        lines = [json.loads(line) for line in self.log("gateway").splitlines() if line.startswith("{")]
        self.url = [line for line in lines if line["message"] == "ready"][-1]["urls"][0].removesuffix("/v1")

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def health(self, model: str = "") -> int:
        return httpx.get(f"{self.url}/health", params={"model": model} if model else {}).status_code

    def complete(self, model: str | None, **headers: str) -> httpx.Response:
        body = {"prompt": "hello", "max_tokens": 4, **({"model": model} if model else {})}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=30)

    def stop(self) -> None:
        for process in [self.gateway, *self.engines.values()]:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in [self.gateway, *self.engines.values()]:
            if process is not None:
                process.wait(20)


def until(condition: Callable[[], object], seconds: float, process: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        assert process is None or process.poll() is None, "the process ended"
        time.sleep(0.05)
