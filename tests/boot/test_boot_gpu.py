"""The preflight on a booted machine that says it has an H100: `nvidia-smi` is a script there, all else is real.

The facts are those of a real H100. On a machine with a GPU the same command reads the real one (docs: proof.md).
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from desk import PORT, Desk, facts
from machine import Machine
from measures import Measures
from vendor import ensure_vendor

SCRIPTED = Path(__file__).resolve().parents[1] / "installer/nvidia_smi"
FROM_THE_SCRIPT = ("gpu", "nvml", "compute-capability", "vram", "gpu-health", "gpu-modes", "fabric-manager")
REALLY_MISSING = ("driver", "gpu-nodes")  # the medium carries the CPU's PyTorch, and there are no device nodes

NewMachine = Callable[..., Machine]


@pytest.fixture
def desk(new_machine: NewMachine) -> Desk:
    machine = new_machine("bookworm")
    home = machine.path("/opt/nvidia")
    home.mkdir()
    shutil.copy2(SCRIPTED / "fake_nvidia_smi.py", home)
    shutil.copy2(SCRIPTED / "h100.xml", home / "report.xml")
    say(machine, {})
    program = machine.path("/usr/bin/nvidia-smi")
    program.write_text("#!/bin/sh\nexec /usr/bin/python3 -I /opt/nvidia/fake_nvidia_smi.py \"$@\"\n")
    program.chmod(0o755)
    machine.boot()
    desk = Desk(machine, ensure_vendor())
    desk.prepare()
    desk.plug(desk.vendor.first)
    return desk


def say(machine: Machine, plan: dict[str, object]) -> None:
    machine.path("/opt/nvidia/plan.json").write_text(json.dumps(plan))


def test_the_table_shows_an_h100_and_its_faults(desk: Desk, measure: Measures) -> None:
    # The preflight is a command of the code that is to be installed: the medium unpacks it; nobody confirms the plan.
    answers = desk.machine.path("/root/answers.toml")
    answers.write_text(answers.read_text().replace("confirm_plan = true", "confirm_plan = false"))
    desk.machine.run(desk.command(), timeout=300)
    code = next(desk.machine.path("/opt/atoll/code").glob("*/bin/atoll"))
    preflight = f"/{code.relative_to(desk.machine.root)} preflight --device cuda --port {PORT}"

    table = desk.machine.run(preflight)
    print(table.out)
    assert "H100" in table.out
    measure("preflight of a machine with an H100", table.seconds - table.waited, 10.0)
    checks = facts(desk.machine.run(f"{preflight} --json"))["checks"]
    verdicts = {check["id"]: check["status"] for check in checks}
    assert len(verdicts) >= 25
    assert {verdicts[name] for name in FROM_THE_SCRIPT} == {"pass"}, verdicts
    assert {verdicts[name] for name in REALLY_MISSING} == {"fail"}, verdicts

    korean = desk.machine.run(f"{preflight} --lang ko").out
    assert any("가" <= letter <= "힣" for letter in korean), korean

    say(desk.machine, {"fault": "mismatch"})
    wrong = desk.machine.run(preflight).check(3)
    assert "mismatch" in wrong.out
    say(desk.machine, {"fault": "hang"})
    hung = desk.machine.run(preflight).check(3)
    measure("preflight while nvidia-smi hangs", hung.seconds - hung.waited, 10.0)
    assert measure.broken("preflight") == []
