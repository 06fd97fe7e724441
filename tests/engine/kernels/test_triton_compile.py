"""Every kernel compiles for the GPUs that Atoll supports, fits into their shared memory, and keeps its numbers in
registers. Needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
KIB = 1024
SPILLED = 256  # bytes of a thread's numbers that may have no register, as on a GPU (tests/gpu/test_gpu_memory.py)
MORE_SPILLED = {
    ("sm80", "_run_chunks_kernel"): 512,
    ("sm89", "_run_chunks_kernel"): 512,
    ("sm120", "_run_chunks_kernel"): 576,
    ("sm90", "_mixed_kernel"): 384,  # heads of 512 numbers with a cache in fp8
}

NOT_TUNED = ("_attention_kernel", "_product_kernel")  # gemm.batch_invariant: behind a switch, right but not yet fast


@pytest.mark.timeout(1600)  # half a minute where two processors are free
@pytest.mark.parametrize(
    "major, minor, shared, multiprocessors, kernels",  # at least so many variants
    [
        pytest.param(8, 0, 163 * KIB, 108, 80, id="sm80, A100"),
        pytest.param(8, 9, 99 * KIB, 142, 100, id="sm89, L40S"),
        pytest.param(9, 0, 227 * KIB, 132, 100, id="sm90, H100"),
        pytest.param(10, 0, 227 * KIB, 148, 100, id="sm100, B200"),
        pytest.param(12, 0, 99 * KIB, 188, 100, id="sm120, RTX PRO 6000"),
    ],
)
def test_kernels_compile(major, minor, shared, multiprocessors, kernels, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HERE.parents[2])}
    numbers = map(str, (major, minor, shared, multiprocessors, min(2, os.cpu_count() or 1)))
    command = [sys.executable, HERE / "compile_all.py", *numbers]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= kernels
    too_large = [each for each in found if each["shared"] > shared]
    assert not too_large, "shared memory of a program"
    assert not [each["kernel"] for each in found if each["scratch"]], "kernels with scratch memory cannot be started"
    spilling = [
        each for each in found
        if each["kernel"] not in NOT_TUNED
        and each["stack"] > MORE_SPILLED.get((f"sm{major}{minor}", each["kernel"]), SPILLED)
    ]  # fmt: skip
    assert not spilling, "numbers of a thread without a register"
