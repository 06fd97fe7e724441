"""The units under all of their hardening, on a machine that boots: two real models on the CPU behind one gateway.

The code is this checkout's, so that a change of a unit is tried in a minute; the whole way from a medium is in
test_boot_life.py.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from machine import Machine, MachineError, when

from installer import keys, tls, units
from installer.layout import Layout
from tests.tiny_llama import TINY_LLAMAS, save_tiny_llama

pytestmark = pytest.mark.incremental

REPOSITORY = Path(__file__).resolve().parents[2]
ROOMS = ("appliance", "engine", "installer", "offline_bundle", "systemd")
WATCHDOG = 8
URL = "https://localhost:8443"
START = """#!/bin/sh
export PYTHONPATH=/opt/atoll/current/lib
exec /usr/bin/python3 -s -P -m appliance.cli "$@"
"""
SERVICE = "PYTHONPATH=/opt/atoll/current/lib python3 -c 'from pathlib import Path\nfrom installer.layout import Layout\n" \
          "from installer.service_systemd import SystemdService\ns = SystemdService(Layout.server())\n%s'"


class Server:
    """A machine with the units of two models, and the key that its clients have."""

    def __init__(self, machine: Machine, key: keys.NewKey) -> None:
        self.machine, self.key = machine, key
        self.revocable = keys.add(self.layout.api_keys, "to be revoked")

    @property
    def layout(self) -> Layout:
        return Layout.server(self.machine.root)

    def curl(self, path: str, body: dict | None = None, *, key: str | None = None, seconds: float = 60) -> tuple[int, dict]:
        """(status, answer) of a call over TLS, checked against the server's own authority."""
        words = ["curl", "-sS", "-m", str(seconds), "--cacert", str(self.layout.ca_cert), "-w", "\n%{http_code}",
                 "-H", f"Authorization: Bearer {key or self.key.text}", f"{URL}{path}"]  # fmt: skip
        if body is not None:
            words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        done = self.machine.beside(words)
        text, _, status = done.stdout.rpartition("\n")
        if done.returncode:
            return 0, {"curl": done.stderr}
        return int(status), json.loads(text) if text else {}

    def chat(self, model: str, **options: object) -> tuple[int, dict]:
        message = {"role": "user", "content": "What is the capital of France?"}
        return self.curl("/v1/chat/completions", {"model": model, "messages": [message], "max_tokens": 12,
                                                  "temperature": 0}, **options)  # type: ignore[arg-type]

    def healthy(self, model: str) -> bool:
        return self.curl(f"/health?model={model}")[0] == 200

    def show(self, unit: str, name: str) -> str:
        return self.machine.run(f"systemctl show --value -p {name} {unit}").out.strip()

    def pid(self, model: str) -> int:
        return int(self.show(f"atoll-engine@{model}", "MainPID"))


@pytest.fixture(scope="module")
def server(work: Path, smollm2_dir: Path) -> Iterator[Server]:
    with Machine("bookworm", work) as machine:
        layout = Layout.server(machine.root)
        for directory, mode in layout.directories():
            directory.mkdir(mode=mode, parents=True, exist_ok=True)
        release = layout.releases / "test"
        install_code(release)
        layout.current.symlink_to("releases/test")
        for name in ("chat", "tiny"):
            shutil.copytree(smollm2_dir, layout.models / name / "model") if name == "chat" else None
        (layout.models / "tiny/model").mkdir(parents=True)
        torch.manual_seed(0)
        save_tiny_llama(layout.models / "tiny/model", seed=0, **TINY_LLAMAS["gqa"])
        layout.config.write_text(
            '[gateway]\nhost = "0.0.0.0"\nport = 8443\n[engine]\ndevice = "cpu"\nkv-cache-memory-bytes = "64M"\n'
            '[models.chat]\nmodel = "/var/lib/atoll/models/chat/model"\nmax-model-len = 1024\n'
            '[models.tiny]\nmodel = "/var/lib/atoll/models/tiny/model"\nserved-model-name = ["tiny", "klein"]\n')
        tls.ensure(layout, ["localhost", "127.0.0.1"])
        key = keys.add(layout.api_keys, "test")
        rendered = units.render(layout, ["chat", "tiny"], host="0.0.0.0", gpu=False, watchdog=str(WATCHDOG))
        units.write(rendered)
        machine.boot()
        yield Server(machine, key)


def install_code(release: Path) -> None:
    """The checkout's rooms, and the environment's packages by hard link where that can be."""
    lib = release / "lib"
    lib.mkdir(parents=True)
    (release / "bin").mkdir()
    (release / "bin/atoll").write_text(START)
    (release / "bin/atoll").chmod(0o755)
    packages = Path(torch.__file__).parents[1]
    linked = subprocess.run(["cp", "-al", f"{packages}/.", str(lib)], capture_output=True)
    if linked.returncode:
        shutil.rmtree(lib)
        subprocess.run(["cp", "-a", f"{packages}/.", str(lib)], check=True)
    for found in lib.glob("__editable__*"):
        found.unlink()
    for room in ROOMS:
        shutil.copytree(REPOSITORY / room, lib / room, ignore=shutil.ignore_patterns("__pycache__"))


def wait_healthy(server: Server, model: str, seconds: float = 120) -> None:
    when(lambda: server.healthy(model), seconds, f"{model} to serve")


def test_the_services_start_under_their_hardening(server: Server):
    machine = server.machine
    machine.run(SERVICE % 's.apply_units(["chat", "tiny"])\ns.start()\nprint(s.state())').check()
    try:
        wait_healthy(server, "chat")
        wait_healthy(server, "tiny")
    except MachineError:
        print(machine.run("systemctl status --no-pager -l 'atoll*'; journalctl --no-pager -n 80 -u 'atoll*'").out)
        raise
    assert server.curl("/health")[0] == 200
    status, answer = server.chat("chat")
    assert status == 200, answer
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert server.chat("klein")[0] == 200
    assert [card["id"] for card in server.curl("/v1/models")[1]["data"]] == ["chat", "tiny", "klein"]
