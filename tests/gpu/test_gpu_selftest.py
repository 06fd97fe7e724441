"""The kernel self-test on a real GPU: it passes in time from nothing, and ends in words when the GPU does not."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine.capabilities import FP8_COMPUTE_CAPABILITY
from engine.kernels.runtime.compile_ahead import line_of
from engine.kernels.runtime.launcher import recording
from engine.selftest import jobs, nvml
from engine.selftest.__main__ import supervise
from engine.selftest.checks.check import kernel_side
from engine.selftest.report import Tally, as_text
from engine.selftest.run import EVERY

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

REPOSITORY = Path(__file__).parents[2]
SECONDS = 10.0

# A self-test of two checks, whose first one goes wrong the second time: the first time only compiles.
BROKEN = """
import sys, torch
from engine.kernels.pointwise import fused
from engine.selftest import run
from engine.selftest.checks import pointwise
from engine.selftest.report import Tally, print_line

original, calls = fused.gate_mul, []
def broken(*args, **options):
    calls.append(1)
    if len(calls) > 1:
        {deed}
    return original(*args, **options)

fused.gate_mul = broken
only = [check for check in pointwise.CHECKS if check.name in ("gate", "step inputs")]
sys.exit(run.run_checks(Tally(print_line), torch.device("cuda"), torch.bfloat16, with_fp8=False, only=only))
"""


def test_every_kernel_passes_from_an_empty_cache_in_time(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "engine.selftest", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    with capsys.disabled():
        print()
        for line in lines:
            if text := as_text(line):
                print(text)
            if work := line.get("work"):
                print(f"      {'':28} {work}")
    assert done.returncode == 0, done.stderr[-4000:]
    end = lines[-1]
    assert end["failed"] == []
    names = {line["name"] for line in lines if line["kind"] == "check"}
    assert {"delta rule, 1 token", "delta rule, chunks", "gated norm", "experts, 150 tokens", "sparse block"} <= names
    assert end["passed"] >= len(names) - end["skipped"]
    facts = {line["name"]: line.get("number") for line in lines if line["kind"] == "fact"}
    assert facts["memory bandwidth"] > 100
    assert facts["bf16 products"] > 10
    assert end["seconds"] < SECONDS, "start of Python and torch, compilation and checks"


def test_what_is_compiled_early_is_what_this_card_needs() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    assert nvml.compute_capability() == capability
    if capability not in jobs.GPUS:
        pytest.skip(f"nothing is listed for compute capability {capability}")
    with recording() as needed:
        for check in EVERY:
            if not check.needs_fp8 or capability >= FP8_COMPUTE_CAPABILITY:
                check.compute(kernel_side(device, torch.bfloat16, dry=True))
    assert {line_of(job, capability) for job in needed} == set(jobs.lines_for(capability))


def broken(deed: str, limit: float) -> tuple[int, list[dict]]:
    seen: list[dict] = []
    began = time.monotonic()
    code = supervise([sys.executable, "-c", BROKEN.format(deed=deed)], Tally(seen.append), limit)
    assert time.monotonic() - began < limit + 30
    return code, seen


def test_a_gpu_that_lost_its_state_ends_in_words() -> None:
    """A bad address on the device: every later call of the process fails."""
    deed = "torch.zeros(3, device='cuda')[torch.full((1,), 1 << 40, device='cuda')]"
    code, seen = broken(deed, 100)
    assert code == 1, seen
    checks = [line for line in seen if line["kind"] == "check"]
    assert [line["name"] for line in checks] == ["gate"]  # and no other was tried
    assert checks[0]["fault"] == "lost", seen
    assert "refuse every later call" in seen[-1]["message"]
    assert "dmesg" in seen[-1]["next"]


def test_a_kernel_that_never_ends_is_given_up() -> None:
    code, seen = broken("torch.cuda._sleep(1 << 60)", 25)
    assert code == 1, seen
    assert seen[-2]["name"] == "gate"
    assert seen[-2]["fault"] == "silent", seen
    assert "gave no answer" in seen[-1]["message"]
