"""The checklist on a machine that boots: its front is killed in every step, the power is cut in the middle of a tuning,
a tuning is killed. The settings that had proved themselves come back each time, and the run comes to its end.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import tomlkit
from desk import NAME, Desk, facts
from machine import Machine, when
from vendor import MODEL, ensure_vendor

from appliance.service.facts import engine_facts
from appliance.service.steps import STEPS

pytestmark = pytest.mark.boot
NewMachine = Callable[..., Machine]
REVIEW = {
    "reviewer": "Kim", "expires": "2999-01-01", "lineage": "its maker's", "acceptable_use": "none",
    "commercial_terms": "none", "attribution": "none", "modifications": "none", "drafter": "there is none",
    "trademarks": "none", "export": "none", "redistribution": "not passed on",
}  # fmt: skip
PROFILE = """\
endpoint = "completions"
input = [8, 16]
output = [4, 6]
requests = 6
warmup = 1
[arrival]
clients = 2
"""
CONFIG, TUNINGS = "/etc/atoll/atoll.toml", "/var/lib/atoll/state/tuning.jsonl"
TITLES = [str(step.title) for step in STEPS]
ATTACH = "atoll jobs attach"
RUN = "atoll checklist run --answers /root/checklist.toml"
TUNE = "atoll tune --yes --fresh --profile /root/tiny.toml --budget 120s --load-seconds 3 --only max-num-batched-tokens"


def write_answers(desk: Desk) -> None:
    engine = engine_facts()
    answers = tomlkit.parse(desk.machine.path("/root/answers.toml").read_text()).unwrap()
    answers["accept_licenses"].append(f"{engine.spdx}@{engine.licence_sha256}")
    small = ("golden", "repetition", "quality-answers")
    answers |= {
        "medium": ["/media/atoll"], "review": {MODEL: REVIEW},
        "waivers": dict.fromkeys(small, "a small model for tests"),
        "tune": {"profile": "/root/tiny.toml", "budget": "120s", "load_seconds": 3.0, "confirm": True,
                 "only": ["max-num-seqs"], "target": "ttft=20s"},
        "verify": {"profile": "/root/tiny.toml", "requests": 6, "soak_seconds": 5.0},
        "pilot": {"interval": 0.5, "signed_by": "Kim Minsu", "stages": [
            {"name": "everybody", "users": ["*"], "duration": 5.0, "stop": {"window": 2.0}, "goal": {"requests": 0}}]},
    }  # fmt: skip
    desk.machine.path("/root/checklist.toml").write_text(tomlkit.dumps(answers))
    desk.machine.path("/root/tiny.toml").write_text(PROFILE)


def begun(path: Path) -> int:
    """Trials that were begun."""
    return path.read_text().count('"event": "began"') if path.exists() else 0


def lose_fronts(machine: Machine, command: str, titles: list[str]) -> str:
    """Start `command`; kill its front as soon as it shows the first title, attach another one until the next, and so
    on. What they had said."""
    said = ""
    for title in titles:
        front = machine.popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert front.stdout is not None
        for line in front.stdout:
            said += line
            if line.strip() == title:
                break
        else:
            pytest.fail(f"{title} was not shown: {said}")
        machine.kill_sessions(jobs=False)
        said += front.stdout.read()
        front.wait(30)
        command = ATTACH
    return said


def test_the_checklist_survives_its_front_its_job_and_the_power(new_machine: NewMachine) -> None:
    machine = new_machine("bookworm")
    machine.boot()
    desk = Desk(machine, ensure_vendor())
    desk.prepare()
    desk.plug(desk.vendor.first)
    desk.install().check()
    write_answers(desk)
    before, tunings = machine.path(CONFIG).read_text(), machine.path(TUNINGS)

    lose_fronts(machine, RUN, TITLES[:3])
    front = machine.popen(ATTACH, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    when(lambda: begun(tunings) >= 1, 240, "the first trial", 0.1)
    machine.kill_sessions(jobs=False)  # the front is gone; its job is a unit
    front.wait(30)
    when(lambda: begun(tunings) >= 2, 240, "the second trial", 0.1)
    when(lambda: machine.path(CONFIG).read_text() != before, 60, "its setting", 0.02)
    machine.power_cut()
    machine.boot(timeout=240)
    assert machine.path(CONFIG).read_text() == before
    desk.assert_serves(wait=90)
    status = desk.status()
    assert status["recovery"]["next"] == "atoll tune", status["recovery"]
    assert machine.run("systemctl --failed --no-legend").out == ""

    said = lose_fronts(machine, RUN, TITLES[3:])
    machine.run("atoll jobs watch", timeout=900).check()
    assert "Continuing the interrupted tuning" in said
    checklist = facts(desk.atoll("checklist show --json").check())
    assert {step["status"] for step in checklist["steps"]} == {"green"}, checklist
    pilot = checklist["steps"][-1]["summary"]
    assert pilot["signed"]["by"] == "Kim Minsu"
    assert (pilot["outcome"], list(pilot["stages"])) == ("done", ["everybody"])
    reports = machine.path("/var/lib/atoll-checklist/reports")
    assert {path.suffix for path in reports.glob("pilot-*")} >= {".html", ".json", ".md"}, list(reports.iterdir())
    desk.assert_serves()
    assert desk.status()["state"] == "serving", desk.trouble()

    # The job itself is killed, all of it: its unit brings the settings back.
    kept, trials = machine.path(CONFIG).read_text(), begun(tunings)
    front = machine.popen(TUNE, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    when(lambda: begun(tunings) >= trials + 2, 240, "the second trial", 0.1)
    when(lambda: machine.path(CONFIG).read_text() != kept, 60, "its setting", 0.02)
    machine.run("systemctl kill --signal=KILL 'atoll-job-tune*'").check()
    front.wait(60)
    when(lambda: machine.path(CONFIG).read_text() == kept, 120, "the settings from before", 0.2)
    when(lambda: desk.status()["state"] == "serving", 120, "the service", 1.0)
    desk.assert_serves(wait=60)
    assert machine.run("systemctl list-units --no-legend 'atoll-job-*'").out == ""
    assert json.loads(desk.atoll("audit verify --json").check().out)["state"] == "intact"
    assert machine.run(f"systemctl is-active atoll-engine@{NAME}").out == "active\n"
    assert desk.outbound() == []
