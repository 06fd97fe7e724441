"""Kernels compiled ahead, by real workers: no GPU is needed to compile for one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")

from engine.kernels.runtime import torch_stub

ROOT = Path(__file__).parents[4]

# In a process of its own: the tests beside this one run Triton's interpreter, which compiles nothing.
SCRIPT = """
import json, os, sys, time
import torch
from engine.kernels.gemm import small_batch
from engine.kernels.pointwise import fused, norm
from engine.kernels.runtime import compile_ahead, compile_pool, launcher
from engine.kernels.runtime.cache_dir import use_cache_dir

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")

started = []
popen = compile_pool.subprocess.Popen
def counted(command, **options):
    started.append(command)
    return popen(command, **options)
compile_pool.subprocess.Popen = counted

def jobs():
    with launcher.recording() as found:
        for size in (1024, 2048, 4096):
            norm.rms_norm(meta(3, size), meta(size), 1e-6)
        fused.gate_mul(meta(3, 1536), meta(3, 1536), "silu")
        small_batch.gemv(meta(1, 1024), meta(96, 1024))
        small_batch.gemv(meta(1, 1024), meta(96, 1024))
    return found

found = jobs()
report = {"jobs": len(found), "first": compile_ahead.compile_ahead(found, (9, 0)), "started": len(started)}
started.clear()
compile_pool.start_early()
report["again"] = compile_ahead.compile_ahead(jobs(), (9, 0))
report["started again"] = len(started)
report["dismissed"] = compile_pool._early is None
report["another card"] = compile_ahead.compile_ahead(jobs(), (8, 0))
kernels = [str(p) for p in use_cache_dir().rglob("*.cubin")]
report["compiled"] = len(kernels)
report["kept"] = sorted({p.suffix for p in use_cache_dir().rglob("*") if p.is_file()})
report["lines of source"] = any(b".debug_line" in open(path, "rb").read() for path in kernels)

# What the workers left is what this process would compile: nothing is compiled once more.
for job in found:
    launcher.compile_for(job.kernel, job.types, dict(job.constants), job.num_warps, job.num_stages, (9, 0))
report["compiled here"] = len(list(use_cache_dir().rglob("*.cubin"))) - len(kernels)

bad = [launcher.Job(job.kernel, job.types[:-1], job.constants, job.num_warps, job.num_stages) for job in found]
compile_ahead.compile_ahead(bad, (9, 0))
report["done files"] = len(list(use_cache_dir().glob("atoll-*.done")))
print(json.dumps(report))
"""


def test_workers_leave_what_this_process_needs_and_start_once(compiling, tmp_path):
    done = compiling.run("-c", SCRIPT, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor: nothing is compiled ahead")
    assert report == {
        "jobs": 5, "first": 5, "started": 1, "again": 0, "started again": 1, "dismissed": True, "another card": 5,
        "compiled": 10, "kept": [".cubin", ".done", ".json", ".source"], "lines of source": False,
        "compiled here": 0, "done files": 2,
    }  # fmt: skip
    assert "5 of 5 kernels could not be compiled ahead" in done.stderr
    assert "The first error: AssertionError" in done.stderr


def test_a_worker_answers_each_job_and_takes_only_our_kernels(tmp_path):
    lines = '{"module": "os", "name": "system"}\nno json\n'
    done = subprocess.run(
        [sys.executable, "-m", "engine.kernels.runtime.compile_worker"], input=lines, capture_output=True, text=True,
        timeout=60, check=True, cwd=ROOT, env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    answers = {number: error for number, error, *_ in map(json.loads, done.stdout.splitlines())}
    assert answers[0] == "ValueError: os is no module of kernels"
    assert answers[1].startswith("JSONDecodeError")


LOADED = """
import sys
from engine.kernels.runtime import compile_worker
compile_worker._load()
assert "engine.kernels.attention.decode" in sys.modules
print(sorted({line.split()[-1].rpartition("/")[2] for line in open("/proc/self/maps") if "/libtorch" in line}))
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells loaded libraries on Linux only")
def test_a_worker_does_not_load_pytorch():
    """It would take longer than all else that happens before the first kernel is compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LOADED], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]", done.stderr


ODD = """
import torch
import triton.language as tl

from engine.kernels.runtime.launcher import kernel

_SIZE = tl.constexpr(torch.zeros(16).numel())


@kernel
def fill(x_ptr, VALUE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, _SIZE), VALUE)
"""
WITH_ODD = """
import runpy, sys
import engine.kernels
engine.kernels.__path__.append(sys.argv[1])
runpy.run_module("engine.kernels.runtime.compile_worker", run_name="__main__")
"""


def test_a_worker_loads_pytorch_for_kernels_that_need_it(tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/fill.py").write_text(ODD)
    job = {
        "module": "engine.kernels.odd.fill", "name": "fill", "types": ["*fp32!"], "constants": {"VALUE": 2},
        "num_warps": 1, "num_stages": 1, "capability": [9, 0],
    }  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", WITH_ODD, tmp_path], input=json.dumps(job) + "\n", env=environment, capture_output=True,
        text=True, timeout=60, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)[:2] == [0, None]
    (said,) = done.stderr.splitlines()
    assert said.startswith("Kernels cannot be imported without PyTorch (TypeError")


def test_the_stand_in_has_names_and_nothing_else():
    torch = torch_stub._Module("torch")
    assert torch.nn.functional is torch.nn.functional
    assert len({torch.bfloat16, torch.float16, torch.Tensor, torch.Tensor | None, None | torch.Tensor}) == 3
    assert repr(torch.nn.Module) == "<no torch.nn.Module>"
    with pytest.raises(AttributeError, match=r"torch\.Tensor .* no __cuda_array_interface__"):
        _ = torch.Tensor.__cuda_array_interface__
    with pytest.raises(TypeError):
        torch.zeros(3)
    with pytest.raises(TypeError):
        type("Own", (torch.nn.Module,), {})


POOL = """
import os, signal, sys, time
from engine.kernels.runtime import compile_pool
assert "torch" not in sys.modules
pool = compile_pool.CompilePool()
pool.submit(['{"module": "os"}', '{"module": "sys"}'])
if sys.argv[1] == "kill":
    pool._process.kill()
