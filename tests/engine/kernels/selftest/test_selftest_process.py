"""The self-test's parent: whatever its child does, it has the last word, in time."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.capabilities import nvidia_driver_present
from engine.kernels.runtime import warm_cache_hint
from engine.selftest import __main__, run
from engine.selftest.__main__ import supervise
from engine.selftest.report import Tally, as_text
from engine.selftest.stopwatch import PARTS, Stopwatch

REPOSITORY = Path(__file__).parents[4]
BEGIN = {"kind": "begin", "name": "decode"}
PASSED = {"kind": "check", "name": "norm", "passed": True, "error": 1e-3, "bound": 1e-2, "ms": 0.5}
END = {"kind": "end", "exit_code": 0, "passed": 1, "failed": [], "skipped": 0, "seconds": 1, "message": "Well.",
       "next": ""}  # fmt: skip


def watch(script: str, *lines: dict, limit: float = 60.0):
    """What the parent says of a child that prints `lines` and then runs `script`."""
    program = f"print({chr(10).join(map(json.dumps, lines))!r}, flush=True)\n" + script
    seen: list[dict] = []
    began = time.monotonic()
    code = supervise([sys.executable, "-c", program], Tally(seen.append), limit)
    assert time.monotonic() - began < 30
    return code, seen


def test_lines_pass_and_the_childs_code_counts():
    assert watch("", BEGIN, PASSED, END) == (0, [BEGIN, PASSED, END])
    code, seen = watch("print('a library says hello')", PASSED, END | {"exit_code": 2})
    assert code == 2
    assert len(seen) == 2


def test_a_child_that_hangs_is_ended_and_the_check_named():
    code, seen = watch("import time; time.sleep(600)", PASSED, BEGIN, limit=1.5)
    assert code == 1
    assert seen[-2]["name"] == "decode"
    assert seen[-2]["fault"] == "silent"
    assert seen[-2]["reason"] == "no answer within 2 s"
    assert "1 of 2 checks failed: decode gave no answer." in seen[-1]["message"]
    assert "nvidia-smi" in seen[-1]["next"]


def test_what_a_hanging_child_started_ends_with_it(tmp_path: Path):
    note = tmp_path / "pid"
    script = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(note)!r}, 'w').write(str(p.pid))\ntime.sleep(600)"
    )
    watch(script, BEGIN, limit=3)
    pid = int(note.read_text())
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    pytest.fail("the grandchild lived on")


@pytest.mark.parametrize(
    "script, reason",
    [
        ("import os; os.kill(os.getpid(), 11)", "its process was ended by SIGSEGV"),
        ("import sys; sys.exit(3)", "its process ended with exit code 3"),
        ("raise RuntimeError('no such thing')", "its process ended with exit code 1: RuntimeError: no such thing"),
    ],
)
def test_a_child_that_dies_is_a_failed_check(script: str, reason: str):
    code, seen = watch(script, BEGIN)
    assert code == 1
    assert seen[-2]["reason"] == reason
    assert seen[-1]["exit_code"] == 1


@pytest.mark.skipif(nvidia_driver_present(), reason="a GPU may be here")
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_without_a_gpu_it_says_so(form: list[str]):
    done = subprocess.run(
        [sys.executable, "-m", "engine.selftest", *form], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    if form:
        assert json.loads(last)["exit_code"] == 2
    else:
        assert "no NVIDIA driver" in done.stdout
        assert last.startswith("Next: ")


@pytest.mark.parametrize("driver", [True, False])
def test_compilers_begin_before_pytorch_unless_their_work_is_done(monkeypatch, tmp_path: Path, driver: bool):
    done: list[str] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["selftest", "--in-process"])
    monkeypatch.setattr(__main__, "nvidia_driver_present", lambda: driver)
    monkeypatch.setattr(__main__.compile_pool, "start_early", lambda: done.append("compilers"))
    monkeypatch.setattr(__main__.jobs, "give_early", lambda: done.append("jobs"))
    monkeypatch.setattr(__main__.importlib, "import_module", done.append)
    monkeypatch.setattr(run, "run", lambda tally, with_rates: 0 if with_rates else 1)
    assert __main__.main() == 0
    assert done == (["compilers", "jobs", "torch"] if driver else ["torch"])
    done.clear()
    warm_cache_hint.write("self-test")
    assert __main__.main() == 0
    assert done == ["torch"]


def test_lines_for_people():
    assert as_text(BEGIN) is None
    assert as_text(PASSED) == "  ok  norm                         error 1.0e-03 of 1e-02       0.50 ms"
    failed = PASSED | {"passed": False, "error": None, "bound": None, "reason": "it broke"}
    assert as_text(failed).split() == ["FAIL", "norm", "0.50", "ms", "it", "broke"]
    assert as_text(END | {"next": "Do it."}) == "\nWell.\nNext: Do it."


def test_the_clock_begins_with_the_process():
    """Not with the first line of Python that runs in it. (Of an old process, as this one may be, it is not known.)"""
    script = (
        "import time; time.sleep(1.2)\n"
        "from engine.selftest.stopwatch import process_began; print(time.monotonic() - process_began())"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert 1.2 <= float(done.stdout) <= time.monotonic() - began + 0.02  # the kernel counts in hundredths


def test_the_parts_of_the_time_are_all_of_it():
    watch = Stopwatch(time.monotonic() - 5)
    watch.lap("python")
    time.sleep(0.05)
    watch.lap("kernels")
    watch.lap("waiting")
    now = time.monotonic()
    assert watch.parts["python"] >= 5
    assert watch.parts["kernels"] >= 0.05
    assert sum(watch.parts.values()) <= now - watch.began
    seen: list[dict] = []
    Tally(seen.append, watch=watch).times()
    assert seen[0]["parts"].keys() == set(PARTS)
    assert seen[0]["value"].startswith(f"Python {watch.parts['python']:.1f} s, PyTorch 0.0 s, ")


def test_compilation_is_told_on_the_same_clock():
    watch, seen = Stopwatch(100.0), []
    watch.parts["waiting"] = 2.04
    tally = Tally(seen.append, watch=watch)
    tally.compiled({"jobs": 88, "ready": 103.5, "done": 107.25, "seconds": 36.1, "slowest": {"mixed": 3.1}})
    tally.compiled(None)
    assert seen[0]["work"] == {"jobs": 88, "ready": 3.5, "done": 7.25, "seconds": 36.1, "slowest": {"mixed": 3.1}}
    assert [line["number"] for line in seen] == [2.04, 2.04]
    assert "work" not in seen[1], "nothing had to be compiled"


@pytest.mark.skipif(nvidia_driver_present(), reason="a GPU may be here")
def test_the_child_counts_from_its_parents_start():
    command = [sys.executable, "-m", "engine.selftest", "--in-process", "--began", repr(time.monotonic() - 1000)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout.splitlines()[-1])["seconds"] > 1000
