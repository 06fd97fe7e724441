"""`atoll doctor`: real without a GPU; a recorded self-test of an H100 otherwise."""

import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from appliance.cli import app as tree
from appliance.cli.common import spoken
from appliance.cli.operate import doctor as module
from engine.capabilities import nvidia_driver_present
from engine.message import msg, with_ids, without_ids
from engine.selftest import report
from engine.selftest.stopwatch import Stopwatch

FACTS = [
    {"kind": "fact", "name": "GPU", "value": "NVIDIA H100 80GB HBM3"},
    with_ids({"kind": "fact", "name": msg("free memory"), "number": 83966427136,
              "value": msg("{free} of {total} GiB", free="78.2", total="79.2")}),
    with_ids({"kind": "fact", "name": msg("time"), "value": Stopwatch().text(),
              "parts": {"python": 0.2, "torch": 2.3}}),
]
CHECKS = [
    {"kind": "begin", "name": "decode d128"},
    {"kind": "check", "name": "decode d128", "passed": True, "error": 0.0039, "bound": 0.01, "ms": 0.21},
    {"kind": "begin", "name": "quantise"},
    {"kind": "check", "name": "quantise", "passed": True, "skipped": True, "reason": "needs fp8"},
]
WRONG = [
    {"kind": "begin", "name": "norm"},
    {"kind": "check", "name": "norm", "passed": False, "error": 0.7, "bound": 0.01, "ms": 0.1, "fault": "wrong",
     "reason": ""},
    {"kind": "begin", "name": "gate"},
    {"kind": "check", "name": "gate", "passed": False, "error": None, "bound": None, "ms": 3.0, "fault": "error",
     "reason": "CompilationError: no [such] thing"},
]  # fmt: skip
GOOD_END = {
    "kind": "end", "exit_code": 0, "passed": 1, "failed": [], "skipped": 1, "seconds": 7.4,
    "message": "All 1 kernel checks passed in 7.4 s: this GPU is fit to serve.", "next": "",
}  # fmt: skip
BAD_END = with_ids({
    "kind": "end", "exit_code": 1, "passed": 1, "failed": ["norm", "gate"], "skipped": 1, "seconds": 7.4,
    "message": msg("{failed} of {total} checks failed: {names} could not be compiled or run.", failed=2, total=3,
                   names="gate"), "next": "Read the reasons above.",
})  # fmt: skip


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """``recorded(lines, then="")``: the self-test is a real child process that prints these lines, then runs code."""

    def record(lines: list[dict], then: str = "") -> None:
        script = tmp_path / "selftest.py"
        text = "".join(json.dumps(line) + "\n" for line in lines)
        script.write_text(f"import sys\nprint({text!r}, end='', flush=True)\n{then}\n")
        monkeypatch.setattr(module, "SELF_TEST", (sys.executable, str(script)))

    return record


def doctor(*arguments: str):
    return CliRunner().invoke(tree.app, ["doctor", *arguments])


def test_a_sound_gpu(recorded):
    recorded([*FACTS, *CHECKS, GOOD_END])
    result = doctor()
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["GPU", "NVIDIA", "H100", "80GB", "HBM3"] in lines
    assert ["ok", "decode", "d128", "error", "3.9e-03,", "allowed", "1e-02", "0.21", "ms"] in lines
    assert ["--", "quantise", "needs", "fp8"] in lines
    assert lines[-1][-3:] == ["fit", "to", "serve."]


def test_failed_checks_with_their_reasons_and_what_to_do(recorded):
    recorded([*FACTS, *CHECKS, *WRONG, BAD_END])
    result = doctor()
    assert result.exit_code == 1
    assert "FAIL  norm" in result.stdout
    assert "error 7.0e-01, allowed 1e-02" in result.stdout
    assert "CompilationError: no [such] thing" in result.stdout  # not read as markup
    assert result.stdout.splitlines()[-2:] == [BAD_END["message"], "Next: Read the reasons above."]


