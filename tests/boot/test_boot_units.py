"""The units under all of their hardening, on a machine that boots: two real models on the CPU behind one gateway.

The code is this checkout's, so that a change of a unit is tried in a minute; the whole way from a medium is in
test_boot_life.py.
"""

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from machine import Machine, MachineError, when
from questions import QUESTION
from tiny_llama import TINY_LLAMAS, save_tiny_llama

from appliance.series import Series, SeriesError
from appliance.series.names import UP, split
from installer.access import api_keys
from installer.base.layout import Layout
from installer.service import units
from installer.tls import endpoint as tls_endpoint

pytestmark = pytest.mark.incremental

REPOSITORY = Path(__file__).resolve().parents[2]
ROOMS = ("appliance", "engine", "installer", "offline_bundle", "systemd", "tui")
WATCHDOG = 8
URL = "https://localhost:8443"
START = """#!/bin/sh
export PYTHONPATH=/opt/atoll/current/lib
exec /usr/bin/python3 -s -P -m appliance.cli "$@"
"""
SERVICE = """PYTHONPATH=/opt/atoll/current/lib python3 -c '
from installer.base.layout import Layout
from installer.service.systemd import SystemdService
s = SystemdService(Layout.server())
%s'"""


# Runs as a unit's ExecStartPre=, so under exactly its sandbox and user. One line of JSON, in the journal.
PROBE = """
import json, mmap, os, socket
def kernel_cache():
    from engine.kernels.runtime.cache_dir import use_cache_dir
    return str(use_cache_dir())
def foreign(pid):
    return pid.isdigit() and os.stat("/proc/" + pid).st_uid != os.getuid()
def refused(act, *given):
    try:
        act(*given)
    except OSError as error:
        return error.strerror
    return ""
print("PROBE " + json.dumps({
    "cache": kernel_cache() if "ENGINE" in os.environ else "",
    "interfaces": [name for _, name in socket.if_nameindex()] if "ENGINE" in os.environ else [],
    "inet": refused(socket.socket, socket.AF_INET),
    "packet": refused(socket.socket, socket.AF_PACKET, socket.SOCK_RAW),
    "writable code": refused(lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)),
    "home": refused(os.listdir, "/home") or os.listdir("/home"),
    "nice": refused(os.nice, -5),
    "others": sum(map(foreign, os.listdir("/proc"))),
}))
"""


class Server:
    """A machine with the units of two models, and the key that its clients have."""

    def __init__(self, machine: Machine, key: api_keys.NewKey) -> None:
        self.machine, self.key = machine, key
        self.revocable = api_keys.add(self.layout.api_keys, "to be revoked")

    @property
    def layout(self) -> Layout:
        return Layout.server(self.machine.root)

    def curl(self, path: str, body: dict | None = None, *, key: str | None = None) -> tuple[int, dict]:
        """(status, answer) of a call over TLS, checked against the server's own authority."""
        words = ["curl", "-sS", "-m", "60", "--cacert", str(self.layout.ca_cert), "-w", "\n%{http_code}",
                 "-H", f"Authorization: Bearer {key or self.key.text}", f"{URL}{path}"]  # fmt: skip
        if body is not None:
            words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        done = self.machine.beside(words)
        text, _, status = done.stdout.rpartition("\n")
        if done.returncode:
            return 0, {"curl": done.stderr}
        return int(status), json.loads(text) if text else {}

    def chat(self, model: str, key: str | None = None) -> tuple[int, dict]:
        message = {"role": "user", "content": QUESTION}
        body = {"model": model, "messages": [message], "max_tokens": 12, "temperature": 0}
        return self.curl("/v1/chat/completions", body, key=key)

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
        shutil.copytree(smollm2_dir, layout.models / "chat/model")
        (layout.models / "tiny/model").mkdir(parents=True)
        save_tiny_llama(layout.models / "tiny/model", seed=0, **TINY_LLAMAS["gqa"])
        for path in layout.models.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o444)
        layout.config.write_text(
            '[gateway]\nhost = "0.0.0.0"\nport = 8443\n[engine]\ndevice = "cpu"\nkv-cache-memory-bytes = "64M"\n'
            '[models.chat]\nmodel = "/var/lib/atoll/models/chat/model"\nmax-model-len = 1024\n'
            '[models.tiny]\nmodel = "/var/lib/atoll/models/tiny/model"\nserved-model-name = ["tiny", "klein"]\n')
        tls_endpoint.ensure(layout, ["localhost", "127.0.0.1"])
        key = api_keys.add(layout.api_keys, "test")
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
    try:
        when(lambda: server.healthy(model), seconds, f"{model} to serve")
    except MachineError:
        print(server.machine.run("systemctl status --no-pager -l 'atoll*'").out, server.machine.journal("-u 'atoll*'"))
        raise


