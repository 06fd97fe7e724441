"""The whole checklist, unattended, on a prefix with the demonstration's model: every step, real processes and answers.

The front end is killed in every step; the job continues. Repeated elsewhere, the answers file of the run gives the
same.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from checklist_kit import REVIEW
from ports import free_port
from real_service import SMALL_LOAD, SMALL_MODEL, licence_answer, signed

from appliance.service.facts import engine_facts
from appliance.service.jobs import spool
from appliance.service.steps import STEPS
from installer.base.layout import Layout
from installer.operate.lifecycle import stop

# A verification of all groups, on a machine that others use too.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Server:
    """A prefix, and the commands of its operator."""

    root: Path
    environment: dict[str, str]

    @property
    def layout(self) -> Layout:
        return Layout.at(self.root / "prefix")

    @property
    def answers(self) -> Path:
        return self.root / "answers.toml"

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "appliance.cli", *words], text=True, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def atoll(self, *words: str, code: int = 0) -> str:
        with self.start(*words) as process:
            output = process.communicate(timeout=800)[0]
        assert process.returncode == code, output
        return output

    def steps(self) -> dict[str, str]:
        shown = json.loads(self.atoll("checklist", "show", "--json"))
        return {step["id"]: step["status"] for step in shown["steps"]}

    def jobs(self) -> list[dict[str, Any]]:
        return json.loads(self.atoll("jobs", "list", "--json"))["jobs"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path, signer: Any) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("whole")
    spool.remove(Layout.at(root / "prefix"))  # of an earlier run whose folder had this name
    bundle = signed(smollm2_dir, root, signer)
    (root / "tiny.toml").write_text(SMALL_LOAD)
    engine = engine_facts()
    profile = str(root / "tiny.toml")
    answers = {
        "schema_version": 1, "bundle": str(bundle), "trust_keys": [str(signer.public_path)], "device": "cpu",
        "port": free_port(), "confirm_plan": True, "waivers": SMALL_MODEL,
        "accept_licenses": [f"{engine.spdx}@{engine.licence_sha256}", licence_answer(bundle)],
        "review": {"smollm2-135m-instruct": REVIEW},
        "tune": {"profile": profile, "budget": "10m", "load_seconds": 2.0, "only": ["max-num-seqs"], "confirm": True,
                 "target": "ttft=20s"},
        "verify": {"profile": profile, "requests": 6, "soak_seconds": 3.0},
        "pilot": {"interval": 0.5, "signed_by": "Kim Minsu", "stages": [
            {"name": "everybody", "users": ["*"], "duration": 3.0, "stop": {"window": 2.0}, "goal": {"requests": 0}}]},
    }  # fmt: skip
    environment = {**os.environ, "ATOLL_PREFIX": str(root / "prefix"), "COLUMNS": "120", "ATOLL_LANG": "en"}
    (root / "answers.toml").write_text(tomlkit.dumps(answers))
    yield Server(root, environment)
    stop(Layout.at(root / "prefix"))


def test_a_front_that_is_killed_in_each_step_stops_nothing(server: Server) -> None:
    """Each front dies as soon as it shows the next step, and another one is attached to the same job."""
    words = ["checklist", "run", "--answers", str(server.answers)]
    for title in [str(step.title) for step in STEPS]:
        with server.start(*words) as process:
            assert process.stdout is not None
            seen: list[str] = []
            for line in process.stdout:
                seen.append(line)
                if line.strip() == title:
                    break
            else:
                pytest.fail("".join(seen))
            os.killpg(process.pid, signal.SIGKILL)
            process.stdout.read()
        words = ["jobs", "attach"]
    assert len(server.jobs()) == 1
    assert "ended successfully" in server.atoll("jobs", "watch")
    assert server.steps() == {step.id: "green" for step in STEPS}


def test_what_the_steps_have_left(server: Server) -> None:
    shown = json.loads(server.atoll("checklist", "show", "--json"))
    steps = {step["id"]: step for step in shown["steps"]}
    assert shown["done"] is True
    (tuned,) = steps["tune"]["summary"]["models"]
    assert tuned["target_met"] is True
    assert len(tuned["trials"]) >= 2
    assert tuned["after"]["goodput"] > 0
    assert steps["pilot"]["summary"]["signed"]["by"] == "Kim Minsu"
    reports = list((server.layout.checklist / "reports").glob("*.html"))
    assert reports
    assert json.loads(server.atoll("status", "--json"))["state"] == "serving"
    assert json.loads(server.atoll("audit", "verify", "--json"))["state"] in ("intact", "whole")


def test_the_answers_that_were_written_back_repeat_it(server: Server) -> None:
    written = server.answers.read_text()
    assert "confirm_plan = true" in written
    assert "[tune]" in written
    assert server.atoll("checklist", "export").count("accept_licenses") == 1
    output = json.loads(server.atoll("checklist", "run", "--answers", str(server.answers), "--json"))
    assert output["done"] is True


def test_settings_that_somebody_changed_lead_back_to_tuning(server: Server) -> None:
    config = server.layout.config
    before = config.read_text()
    lines = [line for line in before.splitlines() if not line.startswith("max-num-seqs")]
    config.write_text("\n".join([*lines, "max-num-seqs = 37", ""]))
    try:
        states = server.steps()
        assert states["install"] == "green"
        assert states["tune"] == "stale"
        assert set(list(states.values())[4:]) == {"stale"}
    finally:
        config.write_text(before)
    assert set(server.steps().values()) == {"green"}
