"""On the GPU: logits at the cap are noticed, and states come back from the cache bit for bit.

A cap of ±30 hides errors: far beyond it all logits are equal, whatever was computed. So logits are compared as they
were before the cap, and only if they do not stand at it; that this would be noticed is tested too. (A CPU's bf16 is up
to 0.019 off here.)
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_kit import checkpoint, fp8_on_cpu, model_of, on_cpu, on_gpu, prompts

from engine import LLM, SamplingParams

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

CAP = 30.0
CAPPED = ["gemma2", "gemma4-31b", "gemma4-26b"]


@pytest.fixture(scope="module", params=CAPPED)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("capped") / request.param, request.param)


def logits(llm: LLM, asked: list[dict], stretch: float = 1.0) -> torch.Tensor:
    """Of all tokens of the prompts, each a step of its own; `stretch`: of the last norm's weight."""
    model, found = model_of(llm), []
    original = model.logits

    def note(hidden: torch.Tensor) -> torch.Tensor:
        result = original(hidden * stretch)
        found.append(result.float().cpu())
        return result

    model.logits = note
    try:
        for one in asked:
            params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
            llm.generate([one], params, use_tqdm=False)
    finally:
        del model.logits
    return torch.cat(found)


def compare(found: torch.Tensor, reference: torch.Tensor, what: str) -> float:
    """The relative error of logits as they were before the cap."""
    assert found.shape == reference.shape
    share = max(float((x.abs() > 0.99 * CAP).float().mean()) for x in (found, reference))
    assert share < 1e-3, f"{what}: {share:.1%} of the logits are saturated at ±{CAP}, and prove nothing"
    free = [torch.atanh((x.double() / CAP).clamp(-1 + 1e-9, 1 - 1e-9)) for x in (found, reference)]
    error = float((free[0] - free[1]).norm() / free[1].norm())
    print(f"{what}: relative error {error:.1e}, {share:.2%} saturated, largest {float(found.abs().max()):.1f}")
    return error


def test_logits_follow_float32_and_a_cap_that_is_reached_is_noticed(model: Path) -> None:
    asked = prompts(5, seed=9, longest=200)
    ours, exact = on_gpu(model, max_num_seqs=8), on_cpu(model)
    assert compare(logits(ours, asked), logits(exact, asked), f"{model.name} bf16") < 3e-2
    with pytest.raises(AssertionError, match="saturated"):
        compare(logits(ours, asked, 200.0), logits(exact, asked, 200.0), f"{model.name} bf16, stretched")


def test_logits_in_fp8_are_off_by_what_fp8_costs(model: Path) -> None:
    """Random layers of equal weight add up all roundings: fp8 costs 0.10 to 0.18 here, on any device. The GPU may lose
    as much, and its roundings have to be mostly the CPU's: where bf16 decides which of two fp8 numbers is taken they
    differ, which makes 0.73 of the whole. An error of its own of half that size crosses both limits."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    asked = prompts(5, seed=9, longest=200)
    found = logits(on_gpu(model, max_num_seqs=8, quantization="fp8", kv_cache_dtype="fp8"), asked)
    exact = logits(on_cpu(model), asked)
    rounded = logits(fp8_on_cpu(model), asked)
    due = compare(rounded, exact, f"{model.name}, what fp8 costs")
    assert compare(found, exact, f"{model.name} fp8") < 1.12 * due
    assert compare(found, rounded, f"{model.name} fp8, of the CPU's fp8") < 0.85 * due


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe"])
@pytest.mark.parametrize("kept_in", ["float32", "bfloat16"])
def test_a_state_from_the_cache_is_bit_equal(family: str, kept_in: str, tmp_path: Path) -> None:
    """Once computed and once taken up, the rest of a prompt and its answer are the same numbers."""
    llm = on_gpu(checkpoint(tmp_path / family, family), mamba_ssm_cache_dtype=kept_in)
    prompt = {"prompt_token_ids": [(i * 31) % 900 + 3 for i in range(600)]}
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=3)
    found = []
    for wanted in (0, 576):
        [output] = llm.generate([prompt], params, use_tqdm=False)
        assert output.num_cached_tokens == wanted
        answer = output.outputs[0]
        scores = [{token: entry.logprob for token, entry in position.items()} for position in answer.logprobs or []]
        found.append((answer.token_ids, scores))
    assert found[0] == found[1]


def test_a_copied_state_has_every_bit_and_its_neighbours_stay(tmp_path: Path) -> None:
    llm = on_gpu(checkpoint(tmp_path / "m", "qwen3.5"))
    runner: Any = llm.engine.runner
    cache = runner.cache
    states = [state for layer in cache.states.values() for state in layer]
    generator = torch.Generator(device=states[0].device).manual_seed(1)
    with torch.inference_mode():
        for state in states:
            state[:4].copy_(torch.randn(state[:4].shape, generator=generator, device=state.device))
        before = [state[:4].clone() for state in states]
        cache.copy_state(1, 2)
    for state, old in zip(states, before, strict=True):
        assert torch.equal(state[2], old[1])
        for untouched in (0, 1, 3):
            assert torch.equal(state[untouched], old[untouched])