def test_the_services_start_under_their_hardening(server: Server):
    server.machine.run(SERVICE % 's.apply_units(["chat", "tiny"])\ns.start()').check()
    wait_healthy(server, "chat")
    wait_healthy(server, "tiny")
    assert server.curl("/health")[0] == 200
    status, answer = server.chat("chat")
    assert status == 200, answer
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert server.chat("klein")[0] == 200
    assert [card["id"] for card in server.curl("/v1/models")[1]["data"]] == ["chat", "tiny", "klein"]
    assert server.chat("chat", key="sk-wrong")[0] == 401
    assert server.show("atoll-engine@chat", "StatusText") == "serving chat, 1024 tokens of context"
    when(lambda: server.show("atoll-gateway", "StatusText") == "chat ready; tiny ready", 20, "the gateway's status")
    said = server.machine.journal("-u atoll-engine@chat -u atoll-gateway")
    assert "loading weights" in said


def test_two_engines_share_one_limit_of_memory(server: Server):
    for model in ("chat", "tiny"):
        assert server.show(f"atoll-engine@{model}", "Slice") == "atoll-engines.slice"
        assert server.show(f"atoll-engine@{model}", "MemoryMax") == "infinity"
    total = int(re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1]) * 1024  # type: ignore[index]
    assert int(server.show("atoll-engines.slice", "MemoryMax")) == pytest.approx(0.9 * total, rel=0.02)


def test_the_sampler_keeps_the_history_of_both_models(server: Server):
    machine, file = server.machine, server.layout.series / "series.db"

    def seen() -> set[str]:
        with contextlib.suppress(SeriesError), Series(file) as series:
            rows = series.window(0, time.time() + 3600).rows
            if rows and rows[-1].values.get(UP) == 1.0:
                return {split(name)[1].get("model_name", "") for name in rows[-1].values}
        return set()

    when(lambda: {"chat", "tiny"} <= seen(), 60, "samples of both models")
    pid = server.show("atoll-sampler", "MainPID")
    inside = f"nsenter -t {pid} -m -n setpriv --reuid atoll-sampler --regid atoll-api --clear-groups"
    assert machine.run(f"{inside} ip -o link").out.count("\n") == 1  # lo
    for words in ("touch /etc/atoll/x", "cat /etc/atoll/credentials/api-keys.json", "ls /var/lib/atoll/state",
                  "ls /run/atoll/engine/chat", "ls /var/lib/atoll/models/chat", "touch /opt/atoll/x",
                  "touch /run/atoll/gateway/x"):  # fmt: skip
        assert machine.run(f"{inside} {words}").code, words
    rights = machine.run("cd /run/atoll/gateway && stat -c '%a %U %G' /var/lib/atoll/series . metrics.sock admin.sock")
    assert rights.out == ("700 atoll-sampler atoll-api\n750 atoll-gateway atoll-api\n"
                          "660 atoll-gateway atoll-api\n600 atoll-gateway atoll-api\n")  # fmt: skip
    top = machine.run("/opt/atoll/current/bin/atoll top --json").check()
    assert json.loads(top.out)["active_total"] == 0, "root sees active requests"
    status = machine.run(f"cat /proc/{pid}/status").out
    assert "CapBnd:\t0000000000000000" in status
    assert "Seccomp:\t2" in status
    machine.run("systemctl restart atoll-gateway").check()  # the socket is another one then
    wait_healthy(server, "tiny", 20)
    since = time.time()
    when(lambda: _last_up(file) > since, 60, "a sample of the new gateway")


