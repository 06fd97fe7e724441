"""The system form in a root of its own, without a systemd that runs: unit files, users and links are made by the real
tools with --root; the processes of the units are started here (`fake_units.py`)."""

import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from installer_kit import Witness

from installer.base.journal import History, replay
from installer.base.layout import Layout
from installer.base.proc import ProcessId
from installer.decide.frontend import Unattended
from installer.decide.install_options import InstallOptions, ModelChoice
from installer.operate.install import Installer, InstallResult, key_was_shown
from installer.operate.rollback import Rollback
from installer.operate.uninstall import uninstall
from installer.service.manager import ServiceState
from installer.service.systemd import SystemdService

FAKE_UNITS = Path(__file__).with_name("fake_units.py")


class RootedService(SystemdService):
    """Units of a root that is not booted; their processes are children of nobody, as systemd's would be."""

    @property
    def book(self) -> Path:
        return self.layout.prefix / "processes.json"

    def _read(self) -> dict[str, list[Any]]:
        return json.loads(self.book.read_text()) if self.book.exists() else {}

    def _alive(self) -> dict[str, ProcessId]:
        found = {name: ProcessId(*identity) for name, identity in self._read().items()}
        return {name: process for name, process in found.items() if process.alive()}

    def _write(self, processes: dict[str, ProcessId]) -> None:
        book = {name: [p.pid, p.start_time, p.boot_id] for name, p in processes.items()}
        partial = self.book.with_suffix(".new")
        partial.write_text(json.dumps(book))
        partial.rename(self.book)

    def start(self) -> None:
        alive = self._alive()
        layout = self.layout
        config = ["--config", str(layout.config)]
        gateway = ["gateway", *config, "--keys", str(layout.api_keys), "--tls", str(layout.server_key)]
        wanted = {name: ["engine", "--model", name, *config] for name in self.models()} | {"gateway": gateway}
        for name, words in wanted.items():
            if name not in alive:
                with open(layout.prefix / "log", "ab") as log:
                    command = [str(layout.current.resolve() / "bin/atoll"), *words]
                    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
                identity = ProcessId.of(process.pid)
                alive[name] = identity or ProcessId(process.pid, 0, "gone")
                self._write(alive)

    def stop(self, names: Collection[str] | None = None) -> bool:
        alive = self._alive()
        chosen = [name for name in alive if names is None or name in names]
        for name in chosen:
            process = alive.pop(name)
            os.kill(process.pid, signal.SIGKILL)
            while process.alive():
                time.sleep(0.01)
        self._write(alive)
        return bool(chosen)

    def reload_models(self, drain: float) -> bool:
        gateway = self._alive().get("gateway")
        if gateway is None:
            return False
        ready, done = self.layout.run.parent / "gateway", self.layout.run.parent / "reloaded"
        while gateway.alive() and not (ready.exists() and ready.read_text() == str(gateway.pid)):
            time.sleep(0.01)  # as systemd waits for the notification
        done.unlink(missing_ok=True)
        os.kill(gateway.pid, signal.SIGHUP)
        while not done.exists() and gateway.alive():
            time.sleep(0.01)
        return True

    def state(self) -> ServiceState:
        known, alive = self._read(), self._alive()
        if known.keys() - alive.keys():
            return ServiceState("failed", last_exit=3)
        if not alive:
            return ServiceState("stopped")
        return ServiceState("running", alive["gateway"].pid if "gateway" in alive else None, self._release())

    def serving(self) -> dict[str, str]:
        return {name: str(process) for name, process in self._alive().items()}

    def pids(self) -> frozenset[int]:
        return frozenset(process.pid for process in self._alive().values())

    def named_pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._alive().items()}

    def log_tail(self, lines: int) -> list[str]:
        log = self.layout.prefix / "log"
        return log.read_text().splitlines()[-lines:] if log.exists() else []


@dataclass
class Server:
    """One root and how to install on it."""

    root: Path
    port: int
    key: Path

    @property
    def layout(self) -> Layout:
        return Layout.server(self.root)

    @property
    def service(self) -> RootedService:
        return RootedService(self.layout)

    @property
    def history(self) -> History:
        return History(replay(self.layout.journal).records)

    def install(self, *bundles: Path, mode: str = "good", witness: Any = None, **options: Any) -> InstallResult:
        options.setdefault("models", [ModelChoice(bundle) for bundle in bundles])
        given: dict[str, Any] = {
            "trust_keys": [self.key], "port": self.port, "host": "127.0.0.1", "device": "cpu", "start_timeout": 20.0,
            "smoke_timeout": 20.0, "waivers": {"systemd": "this root is not booted"}, **options,
        }  # fmt: skip
        command = (sys.executable, "-S", "-E", str(FAKE_UNITS), mode)
        result = Installer(
            InstallOptions(**given), witness or Witness(), layout=self.layout, service=self.service,
            release_command=command,
        ).run()  # fmt: skip
        if result.api_key:
            key_was_shown(self.layout, result.key_ids)
        return result

    def rollback(self, **options: Any) -> InstallResult:
        given = InstallOptions(start_timeout=20.0, smoke_timeout=20.0, **options)
        return Rollback(given, Unattended(), layout=self.layout, service=self.service).run()

    def uninstall(self, *, purge: bool) -> None:
        uninstall(self.layout, purge=purge, service=self.service)

    def serving(self) -> dict[str, Any]:
        """What the gateway says it serves, over TLS that is checked against the local authority."""
        context = ssl.create_default_context(cafile=str(self.layout.ca_cert))
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=context)
        connection.request("GET", "/health")
        return json.loads(connection.getresponse().read())


def empty_server(root: Path, port: int, key: Path) -> Server:
    """The few files and directories of a distribution that others would miss if we took them."""
    for directory in ("etc/systemd/system", "etc/tmpfiles.d", "etc/modules-load.d", "usr/local/bin", "opt", "run",
                      "var/lib", "var/cache", "var/log"):  # fmt: skip
        (root / directory).mkdir(parents=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    return Server(root, port, key)
