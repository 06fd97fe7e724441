"""A start compiles and loads every kernel that requests will need. Which they are is noted here without a GPU; that
nothing is compiled later is seen on one (tests/gpu/test_gpu_steps.py)."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("family", "max_seqs", "max_tokens", "weights"),
    [
        ("qwen3", 48, 256, []),
        ("qwen3", 48, 256, ["large"]),
        ("gemma4-26b", 48, 256, []),
        ("gemma4-26b", 48, 256, ["large"]),
        ("gemma4-e2b", 48, 256, []),
        ("qwen3.5-moe", 48, 256, []),
        ("qwen3.5-moe", 48, 256, ["large"]),
        ("qwen3.5", 40, 40, []),  # a step has a chunk of two tokens only where a sequence has none
    ],
)
def test_a_start_has_run_every_kernel_that_steps_need(compiling, family, max_seqs, max_tokens, weights):
    done = compiling.run(HERE / "note_steps.py", family, max_seqs, max_tokens, *weights)
    assert done.returncode == 0, done.stderr[-3000:]
    noted = json.loads(done.stdout)
    assert noted["ahead"] > 20
    assert noted["not ahead"] == [], "the start itself waits for their compilation, one after the other"
    assert noted["late"] == [], "a request waits for them"