def _last_up(file: Path) -> float:
    with contextlib.suppress(SeriesError), Series(file) as series:
        return max((row.at for row in series.latest(120).rows if row.values.get(UP) == 1.0), default=0.0)
    return 0.0


def test_the_verbs_of_the_installer_see_it(server: Server):
    told = server.machine.run(SERVICE % (
        'import json\nstate = s.state()\n'
        'print(json.dumps([state.phase, state.restarts, s.is_ready("tiny"), sorted(s.instance_states()), '
        'sorted(s.pids()), s.log_tail(3), state.release]))')).check().json
    phase, restarts, ready, parts, pids, log, release = told
    assert (phase, restarts, ready, parts, release) == ("running", 0, True, ["chat", "gateway", "tiny"], "test")
    assert {1, server.pid("chat"), server.pid("tiny")} <= set(pids)
    assert len(log) == 3


def test_the_sandbox_holds(server: Server):
    """Seen from inside the services' own namespaces, with the rights of their users."""
    machine = server.machine
    for unit, user in (("atoll-engine@chat", "atoll-engine"), ("atoll-gateway", "atoll-gateway")):
        pid = server.show(unit, "MainPID")
        inside = f"nsenter -t {pid} -m -n setpriv --reuid {user} --regid atoll-api --clear-groups"
        assert machine.run(f"{inside} ip -o link").out.count("\n") == 1, unit  # lo
        for words in ("touch /var/lib/atoll/models/x", "touch /etc/atoll/x", "cat /etc/atoll/credentials/api-keys.json",
                      "ls /var/lib/atoll/state", "touch /opt/atoll/x", "touch /run/atoll/x"):  # fmt: skip
            assert machine.run(f"{inside} {words}").code, f"{unit}: {words}"
        status = machine.run(f"cat /proc/{pid}/status").out
        assert "NoNewPrivs:\t1" in status
        assert "CapBnd:\t0000000000000000" in status
        assert "Seccomp:\t2" in status
    rights = machine.run("stat -c '%a %U %G' /run/atoll/engine/chat /run/atoll/engine/chat/engine.sock").out
    assert rights == "750 atoll-engine atoll-api\n660 atoll-engine atoll-api\n"
    neighbour = f"nsenter -t {server.pid('tiny')} -m setpriv --reuid atoll-engine --regid atoll-api --clear-groups"
    assert machine.run(f"{neighbour} ls /run/atoll/engine").check().out == "tiny\n"
    # Nobody else may talk to an engine: neither by the directory's rights, nor, root aside, by the kernel's word.
    assert machine.run("setpriv --reuid nobody --regid nogroup --clear-groups ls /run/atoll/engine/chat").code
    assert not machine.connects.outbound()


def probe(server: Server, unit: str) -> dict:
    """What the probe finds in this unit's sandbox; the unit runs on, anew."""
    drop_in = server.layout.units / f"{unit}.service.d/probe.conf"
    drop_in.parent.mkdir()
    script = server.layout.current / "probe.py"
    script.write_text(PROBE)
    given = f"PYTHONPATH=/opt/atoll/current/lib {'ENGINE=1' if 'engine' in unit else ''}"
    start = f"/usr/bin/env {given} /usr/bin/python3 /opt/atoll/current/probe.py"
    drop_in.write_text(f"[Service]\nExecStartPre={start}\n")
    server.machine.run(f"systemctl daemon-reload; systemctl restart {unit}").check()
    shutil.rmtree(drop_in.parent)
    server.machine.run("systemctl daemon-reload").check()
    lines = when(lambda: [line for line in server.machine.journal(f"-u {unit} -o cat").splitlines()
                          if line.startswith("PROBE ")], 20, "the probe's line")  # fmt: skip
    return json.loads(lines[-1].removeprefix("PROBE "))


