"""The alert rules and the Grafana dashboard of docs/monitoring, in a real Prometheus that scrapes a live service.

`make test-prometheus` fetches Debian's package. What needs no Prometheus is tested everywhere.
"""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from gateways import RunningServer, keys_of
from ports import listening_port
from prometheus_client.parser import text_string_to_metric_families

from engine.server.http.limits import Limits
from engine.server.ipc.client import EngineClient
from engine.server.openai.serving import ServedModel

MONITORING = Path(__file__).resolve().parents[4] / "docs/monitoring"
RULES = MONITORING / "atoll-alerts.yml"
_NAME = re.compile(r"\b((?:vllm|atoll):\w+|http_requests\w*)")
# Ratios and quantiles of what does not happen in this test have no value.
_SILENT = {"Prompt tokens from the prefix cache"}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return json.loads((MONITORING / "grafana-dashboard.json").read_text())["panels"]


@pytest.fixture
def server(tiny_engine: tuple[Path, Path], tmp_path: Path) -> Iterator[RunningServer]:
    engine, directory = tiny_engine
    model = ServedModel.load("tiny", directory, EngineClient(engine))
    server = RunningServer({"tiny": model}, limits=Limits(), auth=keys_of(tmp_path / "keys", "alice"))
    server.wait_ready()
    yield server
    server.stop()


def complete(server: RunningServer) -> None:
    body = {"model": "tiny", "prompt": "abc" * 20, "max_tokens": 8, "ignore_eos": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, headers={"Authorization": "Bearer sk-alice"})
    assert reply.status_code == 200


def test_every_name_in_rules_and_dashboard_is_one_of_metrics(server: RunningServer) -> None:
    complete(server)
    page = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer sk-alice"}).text
    there = {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}
    texts = [rule["expr"] for rule in rules()]
    texts += [target["expr"] for panel in panels() for target in panel["targets"]]
    named = {name for text in texts for name in _NAME.findall(text)}
    assert len(named) > 15
    assert named <= there
    assert len({panel["id"] for panel in panels()}) == len(panels())
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "action"}


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of prometheus and promtool."""
    if not (folder := os.environ.get("ATOLL_PROMETHEUS")):
        pytest.skip("needs Prometheus: make test-prometheus")
    return Path(folder)


def test_promtool_accepts_rules_and_configuration(programs: Path, tmp_path: Path) -> None:
    shutil.copytree(MONITORING, tmp_path / "monitoring")
    for words in (["rules", str(RULES)], ["config", "--syntax-only", str(tmp_path / "monitoring/prometheus.yml")]):
        done = subprocess.run([str(programs / "promtool"), "check", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "alerts_test.yml").write_text(_cases())
    words = [str(programs / "promtool"), "test", "rules", str(tmp_path / "alerts_test.yml")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _cases() -> str:
    """Series over an hour, and which alerts fire at its end."""
    labels = 'instance="a",model_name="m"'

    def case(alert: str, fires: dict[str, str] | None, at: str, *series: tuple[str, str]) -> dict[str, Any]:
        expected = [{"exp_labels": fires}] if fires is not None else []
        return {"interval": "1m", "input_series": [{"series": name, "values": values} for name, values in series],
                "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": expected}]}

    model = {"instance": "a", "model_name": "m"}
    down = f"atoll:engine_up{{{labels}}}"
    lost = f"atoll:engine_restarts_total{{{labels}}}"
    served = 'http_requests_total{instance="a",handler="/v1/chat/completions",status="%s"}'
    tests = [
        case("AtollDown", {"severity": "critical", "instance": "a", "job": "atoll"}, "10m",
             ('up{job="atoll",instance="a"}', "1 1 0x20")),
        case("AtollEngineDown", {"severity": "critical", **model}, "10m", (down, "1 1 0x20")),
        case("AtollEngineDown", None, "10m", (down, "1 1 0 0 1x20")),
        case("AtollEngineRestarts", {"severity": "critical", **model}, "30m", (lost, "0 0 1 1 2 2x40")),
        case("AtollEngineRestarts", None, "30m", (lost, "0 0 1x40")),
        case("AtollErrors", {"severity": "critical", "instance": "a"}, "20m",
             (served % "2xx", "0+60x30"), (served % "5xx", "0+10x30")),
        case("AtollErrors", None, "20m", (served % "2xx", "0+600x30"), (served % "5xx", "0+10x30")),
    ]
    for test in tests:  # promtool compares annotations too
        (expectation,) = test["alert_rule_test"]
        rule = next(rule for rule in rules() if rule["alert"] == expectation["alertname"])
        for alert in expectation["exp_alerts"]:
            summary = rule["annotations"]["summary"]
            for name, value in {**model, "value": "2"}.items():
                summary = re.sub(rf"{{{{ \$(?:labels\.)?{name}(?: \| humanize)? }}}}", value, summary)
            alert["exp_annotations"] = {**rule["annotations"], "summary": summary}
    return yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests})


def test_a_real_prometheus_scrapes_a_live_service(programs: Path, server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-alice")
    shutil.copy(RULES, tmp_path)
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = config["scrape_configs"]
    job |= {"scheme": "http", "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}]}
    job["authorization"]["credentials_file"] = str(tmp_path / "key")
    del job["tls_config"]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    words = [str(programs / "prometheus"), f"--config.file={tmp_path}/prometheus.yml",
             f"--storage.tsdb.path={tmp_path}/data", "--web.listen-address=127.0.0.1:0"]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(words, stderr=log, cwd=tmp_path) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{listening_port(process)}/api/v1", timeout=10) as api:
                _judge(api, server)
        finally:
            process.terminate()


def _judge(api: httpx.Client, server: RunningServer) -> None:
    def query(text: str) -> list[Any]:
        reply = api.get("/query", params={"query": text})
        assert reply.status_code == 200, (text, reply.text)
        return reply.json()["data"]["result"]

    deadline = time.monotonic() + 60
    while True:  # traffic between scrapes, so that rates have values
        complete(server)
        try:
            if query("vllm:generation_tokens_total > 20") and query("count_over_time(up[1m]) > 5"):
                break
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.5)
    groups = api.get("/rules").json()["data"]["groups"]
    loaded = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
    assert loaded == {rule["alert"]: "ok" for rule in rules()}
    assert query('ALERTS{alertstate="firing"}') == [], "a healthy service"
    for panel in panels():
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "30s").replace("$instance", ".*").replace("$model", ".*")
            assert query(text) or panel["title"] in _SILENT, (panel["title"], text)
