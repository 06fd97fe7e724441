"""Embeddings on a GPU against the CPU path in float32, beside answers, in chunks, with prefix hits and graphs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_kit import FAMILIES, assert_idle, checkpoint, drain, on_cpu, on_gpu, prompts

from engine import SamplingParams
from engine.core.request import EngineRequest
from engine.embedding import finished

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_embeddings_follow_fp32(family: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / family, family)
    asked = [p["prompt_token_ids"] for p in prompts(12)] + [[5], [7, 8], list(range(1, 258))]
    core, reference = on_gpu(model, max_num_seqs=16).engine, on_cpu(model)
    answers = [EngineRequest(f"a{i}", ids[:20], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
               for i, ids in enumerate(asked)]
    for pooling in ("last", "mean"):
        expected = [output.outputs.embedding for output in reference.embed(asked, pooling=pooling)]
        for turn in range(2):  # the second finds the prompts in the prefix cache, where it may look
            wanted = [EngineRequest(f"e{turn}{pooling}{i}", ids, SamplingParams(), pooling=pooling)
                      for i, ids in enumerate(asked)]
            mixed = [request for pair in zip(answers, wanted, strict=True) for request in pair]
            found = drain(core, mixed)
            for request, vector in zip(wanted, expected, strict=True):
                [output] = found[request.request_id]
                assert np.dot(finished(output.embedding), vector) > 0.999, (family, pooling, request.request_id)
            assert all(sum(len(o.new_token_ids) for o in found[a.request_id]) == 40 for a in answers)
    assert_idle(core)


def test_a_decode_step_with_a_last_token_to_pool(tmp_path: Path) -> None:
    """A prompt of which all but one token is cached takes part in a decode step, and samples nothing there."""
    model = checkpoint(tmp_path / "m", "qwen3")
    core, reference = on_gpu(model).engine, on_cpu(model)
    ids = list(range(1, 18))  # a page of 16 tokens, and one more
    [expected] = reference.embed([ids])
    drain(core, [EngineRequest("first", ids, SamplingParams(), pooling="last")])
    answer = EngineRequest("answer", [3, 4, 5], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    core.add_request(answer)
    for _ in range(6):
        core.step()
    found = drain(core, [EngineRequest("second", ids, SamplingParams(), pooling="last")])
    [output] = found["second"]
    assert output.num_cached_tokens == 16
    assert np.dot(finished(output.embedding), expected.outputs.embedding) > 0.999
    assert_idle(core)