def test_json_is_one_object(recorded):
    recorded([*FACTS, *CHECKS, *WRONG, BAD_END])
    result = doctor("--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["ok"], found["exit_code"], found["next"]) == (False, 1, "Read the reasons above.")
    assert found["facts"] == {
        "GPU": "NVIDIA H100 80GB HBM3", "free memory": 83966427136, "time": {"python": 0.2, "torch": 2.3},
    }  # fmt: skip
    assert [check["name"] for check in found["checks"]] == ["decode d128", "quantise", "norm", "gate"]
    assert found["checks"][2]["fault"] == "wrong"


def test_lines_are_shown_as_they_come(recorded):
    recorded([*CHECKS], then="import time; time.sleep(2)\nprint('{\"kind\": \"end\", \"exit_code\": 0, \"message\": "
             "\"Well.\", \"next\": \"\"}')")  # fmt: skip
    arrived = [(line["kind"], time.monotonic()) for line in module._self_test(list(module.SELF_TEST))]
    assert arrived[-1][0] == "end"
    assert arrived[-1][1] - arrived[-2][1] > 1


def test_a_self_test_that_cannot_start(recorded):
    recorded([], then="sys.exit('No module named engine')")
    result = doctor()
    assert result.exit_code == 1
    assert "The self-test could not start: No module named engine" in result.stdout
    assert "install it again" in result.stdout


def test_the_time_limit_is_passed_on(recorded, tmp_path: Path):
    recorded([GOOD_END], then=f"open({str(tmp_path / 'argv')!r}, 'w').write(' '.join(sys.argv[1:]))")
    assert doctor("--time-limit", "7").exit_code == 0
    assert (tmp_path / "argv").read_text() == "--time-limit 7"


def test_on_a_terminal_it_names_the_running_check():
    screen = io.StringIO()
    view = module.View(Console(file=screen, force_terminal=True, width=100))
    view.see(CHECKS[0])
    time.sleep(0.3)
    view.see(CHECKS[1])
    view.end(GOOD_END)
    assert "decode d128 …" in screen.getvalue()
    assert "fit to serve" in screen.getvalue()


@pytest.mark.skipif(nvidia_driver_present(), reason="a GPU may be here")
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_without_a_gpu_for_real(form: list[str], tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "appliance.cli", "doctor", *form], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == ""
    if form:
        assert json.loads(done.stdout)["message"] == "There is no usable GPU here: no NVIDIA driver is loaded."
    else:
        assert done.stdout.splitlines()[-2] == "There is no usable GPU here: no NVIDIA driver is loaded."


def test_what_the_engine_says_is_known_in_korean(monkeypatch: pytest.MonkeyPatch):
    """The lines of a real tally, across the pipe."""
    monkeypatch.setenv("ATOLL_LANG", "ko")
    lines: list[dict] = []
    for faults, skipped in [({}, 0), ({}, 1), *(({"norm": fault}, 0) for fault in report._NEXT)]:
        tally = report.Tally(lines.append, passed=2, skipped=skipped, faults=dict(faults))
        tally.times()
        tally.end()
    for line in lines:
        arrived = without_ids(json.loads(json.dumps(with_ids(line))))
        assert arrived == line
        for name in {"message", "next", "value"} & line.keys():
            assert not line[name] or re.search("[가-힣]", spoken(arrived[name])), line


def test_in_korean(recorded, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ATOLL_LANG", "ko")
    recorded([*FACTS, *CHECKS, *WRONG, BAD_END])
    lines = doctor().stdout.splitlines()
    assert "      GPU                          NVIDIA H100 80GB HBM3" in lines
    assert "      메모리 여유                  79.2 GiB 가운데 78.2" in lines
    assert any(line.startswith("      시간                         Python 0.0초, PyTorch 0.0초, ") for line in lines)
    assert any(line.startswith("완료  decode d128                  오차 3.9e-03, 허용 1e-02") for line in lines)
    assert any(line.startswith("실패  norm") for line in lines)
    assert lines[-2] == "점검 3개 가운데 2개가 실패했습니다: gate을(를) 컴파일하거나 실행할 수 없습니다."
