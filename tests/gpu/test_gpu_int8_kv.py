"""A KV cache in int8 on a GPU: scores are off by what bf16 costs, and what the same roundings cost on the CPU."""

from pathlib import Path

import pytest
import torch
from gpu_kit import FAMILIES, checkpoint, generated, on_cpu, on_gpu, prompts
from gpu_scores import lost

from engine import SamplingParams

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_off_by_what_the_roundings_cost(family: str, tmp_path: Path) -> None:
    model, steps = checkpoint(tmp_path / family, family), {"max_num_seqs": 16, "max_num_batched_tokens": 256}
    exact = on_cpu(model)
    in_bf16 = lost(on_gpu(model, **steps), exact)
    due = lost(on_cpu(model, kv_cache_dtype="int8", **steps), exact)
    found = lost(on_gpu(model, kv_cache_dtype="int8", **steps), exact)
    for kind, ours, bf16, int8 in zip(("prompts", "answers"), found, in_bf16, due, strict=True):
        assert ours < 1.5 * (bf16 + int8), f"{kind}: {ours:.2e}, of {bf16:.2e} in bf16 and {int8:.2e} by int8"


def test_graphs_and_eager_steps_read_the_same_cache(tmp_path: Path) -> None:
    model, asked = checkpoint(tmp_path / "qwen3", "qwen3"), prompts(6)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    flags = {"kv_cache_dtype": "int8_per_token_head", "max_num_seqs": 8}
    eager, graphs = (generated(on_gpu(model, enforce_eager=eager, **flags), asked, params) for eager in (True, False))
    same = [a == b for one, other in zip(eager, graphs, strict=True) for a, b in zip(one, other, strict=True)]
    assert sum(same) > 0.9 * len(same)
