"""What the self-test has compiled before it knows what it needs."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.kernels.runtime import compile_pool
from engine.selftest import jobs, nvml

ROOT = Path(__file__).parents[4]


def python(*words: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_list_is_what_the_checks_need():
    pytest.importorskip("triton")
    done = python("-m", "engine.selftest.jobs")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


LINES = """
from engine.kernels.runtime.compile_ahead import line_of, longest_first
from engine.selftest import jobs
for capability in jobs.GPUS:
    lines = [line_of(job, capability) for job in jobs._needed(capability)]
    assert jobs.lines_for(capability) == longest_first(lines), capability
    print(len(lines))
"""


def test_its_lines_are_those_of_the_jobs_that_are_waited_for():
    """Else they would be compiled twice."""
    pytest.importorskip("triton")
    done = python("-c", LINES)
    assert done.returncode == 0, done.stderr[-3000:]
    assert min(map(int, done.stdout.split())) > 50


def test_all_kernels_are_found_by_how_their_names_end():
    """The sanitizer is told to look at them so (tests/gpu/run.sh)."""
    assert all(json.loads(line)["name"].endswith("_kernel") for line in jobs.lines_for((9, 0)))


def test_it_is_read_without_pytorch_and_triton():
    code = "import sys\nfrom engine.selftest import jobs\nassert jobs.lines_for((9, 0))\n"
    done = python("-c", code + "print({'torch', 'triton'} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stderr


def test_nothing_is_listed_for_other_cards():
    assert jobs.lines_for((7, 5)) == []
    assert jobs.lines_for((9, 1)) == []


class Library:
    """NVML of a machine with an A100 and an H100."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def __getattr__(self, name):
        def call(*args):
            if name == self.fails:
                return 999
            if name == "nvmlDeviceGetHandleByIndex_v2":
                args[1]._obj.value = 100 + args[0].value
                return 0 if args[0].value < 2 else 2
            if name == "nvmlDeviceGetCudaComputeCapability":
                args[1]._obj.value, args[2]._obj.value = (8, 0) if args[0].value == 100 else (9, 0)
            return 0

        return call


@pytest.mark.parametrize(
    ("visible", "found"),
    [(None, (8, 0)), ("1", (9, 0)), ("1,0", (9, 0)), ("GPU-c0ffee", (8, 0)), ("", (8, 0)), ("7", None)],
)
def test_the_card_is_the_first_that_the_process_may_use(monkeypatch, visible, found):
    monkeypatch.setattr(nvml, "ctypes", SimpleNamespace(**(vars(ctypes) | {"CDLL": lambda name: Library()})))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvml.compute_capability() == found


@pytest.mark.parametrize(
    "fails", ["nvmlInit_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetCudaComputeCapability", "the library"]
)
def test_a_card_that_cannot_be_known_has_nothing_compiled_early(monkeypatch, fails):
    def load(name):
        if fails == "the library":
            raise OSError(name)
        return Library(fails)

    given = []
    monkeypatch.setattr(nvml, "ctypes", SimpleNamespace(**(vars(ctypes) | {"CDLL": load})))
    monkeypatch.setattr(compile_pool, "is_under_way", lambda: True)
    monkeypatch.setattr(compile_pool, "give_early", given.append)
    assert nvml.compute_capability() is None
    jobs.give_early()
    assert given == []


def test_what_the_card_needs_is_given_to_the_pool_that_is_there(monkeypatch):
    given = []
    monkeypatch.setattr(jobs, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(compile_pool, "give_early", given.append)
    jobs.give_early()
    assert given == [], "no pool was started"
    monkeypatch.setattr(compile_pool, "is_under_way", lambda: True)
    jobs.give_early()
    assert given == [jobs.lines_for((9, 0))]