print(sorted(pool.wait(['{"module": "os"}', '{"module": "sys"}']).values()))
pool.submit(['{"module": "json"}'])
pool.seal()
print(pool.wait(['{"module": "json"}']))
pool.close()
"""


@pytest.mark.parametrize(("what", "error"), [("work", "no module of kernels"), ("kill", "its process ended")])
def test_every_job_gets_an_answer_even_from_a_pool_that_died(what, error, tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", POOL, what], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.count(error) == 3, "two, and one that came later"


LEFT = """
import json, os, sys
from engine.kernels.runtime import compile_pool
pool = compile_pool.CompilePool()
jobs = [json.dumps({"module": "os", "number": i}) for i in range(20_000)]
pool.submit(jobs)
pool.wait(jobs[:1])
print(os.getpgrp(), flush=True)
pool.close()
"""


def test_what_is_left_when_a_pool_closes_is_not_worked_on(tmp_path):
    """Else forks would compile on beside the engine, for nobody."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LEFT], env=environment, stdout=subprocess.PIPE, text=True, timeout=120, check=True,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(int(done.stdout), 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.killpg(int(done.stdout), signal.SIGKILL)
    pytest.fail("a fork lived on")


KEYS = """
import hashlib, importlib, random, sys
from engine.kernels.runtime.compile_worker import kernel_modules
from engine.kernels.runtime.launcher import Kernel, source_key
kernels = []
for name in kernel_modules():
    kernels += [v for v in vars(importlib.import_module(name)).values() if isinstance(v, Kernel)]
random.Random(int(sys.argv[1])).shuffle(kernels)
assert len(kernels) > 20
print(hashlib.sha256(str(sorted((k.name, source_key(k)) for k in kernels)).encode()).hexdigest())
"""


def test_a_kernel_has_the_same_key_whichever_came_first(compiling):
    """Else what one process compiled would not be found by the next."""
    done = [compiling.run("-c", KEYS, seed) for seed in range(4)]
    assert [each.returncode for each in done] == [0] * 4, done[0].stderr[-3000:]
    assert len({each.stdout for each in done}) == 1


CHECKS = """
import sys, time, torch
began = time.monotonic()
from engine.kernels.runtime import compile_pool
from engine.kernels.runtime.cache_dir import use_cache_dir
from engine.selftest import run
torch.cuda.get_device_capability = lambda device=None: (9, 0)
compile_pool.start_early()
names = ("norm", "norm residual to fp8", "gate", "softcap", "quantise")
checks = [check for check in run.EVERY if check.name in names]
kernels = run._Kernels(checks, torch.device("cpu"), torch.bfloat16)
for check in checks:
    kernels.wait(check)
    compiled = {path.stem for path in use_cache_dir().rglob("*.cubin")}
    assert kernels._of[check.name], "what a check needs was noted"
    assert {job.kernel.name for job in kernels._of[check.name]} <= compiled, "it is there as the wait ends"
work = kernels.finish()
print(kernels._all.count, work and work.jobs)
if work:
    assert 0 < work.seconds and began < work.ready < work.done < time.monotonic()
    assert set(work.slowest) <= {job.kernel.name for jobs in kernels._of.values() for job in jobs}
"""


def test_the_self_tests_kernels_are_there_when_their_checks_run(compiling, tmp_path):
    """With a pool that was started early, which gets what each check needs as soon as that is known."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor: nothing is compiled ahead")
    for count in ("5 5", "0 None"):
        done = compiling.run("-c", CHECKS, TRITON_CACHE_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.strip() == count


GUESSED = """
import sys, torch
from engine.kernels.runtime import compile_pool
from engine.selftest import jobs, run
torch.cuda.get_device_capability = lambda device=None: (9, 0)
names = ("norm", "gate", "softcap", "quantise", "gate to fp8")
checks = [check for check in run.EVERY if check.name in names]
compile_pool.start_early()
pool = compile_pool._early
wanted = ("pointwise.fused", "_rms_norm_kernel", "pointwise.quantize")
rows = [line for line in jobs.lines_for((9, 0)) if any(name in line for name in wanted)]
slow = next(line for line in jobs.lines_for((9, 0)) if "solve_kernel" in line)
compile_pool.give_early(['{"module": "os"}', *rows, slow])
kernels = run._Kernels(checks, torch.device("cpu"), torch.bfloat16)
compile_pool.give_early(['{"module": "sys"}'])
given, late = len(pool._jobs), slow in pool._waiting
work = kernels.finish()
assert late and slow not in pool.seconds, "nobody waits for it"
print(given == len(rows) + 2, kernels._all.count, work.guessed)
"""


def test_what_was_guessed_is_compiled_once_and_what_was_guessed_wrong_does_no_harm(compiling, tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor: nothing is compiled ahead")
    done = compiling.run("-c", GUESSED, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "True 5 5"
    assert "could not be compiled" not in done.stderr