def test_the_sandbox_seen_from_the_inside(server: Server):
    engine, gateway = probe(server, "atoll-engine@tiny"), probe(server, "atoll-gateway")
    assert engine["cache"] == "/var/cache/atoll/engine/tiny/triton"  # private enough for compiled kernels
    assert engine["interfaces"] == ["lo"]
    assert gateway["inet"] == "Address family not supported by protocol"
    assert engine["writable code"] == ""
    for found in (engine, gateway):
        assert found["packet"]
        assert found["nice"]
        assert found["home"] in ([], "Permission denied")
        assert found["others"] == 0
    assert gateway["writable code"]
    wait_healthy(server, "tiny")


def test_the_port_stays_open_while_the_gateway_restarts(server: Server):
    machine = server.machine
    before = server.show("atoll-gateway", "MainPID")
    restart = machine.popen("systemctl restart atoll-gateway")
    answers = []
    while restart.poll() is None:
        answers.append(server.curl("/livez"))
    assert restart.returncode == 0
    assert server.show("atoll-gateway", "MainPID") != before
    assert {status for status, _ in answers} == {200}, answers
    wait_healthy(server, "chat", 20)
    assert server.show("atoll-engine@chat", "NRestarts") == "0"


def test_a_revoked_key_ends_at_a_reload_and_stays_so(server: Server):
    machine, revoked = server.machine, server.revocable
    pid = server.show("atoll-gateway", "MainPID")
    assert server.chat("tiny", key=revoked.text)[0] == 200
    api_keys.remove(server.layout.api_keys, {revoked.id})
    machine.run("systemctl reload atoll-gateway").check()
    assert server.chat("tiny", key=revoked.text)[0] == 401
    assert server.chat("tiny")[0] == 200
    assert server.show("atoll-gateway", "MainPID") == pid
    listing = machine.run("stat -c '%a %U' /run/atoll/credentials /run/atoll/credentials/*").out.split("\n")
    assert listing[:3] == ["711 root", "400 atoll-gateway", "400 atoll-gateway"]
    late = api_keys.add(server.layout.api_keys, "late")
    machine.run("systemctl reload atoll-gateway").check()
    assert server.chat("tiny", key=late.text)[0] == 200
    api_keys.remove(server.layout.api_keys, {late.id})  # … and a restart, not a reload, must forget it as well
    machine.run("systemctl restart atoll-gateway").check()
    wait_healthy(server, "tiny", 20)
    assert server.chat("tiny", key=late.text)[0] == 401


def test_a_new_certificate_is_shown_after_a_reload(server: Server):
    def shown() -> str:
        done = server.machine.beside(["sh", "-c", "openssl s_client -connect localhost:8443 </dev/null 2>/dev/null | "
                                      "openssl x509 -noout -fingerprint -sha256"])  # fmt: skip
        return done.stdout

    before = shown()
    assert "ingerprint" in before
    server.layout.server_key.unlink()
    tls_endpoint.ensure(server.layout, ["localhost", "127.0.0.1", "atoll-test"])
    server.machine.run("systemctl reload atoll-gateway").check()
    when(lambda: shown() not in ("", before), 10, "the new certificate")
    assert server.curl("/livez")[0] == 200


def test_it_serves_across_a_daemon_reload(server: Server):
    pid = server.pid("chat")
    server.machine.run("systemctl daemon-reload").check()
    assert server.chat("chat")[0] == 200
    assert server.pid("chat") == pid


