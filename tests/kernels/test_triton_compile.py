"""Every kernel compiles for the cards that Atoll supports, and fits into their shared memory. Needs no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
KIB = 1024


@pytest.mark.timeout(1600)  # a minute or two where processors are free
@pytest.mark.parametrize(
    "major, minor, shared, kernels",  # at least so many variants
    [
        pytest.param(8, 0, 163 * KIB, 55, id="sm80, without fp8"),
        pytest.param(9, 0, 227 * KIB, 100, id="sm90"),
        pytest.param(12, 0, 99 * KIB, 100, id="sm120"),
    ],
)
def test_kernels_compile(major, minor, shared, kernels, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, HERE / "compile_all.py", str(major), str(minor), str(shared)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= kernels
