"""Kernels compiled ahead, by real workers: no GPU is needed to compile for one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]

# In a process of its own: the tests beside this one run Triton's interpreter, which compiles nothing.
SCRIPT = """
import json, os, sys, time
import torch
from engine.kernels import compile_ahead, launch, triton_fused, triton_gemv
from engine.kernels.cache_dir import use_cache_dir

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")

started = []
popen = compile_ahead.subprocess.Popen
def counted(command, **options):
    started.append(command)
    return popen(command, **options)
compile_ahead.subprocess.Popen = counted

def jobs():
    with launch.recording() as found:
        for size in (1024, 2048, 4096):
            triton_fused.rms_norm(meta(3, size), meta(size), 1e-6)
        triton_fused.silu_mul(meta(3, 3072))
        triton_gemv.gemv(meta(1, 1024), meta(96, 1024))
        triton_gemv.gemv(meta(1, 1024), meta(96, 1024))
    return found

found = jobs()
report = {"jobs": len(found), "first": compile_ahead.compile_ahead(found, (9, 0)), "workers": len(started)}
started.clear()
report["again"] = compile_ahead.compile_ahead(jobs(), (9, 0))
report["workers again"] = len(started)
report["another card"] = compile_ahead.compile_ahead(jobs(), (8, 0))
kernels = [str(p) for p in use_cache_dir().rglob("*.cubin")]
report["compiled"] = len(kernels)

# What the workers left is what this process would compile: nothing is compiled once more.
for job in found:
    launch.compile_for(job.kernel, job.types, dict(job.constants), job.num_warps, job.num_stages, (9, 0))
report["compiled here"] = len(list(use_cache_dir().rglob("*.cubin"))) - len(kernels)

bad = [launch.Job(job.kernel, job.types[:-1], job.constants, job.num_warps, job.num_stages) for job in found]
compile_ahead.compile_ahead(bad, (9, 0))
report["done files"] = len(list(use_cache_dir().glob("atoll-*.done")))
print(json.dumps(report))
"""


def test_workers_leave_what_this_process_needs_and_start_once(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    workers = min(len(os.sched_getaffinity(0)), 5)
    if workers < 2:
        pytest.skip("one processor: nothing is compiled ahead")
    assert report == {
        "jobs": 5, "first": 5, "workers": workers, "again": 0, "workers again": 0, "another card": 5, "compiled": 10,
        "compiled here": 0, "done files": 2,
    }  # fmt: skip
    assert "5 of 5 kernels could not be compiled ahead: AssertionError" in done.stderr


def test_a_worker_answers_each_line_and_takes_only_our_kernels(tmp_path):
    lines = '{"module": "os", "name": "system"}\nno json\n'
    done = subprocess.run(
        [sys.executable, "-m", "engine.kernels.compile_worker"], input=lines, capture_output=True, text=True,
        timeout=60, check=True, cwd=ROOT, env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert first == "ValueError: os is no module of kernels"
    assert second.startswith("JSONDecodeError")