def test_an_engine_takes_over_from_another_while_that_one_serves(server: Server):
    """`systemctl reload`: a new process under the same sandbox, with the settings of now, that systemd knows."""
    machine, pid = server.machine, server.pid("tiny")
    began = time.monotonic()
    reload = machine.popen("systemctl reload atoll-engine@tiny", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    answered = 0
    while server.pid("tiny") == pid:
        assert reload.poll() is None, reload.stdout and reload.stdout.read()
        answered += server.chat("tiny")[0] == 200
    assert answered, f"the old one answered nobody in {time.monotonic() - began:.1f} s"
    assert reload.wait(60) == 0
    new = server.pid("tiny")
    assert machine.run(f"ls -d /proc/{pid}").code, "the old one is gone"
    assert server.show("atoll-engine@tiny", "ActiveState") == "active"
    assert server.show("atoll-engine@tiny", "StatusText").startswith("serving tiny")
    wait_healthy(server, "tiny", 20)
    assert server.chat("tiny")[0] == 200
    status = machine.run(f"cat /proc/{new}/status").out
    assert "Seccomp:\t2" in status
    assert "CapBnd:\t0000000000000000" in status
    assert "PPid:\t1\n" in status, "systemd hears of its end"
    time.sleep(2 * WATCHDOG)  # and it feeds the watchdog
    assert server.pid("tiny") == new
    # systemd accepts messages from the new main process only; the old one may ping its watchdog until it is stopped.
    spoke = re.findall(r"Got notification message from PID (\d+)", machine.journal("-u atoll-engine@tiny"))
    assert set(spoke) <= {str(pid)}, "somebody spoke out of turn"


def test_settings_that_cannot_serve_do_not_end_what_serves(server: Server):
    machine, config = server.machine, server.layout.config
    pids = {name: server.pid(name) for name in ("chat", "tiny")}
    good = config.read_text()
    serving = machine.run(SERVICE % "import json\nprint(json.dumps(s.serving()))").check().json
    assert serving.keys() == {"chat", "tiny", "gateway"}
    config.write_text(good.replace('served-model-name', 'no-such-flag = 1\nserved-model-name'))
    assert machine.run("systemctl reload atoll-engine@tiny").code
    assert {name: server.pid(name) for name in pids} == pids
    assert server.chat("tiny")[0] == 200
    assert "no-such-flag" in machine.journal("-u atoll-engine@tiny")
    # The installer's switch of several: what cannot be prepared ends the successor of the other as well.
    told = machine.run(SERVICE % (
        'import json\nfrom installer.base.errors import InstallError\n'
        'try:\n    s.switch(["chat", "tiny", "gateway"], 60)\n'
        'except InstallError as error:\n    print(json.dumps([error.exit_code, error.message, s.serving()]))')).json
    config.write_text(good)
    assert told[:2] == [40, "The new atoll-engine@tiny.service could not prepare to take over."]
    if server.pid("chat") == pids["chat"]:  # its successor was not ready sooner than the other's failed
        assert told[2] == serving
        when(lambda: engines(server, "chat") == 1, 60, "the end of the other successor")
    assert server.pid("tiny") == pids["tiny"]
    assert server.chat("tiny")[0] == 200
    wait_healthy(server, "chat", 60)


def engines(server: Server, model: str) -> int:
    """Processes that are an engine of this model, or want to be."""
    return int(server.machine.run(f"pgrep -fc '[e]ngine --model {model}'").out)


def test_a_successor_that_takes_too_long_never_takes_over(server: Server):
    """Nobody is prepared in so short a time: it is ended, and what served is known to serve on."""
    machine, pid = server.machine, server.pid("chat")
    before, after = machine.run(SERVICE % (
        'import json, time\nfrom installer.base.errors import InstallError\nbefore = s.serving()\ntry:\n'
        '    s._take_over({"chat"}, 0.05)\nexcept InstallError:\n    print(json.dumps([before, s.serving()]))')).json
    assert before == after
    when(lambda: engines(server, "chat") == 1, 60, "its end")
    assert server.pid("chat") == pid
    assert server.show("atoll-engine@chat", "ActiveState") == "active"
    assert server.chat("chat")[0] == 200


def test_a_killed_engine_comes_back_and_its_neighbour_serves_on(server: Server):
    machine, pid = server.machine, server.pid("tiny")
    gateway = server.show("atoll-gateway", "MainPID")
    machine.run(f"kill -KILL {pid}").check()
    _, answer = when(lambda: (r := server.chat("tiny"))[0] == 503 and r, 10, "the 503 of a dead engine")
    assert answer["error"]["code"] == "engine_unavailable"
    head = machine.beside(["curl", "-si", "--cacert", str(server.layout.ca_cert), f"{URL}/health?model=tiny"]).stdout
    assert "retry-after:" in head
    assert server.chat("chat")[0] == 200
    wait_healthy(server, "tiny")
    assert server.chat("tiny")[0] == 200
    assert server.pid("tiny") != pid
    assert server.show("atoll-engine@tiny", "NRestarts") == "1"
    assert server.show("atoll-gateway", "MainPID") == gateway


def test_a_model_and_a_replica_come_and_go_while_the_gateway_serves(server: Server):
    """The steps of `atoll models add` and `remove`; the gateway reads the new settings under its sandbox."""
    machine, layout = server.machine, server.layout
    gateway, chat = server.show("atoll-gateway", "MainPID"), server.pid("chat")
    before = layout.config.read_text()
    shutil.copytree(layout.models / "tiny", layout.models / "third")
    layout.config.write_text(before + '[models.tiny-b]\nreplica-of = "tiny"\n'
                                      '[models.third]\nmodel = "/var/lib/atoll/models/third/model"\n')
    change = "s.apply_units(%r)\ns.start()\nassert s.reload_models(30)"
    machine.run(SERVICE % (change % (["chat", "third", "tiny", "tiny-b"],)).replace("'", '"')).check()
    wait_healthy(server, "third")
    when(lambda: server.show("atoll-engine@tiny-b", "ActiveState") == "active", 90, "the replica")
    listed = {card["id"] for card in server.curl("/v1/models")[1]["data"]}
    assert listed == {"chat", "tiny", "klein", "third"}
    assert server.chat("third")[0] == 200

    machine.run("systemctl stop atoll-engine@tiny").check()
    when(lambda: server.chat("tiny")[0] == 200, 20, "an answer of the replica alone")
    machine.run("systemctl start atoll-engine@tiny").check()
    assert server.chat("chat")[0] == 200

    layout.config.write_text(before)
    gone = "assert s.reload_models(30)\ns.apply_units(%r)"
    machine.run(SERVICE % (gone % (["chat", "tiny"],)).replace("'", '"')).check()
    assert server.chat("third")[0] == 404
    assert server.show("atoll-engine@third", "ActiveState") == "inactive"
    assert server.show("atoll-engine@tiny-b", "ActiveState") == "inactive"
    wait_healthy(server, "tiny", 30)
    assert server.chat("tiny")[0] == 200
    assert (server.show("atoll-gateway", "MainPID"), server.pid("chat")) == (gateway, chat), "neither noticed"


def test_a_loop_that_hangs_is_restarted_by_the_watchdog(server: Server):
    machine, pid = server.machine, server.pid("tiny")
    time.sleep(2 * WATCHDOG)  # an idle engine feeds it
    assert server.pid("tiny") == pid
    machine.run(f"kill -STOP {pid}").check()
    when(lambda: server.pid("tiny") not in (0, pid), WATCHDOG + 30, "the watchdog")
    wait_healthy(server, "tiny")
    assert server.chat("tiny")[0] == 200
    for words in ("Watchdog timeout", "most recent call first"):  # and its stacks, so that somebody can find out why
        when(lambda words=words: words in machine.journal("-u atoll-engine@tiny"), 10, f"{words} in the journal")


def test_wrong_settings_and_damage_end_it_at_once_with_words(server: Server):
    machine, config = server.machine, server.layout.config
    good = config.read_text()
    config.write_text(good.replace('served-model-name', 'no-such-flag = 1\nserved-model-name'))
    machine.run("systemctl restart atoll-engine@tiny")
    assert server.show("atoll-engine@tiny", "ExecMainStatus") == "2"
    assert server.show("atoll-engine@tiny", "NRestarts") == "0"
    told = machine.run(SERVICE % "import json\nprint(json.dumps([s.state().phase, s.log_tail(20)]))").json
    assert told[0] == "failed"
    assert any("no-such-flag" in line for line in told[1])
    config.write_text(good)
    weights = server.layout.models / "tiny/model/model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    machine.run("systemctl restart atoll-engine@tiny")
    assert server.show("atoll-engine@tiny", "ExecMainStatus") == "11"
    assert server.show("atoll-engine@tiny", "SubState") == "failed"
    weights.write_bytes(data)
    assert server.chat("chat")[0] == 200
    machine.run(SERVICE % "s.start()").check()
    wait_healthy(server, "tiny")


def test_without_a_driver_no_gpu_engine_starts_and_one_hears_why(server: Server):
    """The units of a GPU server: the sandbox opens device classes that are not there, and gpu-ready guards them."""
    machine, layout = server.machine, server.layout
    assert units.write(units.render(layout, ["chat", "tiny"], host="0.0.0.0", watchdog=str(WATCHDOG)))
    drop_in = layout.units / "atoll-gpu-ready.service.d/short.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nExecStart=\nExecStart=/opt/atoll/current/bin/atoll gpu-ready --timeout 1\n")
    machine.run(SERVICE % 's.apply_units(["chat", "tiny"])\ns.stop(["tiny"])\ns.start()').check()
    when(lambda: server.show("atoll-gpu-ready", "ActiveState") == "failed", 30, "gpu-ready to give up")
    told = machine.run(SERVICE % "import json\nprint(json.dumps([s.state().phase, s.log_tail(30)]))").check().json
    assert told[0] == "failed"
    assert any("The NVIDIA driver is not loaded" in line for line in told[1])
    assert server.pid("tiny") == 0
    assert server.chat("chat")[0] == 200  # it ran before, and runs on
    drop_in.write_text("[Service]\nExecStart=\nExecStart=/bin/true\n")
    machine.run("systemctl daemon-reload").check()
    machine.run(SERVICE % "s.start()").check()
    wait_healthy(server, "tiny")  # device rules for classes that do not exist do no harm
    shutil.rmtree(drop_in.parent)
    units.write(units.render(layout, ["chat", "tiny"], host="0.0.0.0", gpu=False, watchdog=str(WATCHDOG)))
    units.remove([layout.units / units.GPU_READY, units.modules_load(layout)])
    machine.run(SERVICE % 's.stop()\ns.apply_units(["chat", "tiny"])').check()


