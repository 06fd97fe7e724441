"""Whole steps of the GPU's runner, of prompts and of answers, give what the CPU's gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


@pytest.mark.parametrize("family", ["qwen3", "gemma4-e2b"])  # the second has layers that go on with the last tokens
def test_steps_score_as_on_the_cpu(family):
    paths = (HERE.parents[2], HERE.parents[1] / "gpu", HERE)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, HERE / "run_steps.py", family]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert [len(request) for request in said["cpu"]] == [2, 3, 4]
    for on_cpu, on_gpu in zip(said["cpu"], said["gpu"], strict=True):
        assert [token for token, _ in on_gpu] == [token for token, _ in on_cpu]
        assert [score for _, score in on_gpu] == pytest.approx([score for _, score in on_cpu], abs=1e-3)
