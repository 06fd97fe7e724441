"""With --batch-invariant a request gives the same bits alone, beside others, in chunks, and after preemption."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_kit import checkpoint, on_gpu, prompts

from engine import LLM, SamplingParams
from engine.outputs import RequestOutput

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

FP8 = torch.cuda.get_device_capability() >= (8, 9)
NUMBERS = [
    pytest.param({}, id="bf16"),
    pytest.param(
        {"quantization": "fp8", "kv_cache_dtype": "fp8"}, id="fp8",
        marks=pytest.mark.skipif(not FP8, reason="fp8 needs compute capability 8.9"),
    ),
]  # fmt: skip
ASKED = prompts(64, longest=400)
# Alone; two at once; five at once: the usual kernels would take another form for each.
GROUPS = [*([i] for i in range(6)), [6, 7], [8, 9, 10, 11, 12]]


def params_of(i: int, tokens: int) -> SamplingParams:
    scores = 1 if i % 5 == 0 else None
    return SamplingParams(
        temperature=i % 2, seed=i, max_tokens=tokens, ignore_eos=True, logprobs=2, prompt_logprobs=scores
    )


def answers(llm: LLM, group: Sequence[int], *, tokens: int = 20) -> dict[int, tuple[Any, ...]]:
    llm.engine.reset_prefix_cache()
    outputs = llm.generate([ASKED[i] for i in group], [params_of(i, tokens) for i in group], use_tqdm=False)
    return {i: bits(output) for i, output in zip(group, outputs, strict=True)}


def bits(output: RequestOutput) -> tuple[Any, ...]:
    """Tokens and all log-probabilities, to be compared exactly."""
    answer = output.outputs[0]
    listed = [*(output.prompt_logprobs or ())[1:], *(answer.logprobs or ())]
    return answer.token_ids, [{t: e.logprob for t, e in (entry or {}).items()} for entry in listed]


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize(
    "family", ["llama", "llama-window", "qwen3", "gemma2", "gemma4-31b", "gemma4-e2b", "qwen3-moe", "gemma4-26b"]
)
def test_a_request_gives_the_same_bits_in_any_batch(family: str, numbers: dict, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / family, family)
    llm = on_gpu(model, batch_invariant=True, max_num_seqs=64, max_num_batched_tokens=256, **numbers)
    together = answers(llm, range(64))
    for group in GROUPS:
        for i, alone in answers(llm, group).items():
            assert alone == together[i], f"request {i} in a group of {len(group)}"


@pytest.mark.parametrize("numbers", NUMBERS)
def test_nor_does_it_matter_how_a_prompt_is_cut_or_what_is_recomputed(numbers: dict, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "llama", "llama")
    flags = {"batch_invariant": True, "max_model_len": 1024, **numbers}
    wanted = answers(on_gpu(model, max_num_batched_tokens=2048, **flags), range(64), tokens=200)
    # 1.5 KiB a token in bf16, half of it in fp8: the prompts of some 15 requests fit, but not their answers.
    few = (4 << 20) // (2 if numbers else 1)
    llm = on_gpu(model, max_num_batched_tokens=100, kv_cache_memory_bytes=few, enforce_eager=True, **flags)
    assert answers(llm, range(64), tokens=200) == wanted
    assert llm.engine.stats().num_preemptions > 0