def test_it_comes_back_after_a_reboot_and_leaves_in_order(server: Server):
    machine = server.machine
    machine.reboot()
    wait_healthy(server, "chat")
    assert server.chat("chat")[0] == 200
    assert not machine.connects.outbound()
    machine.run(SERVICE % "assert s.stop()\nassert not s.stop()\nassert s.state().phase == \"stopped\"").check()
    assert server.curl("/livez")[0] == 0
    machine.run(SERVICE % "s.remove_units()\nfrom installer.service import units\n"
                          "units.remove(units.owned_files(s.layout))\ns.reload()\ns.remove_users()").check()
    left = machine.run("for list in list-unit-files 'list-units --all'; do systemctl $list 'atoll*' --no-legend; done; "
                       "getent passwd atoll-engine atoll-gateway atoll-sampler; getent group atoll-api; "
                       "ls /run/atoll/engine").out
    assert left == ""


def test_each_systemd_reads_them_without_a_word(suite: str, new_machine: Callable[..., Machine]):
    """Their words are those of the oldest systemd that is supported; a newer one must not complain or judge harder."""
    machine = new_machine(suite)
    layout = Layout.server(machine.root)
    (layout.releases / "x/bin").mkdir(parents=True)
    (layout.releases / "x/bin/atoll").write_text("#!/bin/sh\n")
    (layout.releases / "x/bin/atoll").chmod(0o755)
    layout.current.symlink_to("releases/x")
    units.write(units.render(layout, ["chat"], host="0.0.0.0"))
    machine.boot()
    names = [*units.enabled(["chat"]), units.VERIFY, units.GPU_READY]
    verified = machine.run(f"systemd-analyze verify {' '.join(names)}").check()
    assert "atoll" not in verified.err + verified.out
    for name, most in (("atoll-engine@chat.service", 10), ("atoll-gateway.service", 15), ("atoll-sampler.service", 10)):
        machine.run(f"systemd-analyze security --no-pager --threshold={most} {name}").check()
