"""Every kernel compiles for the GPUs that Atoll supports, fits into their shared memory, and keeps its values in
registers. Needs no GPU. Only what has changed since the last run is compiled: make test-compile, and commit
compiled_kernels.json with the kernels."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
KIB = 1024
MOST_SCRATCH = 1 << 16  # as engine/kernels/runtime/prebuilt.py
SPILLED = 256  # bytes of stack that a thread may need, as on a GPU (tests/gpu/test_gpu_memory.py)
MORE_SPILLED = {
    ("8.0", "_run_chunks_kernel"): 512,
    ("8.9", "_run_chunks_kernel"): 512,
    ("12.0", "_run_chunks_kernel"): 576,
    ("9.0", "_mixed_kernel"): 640,  # heads of 512 numbers with a cache in fp8, whose queries have two forms; in slices
}
NOT_TUNED = ("_attention_kernel", "_product_kernel")  # both batch_invariant: behind a switch, right but not yet fast
GPUS = {  # compute capability, multiprocessors, KiB of shared memory -> at least so many variants
    "8.0-108-163": ("A100", 80),
    "8.9-142-99": ("L40S", 100),
    "9.0-132-227": ("H100", 100),
    "10.0-148-227": ("B200", 100),
    "12.0-188-99": ("RTX PRO 6000", 100),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # if all kernels changed


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    """What was compiled: the GPU's name -> its variants."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(ROOT)}
    processes = str(min(8, len(os.sched_getaffinity(0))))
    day = str(int(time.time()) // 86_400)
    command = [sys.executable, HERE / "compile_all.py", processes, HERE / "compiled_kernels.json", day, *GPUS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {gpu: [each for each in found if each["gpu"] == gpu] for gpu in GPUS}


@pytest.mark.parametrize("gpu", [pytest.param(gpu, id=name) for gpu, (name, _) in GPUS.items()])
def test_kernels_compile(gpu, variants):
    found, shared = variants[gpu], int(gpu.split("-")[2]) * KIB
    assert len(found) >= GPUS[gpu][1]
    assert not [each for each in found if each["shared"] > shared], "shared memory of a program"
    assert not [each for each in found if each["scratch"] > MOST_SCRATCH], "a prebuilt kernel with more is refused"
    spilling = [
        each for each in found
        if each["kernel"] not in NOT_TUNED
        and each["stack"] > MORE_SPILLED.get((gpu.split("-")[0], each["kernel"]), SPILLED)
    ]  # fmt: skip
    assert not spilling, "a thread's values without a register"
