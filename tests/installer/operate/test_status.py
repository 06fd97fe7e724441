"""`atoll status`: healthy or not, what is wrong and the next command, and an honest word on what it could not see."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from installer_kit import Site

from appliance.cli.operate.status import rows
from installer.access import api_keys
from installer.base.journal import History
from installer.base.layout import Layout
from installer.operate.deep_verify.run import verify
from installer.operate.findings import Findings
from installer.operate.status import _from_units, _own_words, _tell_state, status
from installer.service import unit_state
from installer.service.manager import ServiceState
from installer.service.prefix import PrefixService
from installer.tls import certificates as x
from installer.tls import endpoint as tls_endpoint

Bundles = Callable[..., Path]


def problems(site: Site) -> list[str]:
    return [problem["what"] for problem in status(site.layout)["problems"]]


def atoll(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "appliance.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_healthy_installation_fits_on_one_screen_and_exits_with_0(site: Site, bundle: Bundles) -> None:
    site.install(bundle())
    shown = atoll("status", "--prefix", site.prefix)
    assert shown.returncode == 0, shown.stdout
    assert "SERVING" in shown.stdout
    assert shown.stdout.count("\n") <= 24
    facts = json.loads(atoll("status", "--prefix", site.prefix, "--json").stdout)
    assert (facts["state"], facts["healthy"], facts["problems"], facts["unseen"]) == ("serving", True, [], [])
    assert facts["last_verify"]["by"] == "install"
    assert [key["scopes"] for key in facts["keys"]] == [["serve", "metrics"]]


def test_the_screen_speaks_korean_and_json_does_not(
    site: Site, bundle: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install(bundle())
    api_keys.revoke(site.layout.api_keys, api_keys.people(site.layout.api_keys)[0]["id"])
    monkeypatch.setenv("LC_ALL", "ko_KR.UTF-8")
    shown = atoll("status", "--prefix", site.prefix).stdout
    assert "상태" in shown
    assert "사용할 수 있는 API 키가 없습니다" in shown
    assert "다음: atoll apikey new" in shown
    facts = json.loads(atoll("status", "--prefix", site.prefix, "--json").stdout)
    assert facts["problems"][0]["what"].startswith("No active API key")


def test_without_an_active_key_it_serves_nobody(site: Site, bundle: Bundles) -> None:
    site.install(bundle())
    (key,) = api_keys.people(site.layout.api_keys)
    assert atoll("apikey", "revoke", key["id"], "--prefix", site.prefix).returncode == 0
    shown = atoll("status", "--prefix", site.prefix)
    assert shown.returncode == 40
    assert "SERVING, with problems" in shown.stdout
    assert "next: atoll apikey new" in shown.stdout
    api_keys.add(site.layout.api_keys, "figures", scopes=("metrics",))
    assert any("No active API key" in what for what in problems(site))  # that one cannot ask anything
    api_keys.add(site.layout.api_keys, "team")
    assert problems(site) == []


def test_ends_that_are_near_are_warnings_and_do_not_make_it_sick(site: Site, bundle: Bundles) -> None:
    site.install(bundle())
    api_keys.add(site.layout.api_keys, "short", lifetime=3 * 86400 + 60)
    facts = status(site.layout)
    assert facts["healthy"]
    (problem,) = facts["problems"]
    assert problem["severity"] == "warning"
    assert "ends in 3 days" in problem["what"]


@pytest.mark.parametrize("age, severity, words", [(810, "warning", "ends in 1"), (830, "error", "expired")])
def test_the_certificates_end(site: Site, bundle: Bundles, age: int, severity: str, words: str) -> None:
    site.install(bundle())
    site.service.stop()
    layout = site.layout
    text = layout.config.read_text()
    settings = tls_endpoint.settings(layout)
    layout.config.write_text(text + "".join(f'{name} = "{value}"\n' for name, value in settings.items()))
    ca = x.make_ca(["localhost"], now=datetime.now(UTC) - timedelta(days=900))
    pair = x.issue(ca, ["localhost"], now=datetime.now(UTC) - timedelta(days=age))
    layout.tls.mkdir(exist_ok=True)
    layout.ca_cert.write_bytes(ca.chain_pem())
    layout.server_cert.write_bytes(pair.chain_pem())
    facts = status(layout)
    found = [p for p in facts["problems"] if "certificate" in p["what"].lower() and words in p["what"]]
    assert [p["severity"] for p in found] == [severity]
    assert found[0]["next"] == "atoll tls renew"
    layout.server_cert.unlink()
    assert any("is missing" in what for what in problems(site))


def test_what_a_verification_found_is_shown_until_the_next_one(site: Site, bundle: Bundles) -> None:
    result = site.install(bundle())
    weights = Path(result.model_dir) / "model.safetensors"
    good = weights.read_bytes()
    weights.chmod(0o644)
    weights.write_bytes(good[:-1] + b"\x07")
    weights.chmod(0o444)
    assert verify(site.layout).exit_code == 11
    facts = status(site.layout)
    assert not facts["healthy"]
    assert facts["last_verify"]["outcome"] == "bad"
    assert any("model.safetensors" in what for what in problems(site))
    weights.chmod(0o644)
    weights.write_bytes(good)
    weights.chmod(0o444)
    verify(site.layout)
    assert status(site.layout)["healthy"]


def test_a_verification_long_ago_is_a_warning(site: Site, bundle: Bundles) -> None:
    site.install(bundle())
    verify(site.layout)
    record = json.loads(site.layout.verify_state.read_text())
    record["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 40 * 86400))
    site.layout.verify_state.write_text(json.dumps(record))
    assert problems(site) == ["The last verification was 40 days ago."]


def test_plain_http_on_the_network_is_an_error(site: Site, bundle: Bundles) -> None:
    site.install(bundle())
    text = site.layout.config.read_text()
    site.layout.config.write_text(text.replace('"127.0.0.1"', '"0.0.0.0"'))
    assert any("plain HTTP" in what for what in problems(site))


def test_a_stopped_and_a_broken_service(site: Site, bundle: Bundles) -> None:
    site.install(bundle())
    site.service.stop()
    facts = status(site.layout)
    assert (facts["state"], facts["healthy"]) == ("stopped", False)
    shown = atoll("status", "--prefix", site.prefix)
    assert shown.returncode == 40
    site.layout.config.write_text("[serve\n")
    facts = status(site.layout)
    assert any("cannot be read" in problem["what"] for problem in facts["problems"])
    assert rows({**facts, "engines": {}})


def as_nobody(work: Callable[[], Any]) -> Any:
    """The JSON of what `work` returns when another user calls it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            answer = json.dumps(work())
        except BaseException as error:
            answer = json.dumps({"error": getattr(error, "message", repr(error)), "hint": getattr(error, "hint", "")})
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(answer)


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")
def test_another_user_sees_what_he_may_and_is_told_the_rest(site: Site, bundle: Bundles) -> None:
    site.install(bundle())
    verify(site.layout)
    for directory in (site.prefix, *site.prefix.parents):
        if not directory.stat().st_mode & 0o001:
            directory.chmod(directory.stat().st_mode | 0o011)
    status(site.layout)  # whatever is imported on the way, is
    facts = as_nobody(lambda: status(site.layout))
    assert facts["models"][0]["name"] == "tiny"
    assert set(facts["unseen"]) == {
        "the install journal", "the API keys", "the licences' approvals", "the audit log", "the last verification",
        "the service's process",
    }
    assert (facts["state"], facts["healthy"], facts["health"]["ok"]) == ("serving", True, True)
    assert facts["problems"] == []
    assert any(label == "not seen" and "sudo atoll status" in text for label, text in rows({**facts, "engines": {}}))
    from appliance.cli.secure.apikey import _layout

    denied = as_nobody(lambda: str(_layout(site.prefix)))
    assert "belong to another user" in denied["error"]
    assert "sudo" in denied["hint"]


