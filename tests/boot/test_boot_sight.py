"""What an operator sees and does on a server that runs: status, logs, keys, certificate, verification, support bundle.

The code is this checkout's and the model a tiny one; the whole way from a medium is in test_boot_life.py.
"""

import io
import json
import shlex
import shutil
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from machine import Machine, Ran, when
from test_boot_units import install_code

from offline_bundle.model.build import build_bundle
from offline_bundle.signing.keys import new_keypair

pytestmark = pytest.mark.incremental

URL = "https://localhost:8443"
CODE = "/srv/code"
START = f"""#!/bin/sh
export PYTHONPATH={CODE}/lib PYTHONDONTWRITEBYTECODE=1
exec /usr/bin/python3 -s -P -m appliance.cli "$@"
"""


def canary(where: str) -> str:
    return f"CANARY5b2e-{where}-77ac"


@dataclass
class Server:
    """A server that was installed, and the key that the install showed."""

    machine: Machine
    key: str = ""

    def atoll(self, arguments: str, *, user: str = "", timeout: float = 180.0) -> Ran:
        command = f"{CODE}/bin/atoll {arguments}"
        return self.machine.run(f"su -s /bin/sh {user} -c {shlex.quote(command)}" if user else command, timeout=timeout)

    def json(self, arguments: str, code: int = 0) -> Any:
        return json.loads(self.atoll(f"{arguments} --json").check(code).out)

    def call(self, path: str, key: str, body: dict | None = None, *headers: str) -> int:
        """HTTP status of a call from beside the machine, over TLS, checked against the exported authority."""
        words = ["curl", "-sS", "-m", "60", "-o", "/dev/null", "-w", "%{http_code}", "--cacert",
                 str(self.machine.path("/root/ca.crt")), "-H", f"Authorization: Bearer {key}"]  # fmt: skip
        for header in headers:
            words += ["-H", header]
        if body is not None:
            words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        done = self.machine.beside([*words, f"{URL}{path}"])
        return int(done.stdout) if done.returncode == 0 else 0

    def chat(self, key: str, prompt: str = "hello", *headers: str) -> int:
        message = {"role": "user", "content": prompt}
        body = {"model": "tiny", "messages": [message], "max_tokens": 4}
        return self.call("/v1/chat/completions", key, body, *headers)


