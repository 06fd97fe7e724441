"""The commands as a user types them, with the real engine and the real small model."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from real_service import signed

from installer.release.config import Endpoint
from installer.service.smoke_test import smoke_test
from offline_bundle.signing.keys import KeyPair

Atoll = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def atoll(tmp_path: Path) -> Iterator[Atoll]:
    """``atoll("install", …)`` runs the command; the default prefix is a fresh one, stopped at the end."""
    environment = {**os.environ, "ATOLL_PREFIX": str(tmp_path / "prefix"), "COLUMNS": "120"}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "appliance.cli", *map(str, arguments)],
            capture_output=True, text=True, timeout=120, env=environment, stdin=subprocess.DEVNULL,
        )

    yield run
    run("stop")


@pytest.fixture(scope="module")
def real_bundle(smollm2_dir: Path, signer: KeyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return signed(smollm2_dir, tmp_path_factory.mktemp("real"), signer)


def facts(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.stdout, result.stderr
    return json.loads(result.stdout)


def test_the_real_model_is_installed_answers_and_leaves(
    atoll: Atoll, real_bundle: Path, signer: KeyPair, free_port: Callable[[], int], tmp_path: Path
) -> None:
    port = free_port()
    common = ["install", "--bundle", real_bundle, "--trust-key", signer.public_path, "--port", port]
    refused = atoll(*common, "--yes-nothing-else")
    assert refused.returncode == 20
    assert not (tmp_path / "prefix").exists()
    answer = refused.stderr.split("--accept-license ")[1].split()[0]

    first = atoll(*common, "--accept-license", answer, "--yes-nothing-else", "--json")
    assert first.returncode == 0, first.stderr
    result = facts(first)
    assert result["outcome"] == "installed"
    assert result["smoke"]["tokens"] > 3
    assert result["smoke"]["tokens_per_s"] > 1
    key = result["api_key"]

    mine = smoke_test(Endpoint("127.0.0.1", port), result["model"], key, 60)
    assert mine.text == result["smoke"]["text"]  # greedy, so the same words with the operator's key
    shown = atoll("status", "--json")
    assert shown.returncode == 0
    state = facts(shown)
    assert (state["state"], state["health"]["ok"], state["problems"]) == ("serving", True, [])
    assert state["licences"][0]["spdx"] == "Apache-2.0"
    screen = atoll("status")
    assert "SERVING" in screen.stdout
    assert screen.stdout.count("\n") <= 24

    began = time.monotonic()
    again = facts(atoll(*common, "--json"))
    assert (again["outcome"], again["api_key"]) == ("already-installed", None)
    assert time.monotonic() - began < 10

    assert key not in atoll("logs", "-n", "1000").stdout
    assert atoll("stop").returncode == 0
    assert facts(atoll("status", "--json"))["state"] == "stopped"
    assert atoll("start", "--json").returncode == 0
    assert smoke_test(Endpoint("127.0.0.1", port), result["model"], key, 60).tokens > 3

    assert facts(atoll("restart", "--json"))["changed"] is True
    assert facts(atoll("journal", "check", "--json"))["damaged"] is False
    assert facts(atoll("journal", "repair", "--json"))["repaired"] is False
    nothing = atoll("rollback", "--yes")
    assert nothing.returncode == 2
    assert "no release to go back to" in nothing.stderr

    assert atoll("uninstall", "--purge").returncode == 2
    assert atoll("uninstall", "--purge", "--confirm", socket.gethostname()).returncode == 0
    assert not (tmp_path / "prefix").exists()


def test_the_checklist_unattended_with_the_real_model(
    atoll: Atoll, real_bundle: Path, signer: KeyPair, free_port: Callable[[], int], tmp_path: Path
) -> None:
    """From nothing to a service with one answers file, which then holds what was decided; a purge leaves nothing."""
    answers = tmp_path / "answers.toml"
    port = free_port()
    given = {
        "schema_version": 1, "bundle": str(real_bundle), "trust_keys": [str(signer.public_path)], "port": port,
        "confirm_plan": True,
        "review": {"smollm2-135m-instruct": {
            "reviewer": "Kim", "expires": "2999-01-01", "lineage": "one model", "modifications": "none",
            "drafter": "none there", "export": "none known",
        }},
        # tests/appliance/service/test_checklist_real.py runs these steps whole
        "tune": {"skip": "the model of a test"}, "verify": {"groups": ["health"]}, "pilot": {"skip": "no users here"},
    }  # fmt: skip
    answers.write_text("# ours\n" + tomlkit.dumps(given))
    texts: list[str] = []
    for _ in range(2):  # the engine's licence, then the model's: apart, even where both are one text
        refused = atoll("checklist", "run", "--answers", answers, "--json")
        if refused.returncode == 0:
            break
        assert refused.returncode == 20, refused.stderr
        texts.append(facts(refused)["next"].split('["')[1].split('"]')[0])
        written = tomlkit.parse(answers.read_text())
        written["accept_licenses"] = [*written.get("accept_licenses", []), texts[-1]]
        answers.write_text(tomlkit.dumps(written))
    done = atoll("checklist", "run", "--answers", answers, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert facts(done)["done"]
    assert answers.read_text().startswith("# ours\n")
    shown = facts(atoll("checklist", "show", "--json"))
    assert [step["status"] for step in shown["steps"]] == ["green"] * 6
    key = facts(done)["api_key"]
    assert smoke_test(Endpoint("127.0.0.1", port), "smollm2-135m-instruct", key, 60).tokens > 3
    assert atoll("uninstall", "--purge", "--confirm", socket.gethostname()).returncode == 0
    assert not (tmp_path / "prefix").exists()


def test_unattended_by_an_answers_file(
    atoll: Atoll, bundle: Callable[..., Path], signer: KeyPair, tmp_path: Path
) -> None:
    answers = tmp_path / "answers.toml"
    given = {
        "schema_version": 1, "bundle": str(bundle()), "trust_keys": [str(signer.public_path)], "port": 8123,
        "confirm_plan": True,
    }
    answers.write_text(tomlkit.dumps(given))
    refused = atoll("install", "--answers", answers, "--json")
    assert refused.returncode == 20
    assert facts(refused)["exit_code"] == 20
    dry = atoll("install", "--answers", answers, "--dry-run", "--json")
    assert dry.returncode == 0
    assert facts(dry)["plan"]["items"]
    answers.write_text(tomlkit.dumps({**given, "accept_everything": True}))
    wrong = atoll("install", "--answers", answers)
    assert wrong.returncode == 2
    assert "accept_everything is not known; did you mean accept_licenses?" in wrong.stderr
    assert not (tmp_path / "prefix").exists()


def test_what_is_wrong_is_said_with_its_exit_code(atoll: Atoll, tmp_path: Path) -> None:
    for arguments, code, word in [
        (["install"], 2, "--bundle"),
        (["install", "--bundle", tmp_path / "usb"], 13, "mount"),
        (["status"], 2, "no Atoll installation"),
        (["stop"], 2, "no Atoll installation"),
        (["uninstall", "--yes"], 2, "no Atoll installation"),
        (["logs"], 2, "no log"),
        (["preflight", "--waive", "port"], 2, "is not a waiver"),
        (["preflight", "--host", "192.0.2.9"], 3, "192.0.2.9"),
    ]:
        result = atoll(*arguments)
        assert result.returncode == code, (arguments, result.stderr)
        assert word in result.stderr
        assert "Traceback" not in result.stderr


def test_preflight_reports_every_check(atoll: Atoll, free_port: Callable[[], int]) -> None:
    port = free_port()
    result = atoll("preflight", "--port", port, "--json")
    checks = {check["id"]: check for check in facts(result)["checks"]}
    assert {"cpu", "glibc", "python", "memory", "disk", "filesystem", "port", "clock", "egress", "gpu"} <= checks.keys()
    assert result.returncode == 0
    for check in checks.values():
        assert check["status"] in ("pass", "warn", "fail")
        assert check["observed"]
        assert check["required"]
        assert check["why"]
    table = atoll("preflight", "--port", port)
    assert "filesystem" in table.stdout


def test_help_has_examples() -> None:
    from typer.testing import CliRunner

    from appliance.cli.app import app

    changing = ("install", "upgrade", "rollback", "uninstall", "start", "stop", "restart")
    commands = ("preflight", "status", "logs", *changing)
    for command in commands:
        text = CliRunner().invoke(app, [command, "--help"]).output
        assert "Examples" in text, command
        assert f"atoll {command}" in text