# As `systemctl show` writes them.
SHOWN = """\
Id=atoll-gateway.service
LoadState=loaded
ActiveState=active
SubState=running
Result=success
MainPID=812
NRestarts=2
StatusText=serving chat
ExecMainStatus=0
ActiveEnterTimestampMonotonic=93000000
MemoryCurrent=211812352
UnitFileState=enabled

Id=atoll-engine@chat.service
LoadState=loaded
ActiveState=failed
SubState=failed
Result=exit-code
MainPID=0
NRestarts=4
StatusText=
ExecMainStatus=11
ActiveEnterTimestampMonotonic=0
MemoryCurrent=[not set]
UnitFileState=enabled

Id=atoll-verify.timer
LoadState=not-found
ActiveState=inactive
MemoryCurrent=18446744073709551615
"""


def test_units_as_systemd_tells_them() -> None:
    gateway, engine, timer = unit_state.parse(SHOWN)
    assert (gateway.active, gateway.pid, gateway.restarts, gateway.since) == ("active", 812, 2, 93.0)
    assert gateway.status == "serving chat"
    assert (engine.failed, engine.exit_status, engine.pid, engine.memory, engine.since) == (True, 11, None, None, None)
    assert (timer.active, timer.memory) == ("not-found", None)


def test_the_operator_sees_what_loads_although_health_names_no_model(site: Site, bundle: Bundles) -> None:
    """/health tells nobody without a key, and status has none; the log is its owner's."""
    site.install(bundle())
    site.service.stop()

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "Not ready."}}')

    class Up(PrefixService):
        def state(self) -> ServiceState:
            return ServiceState("running", os.getpid())

    lines = [{"logger": "atoll.serve", "level": "info", "message": "weights 1.20/4.30 GB"},
             {"logger": "atoll.access", "level": "info", "message": "GET /v1/models"}]  # fmt: skip
    site.layout.log.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + "supervisor: a line of its own\n")
    with ThreadingHTTPServer(("127.0.0.1", site.port), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        facts = status(site.layout, service=Up(site.layout))
        server.shutdown()
    assert facts["health"] == {"ok": False, "said": "tiny: weights 1.20/4.30 GB"}
    assert [p["what"] for p in facts["problems"]] == ["The service runs but is not ready: tiny: weights 1.20/4.30 GB."]
    assert ("health", "bad: tiny: weights 1.20/4.30 GB") in rows({**facts, "engines": {}})


def test_on_a_server_the_units_say_what_loads() -> None:
    text = SHOWN.replace("serving chat", "chat weights 12.10/60.30 GB; tiny ready")
    units = unit_state.parse(text)
    assert _own_words(units) == "chat weights 12.10/60.30 GB; tiny ready"
    engine = SHOWN.replace("StatusText=\n", "StatusText=weights 12.10/60.30 GB\n").replace("active\nSub", "failed\nSub")
    assert _own_words(unit_state.parse(engine)) == "chat weights 12.10/60.30 GB"
    assert _own_words([]) == ""


def test_the_screen_of_a_server_names_the_failed_unit_and_its_log(tmp_path: Path) -> None:
    units = unit_state.parse(SHOWN)
    running: dict[str, Any] = _from_units(units)
    assert (running["phase"], running["up"], running["restarts"], running["last_exit"]) == ("failed", True, 6, 11)
    found = Findings()
    _tell_state(Layout.server(tmp_path), "failed", running, "", units, History([]), found)
    (problem,) = found.problems
    assert problem.what == "atoll-engine@chat.service has failed (exit-code, exit status 11)."
    assert problem.next == "atoll logs --unit engine@chat"