@pytest.fixture(scope="module")
def server(
    work: Path, tiny_llama_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    made = tmp_path_factory.mktemp("vendor")
    pair = new_keypair(made / "keys", "vendor")
    (made / "LICENSE").write_text("For tests.\n")
    bundle = build_bundle(
        tiny_llama_dir("gqa"), made, name="tiny", version="1.0.0", sequence=1, license_id="LicenseRef-Test",
        license_file=made / "LICENSE", source_repo="example/tiny", source_revision="0" * 40,
        private_key=pair.private_path, acceptance="none",
    )
    with Machine("bookworm", work) as machine:
        install_code(machine.path(CODE))
        machine.path(f"{CODE}/bin/atoll").write_text(START)
        machine.path("/root/vendor.pub").write_bytes(pair.public_path.read_bytes())
        shutil.copytree(bundle, machine.path("/root/bundle"))
        machine.boot()
        yield Server(machine)


def test_it_is_installed_and_healthy(server: Server) -> None:
    done = server.atoll(
        "install --bundle tiny=/root/bundle --trust-key /root/vendor.pub --device cpu --yes-nothing-else "
        "--tls-name llm.corp.local --json", timeout=420,
    ).check()
    server.key = json.loads(done.out[done.out.index("{") :])["api_key"]
    server.atoll("tls export-ca --out /root/ca.crt").check()
    assert server.chat(server.key) == 200
    facts = server.json("status")
    assert (facts["state"], facts["healthy"], facts["form"]) == ("serving", True, "system")
    assert {"atoll-gateway.service", "atoll-engine@tiny.service", "atoll-verify.timer"} <= {
        unit["name"] for unit in facts["units"] if unit["active"] == "active"}
    assert facts["engines"]["tiny"]["memory_plan"].startswith("Memory plan")
    assert facts["certificate"]["source"] == "local"
    assert "llm.corp.local" in facts["certificate"]["names"]
    assert any("llm.corp.local" in url for url in facts["endpoints"])
    screen = server.atoll("status").check().out
    assert "SERVING" in screen
    print(screen)
    assert screen.count("\n") <= 24


def test_another_user_sees_what_he_may(server: Server) -> None:
    shown = server.atoll("status --json", user="nobody")
    facts = json.loads(shown.out)
    assert (facts["state"], facts["health"]["ok"]) == ("serving", True), shown
    assert shown.code == 0
    assert {"the install journal", "the API keys"} <= set(facts["unseen"])
    assert server.atoll("apikey list", user="nobody").code == 30
    assert server.atoll("verify", user="nobody").code in (0, 10, 11, 12, 13, 30)


def test_keys_open_and_close_without_a_restart(server: Server) -> None:
    pid = server.machine.run("systemctl show -P MainPID atoll-gateway").out
    team = server.json("apikey new --name 'team a'")
    assert team["note"] is None
    assert server.chat(team["key"]) == 200
    figures = server.json("apikey new --name grafana --scope metrics")
    assert server.chat(figures["key"]) == 403
    assert server.call("/metrics", figures["key"]) == 200
    server.atoll("apikey revoke 'team a'").check()
    assert server.chat(team["key"]) == 401
    server.machine.run("systemctl restart atoll-gateway").check()
    when(lambda: server.chat(server.key) == 200, 60, "the gateway to serve again", 0.5)
    assert server.chat(team["key"]) == 401
    assert server.machine.run("systemctl show -P MainPID atoll-gateway").out != pid


def test_a_new_certificate_is_served_at_once(server: Server) -> None:
    before = server.json("tls show")["sha256"]
    pid = server.machine.run("systemctl show -P MainPID atoll-gateway").out
    renewed = server.json("tls renew")
    assert (renewed["note"], renewed["new_ca"]) == (None, False)
    assert renewed["sha256"] != before
    assert server.chat(server.key) == 200  # by the same authority
    assert server.json("status")["healthy"]  # which pins the installed certificate
    assert server.machine.run("systemctl show -P MainPID atoll-gateway").out == pid


def test_logs_come_from_the_journal(server: Server) -> None:
    assert "Memory plan" in server.atoll("logs --unit engine@tiny -n 1000").check().out
    gateway = server.atoll("logs --unit gateway -n 1000").check().out
    assert "POST /v1/chat/completions" in gateway
    assert "Memory plan" not in gateway
    raw = [line for line in server.atoll("logs --raw --unit gateway").check().out.splitlines() if line[:1] == "{"]
    assert all("logger" in json.loads(line) for line in raw)
    assert server.atoll("logs --unit sshd").code == 2
    assert server.atoll("logs --since 'no such time'").code == 2
    follower = server.machine.popen(f"timeout 20 {CODE}/bin/atoll logs -f -n 0 --unit gateway", stdout=subprocess.PIPE)
    assert follower.stdout is not None
    stop = threading.Event()

    def knock() -> None:
        while not stop.wait(1):
            server.chat(server.key)

    knocking = threading.Thread(target=knock)
    knocking.start()
    began = time.monotonic()
    try:
        assert "POST /v1/chat/completions" in follower.stdout.readline()
    finally:
        stop.set()
        knocking.join()
        follower.kill()
        follower.wait()
    assert time.monotonic() - began < 20


def test_the_weekly_verification_runs_in_its_sandbox(server: Server) -> None:
    server.machine.run("systemctl start atoll-verify.service", timeout=180).check()
    assert server.json("status")["last_verify"]["by"] == "verify"
    model = server.machine.run("ls -d /var/lib/atoll/models/*/").out.strip()
    flip = (f"python3 -c \"f = open('{model}model/model.safetensors', 'r+b'); f.seek(5000); b = f.read(1)[0]; "
            "f.seek(5000); f.write(bytes([b ^ 1]))\"")
    server.machine.run(flip).check()
    assert server.machine.run("systemctl start atoll-verify.service", timeout=180).code != 0
    assert server.machine.run("systemctl show -P ExecMainStatus atoll-verify").out.strip() == "11"
    facts = server.json("status", 40)
    assert (facts["state"], facts["healthy"], facts["last_verify"]["exit_code"]) == ("serving", False, 11)
    assert any("model.safetensors" in problem["what"] for problem in facts["problems"])
    server.machine.run(flip).check()
    assert server.atoll("verify --gentle").check().code == 0
    server.machine.run("systemctl reset-failed atoll-verify").check()
    assert server.json("status")["healthy"]


def test_no_canary_is_in_the_support_bundle(server: Server) -> None:
    machine = server.machine
    assert server.chat(server.key, canary("prompt"), f"X-Request-Id: {canary('request-id')}") == 200
    assert server.call(f"/v1/models/{canary('path')}", server.key) == 404
    assert server.chat(f"sk-{canary('wrong-key')}") == 401
    drop_in = machine.path("/etc/systemd/system/atoll-gateway.service.d/site.conf")
    drop_in.parent.mkdir(exist_ok=True)
    drop_in.write_text(f"# {canary('comment')}\n[Service]\nEnvironment=HF_TOKEN={canary('env')}\nNice=5\n")
    machine.path("/etc/atoll/credentials/other").write_text(canary("credential"))
    config = machine.path("/etc/atoll/atoll.toml")
    text = config.read_text()
    config.write_text(f"# {canary('toml-comment')}\n{text}\n[site]\npassword = \"{canary('toml')}\"\n")
    said = [f"ValueError: {canary('exception')}", f"a library prints {canary('library')}",
            json.dumps({"logger": "x", "level": "info", "message": canary("json"), "prompt": canary("field")})]
    machine.path("/etc/atoll/said.txt").write_text("\n".join(said) + "\n")
    speaks = machine.path("/etc/systemd/system/atoll-verify.service.d/speaks.conf")
    speaks.parent.mkdir(exist_ok=True)
    speaks.write_text("[Service]\nExecStartPre=/bin/cat /etc/atoll/said.txt\n")
    machine.run("systemctl daemon-reload && systemctl start atoll-verify", timeout=180).check()
    assert "CANARY" in server.atoll("logs --raw -n 1000").out  # the journal is full of them
    done = server.atoll("support-bundle --out /root/support.tar.gz").check()
    assert "CANARY" not in done.out
    path = machine.path("/root/support.tar.gz")
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as tar:
        members = {m.name.partition("/")[2]: (tar.extractfile(m) or io.BytesIO()).read().decode() for m in tar}
    everything = "\n".join([*members, *members.values()])
    assert "CANARY" not in everything
    assert server.key not in everything
    assert "PRIVATE KEY" not in everything
    assert "POST /v1/chat/completions" in members["log.txt"]
    assert "Memory plan" in members["memory-plan.txt"]
    assert "PrivateNetwork=yes" in members["units/atoll-engine@.service"]
    assert members["units/atoll-gateway.service.d-site.conf"] == "[Service]\nEnvironment=<not shown>\nNice=5\n"
    config.write_text(text)


def test_a_failed_unit_is_named_with_its_log(server: Server) -> None:
    machine = server.machine
    machine.run("systemctl stop atoll-engine@tiny").check()
    facts = server.json("status", 40)
    assert facts["state"] != "serving"
    machine.path("/etc/systemd/system/atoll-engine@tiny.service.d").mkdir(exist_ok=True)
    machine.path("/etc/systemd/system/atoll-engine@tiny.service.d/bad.conf").write_text(
        "[Service]\nExecStart=\nExecStart=/bin/sh -c 'exit 11'\n")
    machine.run("systemctl daemon-reload").check()
    machine.run("systemctl start atoll-engine@tiny")
    when(lambda: machine.run("systemctl is-failed atoll-engine@tiny").code == 0, 30, "the unit to fail")
    facts = server.json("status", 40)
    (problem,) = [p for p in facts["problems"] if "atoll-engine@tiny" in p["what"]]
    assert "exit status 11" in problem["what"]
    assert problem["next"] == "atoll logs --unit engine@tiny"
