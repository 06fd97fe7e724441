"""fp8 inside a model: its scores are off by what the same roundings cost on a CPU; and every product of its steps is
what its reference makes of the very same input.

(fp8 costs random layers so much that a wrong product may hide in it. With the input given, one rounding to bf16 is all
that stands between a kernel and plain float32 arithmetic.)
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gpu_kit import FAMILIES, checkpoint, fp8_on_cpu, generated, model_of, on_cpu, on_gpu, prompts
from gpu_scores import lost
from torch import nn

from engine import SamplingParams
from engine.kernels.pointwise import reference as pointwise_reference
from engine.layers import linear
from engine.layers.gemm_inputs import Activations, QuantizedRows, UnnormedRows
from engine.layers.linear import Linear
from engine.layers.quant import unquantized

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("fp8 needs compute capability 8.9", allow_module_level=True)

LIMIT = 8e-3  # rounding to bf16 takes 1.7e-3 of it, and what the fp8 units drop of a sum about as much


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_off_by_what_fp8_costs(family: str, tmp_path: Path) -> None:
    """By no more than 0.1, and by what the same roundings cost on the CPU: 0.013 to 0.034 for prompts. (In bf16 the CPU
    loses up to 1.04 times that. Answers are few tokens, and not the same ones: there it is up to 1.2 times.)"""
    found = lost_as_is_due(checkpoint(tmp_path / family, family), max_num_seqs=16)
    assert max(found) < 1e-1, found


@pytest.mark.parametrize("family", ["qwen3", "gemma4-26b", "qwen3.5"])
def test_few_sequences_multiply_with_large_weights_on_the_fp8_units(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, of up to four sequences, in whose steps small weights meet activations that are not rounded."""
    monkeypatch.setattr(linear, "_SMALL_WEIGHT", 0)
    monkeypatch.setattr(unquantized, "SOME_OUTPUTS", 0)
    lost_as_is_due(checkpoint(tmp_path / family, family), max_num_seqs=4)


def lost_as_is_due(model: Path, **steps: int) -> list[float]:
    """What the GPU loses with weights and KV in fp8, no more than the same roundings cost on the CPU."""
    steps["max_num_batched_tokens"] = 256
    exact = on_cpu(model)
    found = lost(on_gpu(model, quantization="fp8", kv_cache_dtype="fp8", **steps), exact)
    due = lost(fp8_on_cpu(model, **steps), exact)
    said = f"prompts {found[0]:.2e} of {due[0]:.2e} that are due, answers {found[1]:.2e} of {due[1]:.2e}"
    print(f"{model.name}: {said}")
    assert found[0] < 1.12 * due[0], said
    assert found[1] < 1.6 * due[1], said
    return found


def reference(product: Linear, x: Activations) -> torch.Tensor:
    """[T, out] in float32, from the weight and the activations that `product` has in fp8."""
    if isinstance(x, UnnormedRows):
        normed = pointwise_reference.rms_norm(x.values, x.weight, x.eps, wide_offset=x.offset)
        assert isinstance(normed, torch.Tensor)
        x = normed
    if isinstance(x, QuantizedRows):
        wide = x.values.float() * x.scale[:, None]
    elif x.shape[0] > product.vector_rows:
        values, scale = pointwise_reference.quantize_rows(x)
        wide = values.float() * scale[:, None]
    else:
        wide = x.float()
    assert product.scale is not None
    y = wide @ (product.weight.float() * product.scale[:, None]).t()
    return y if product.bias is None else y + product.bias.float()


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[str, list[tuple[int, float]]]]:
    """Of each product in fp8: the rows of every call meanwhile, and how far it was from its reference."""
    seen: dict[str, list[tuple[int, float]]] = defaultdict(list)
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.scale is not None:

            def note(product: nn.Module, args: tuple, y: torch.Tensor, name: str = name) -> None:
                assert isinstance(product, Linear)
                wanted = reference(product, args[0])
                seen[name].append((y.shape[0], float((y.float() - wanted).norm() / wanted.norm())))

            hooks.append(module.register_forward_hook(note))
            seen[name] = []
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma4-31b", "gemma4-26b", "qwen3.5"])
def test_every_product_of_a_step_is_that_of_its_reference(family: str, tmp_path: Path) -> None:
    flags = {"quantization": "fp8", "kv_cache_dtype": "fp8", "enforce_eager": True, "max_num_seqs": 16}
    llm = on_gpu(checkpoint(tmp_path / family, family), **flags)
    model = model_of(llm)
    # With scores of the prompts, for which the last layer, too, computes all tokens.
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=0)
    with watched(model) as seen:
        generated(llm, prompts(12, longest=200), params)
    assert len(seen) >= 3 * 4, "of each layer at least four products"
    for name in [name for name, calls in seen.items() if not calls]:
        assert family == "gemma4-26b", f"{name}: never called"
        assert ".mlp." in name, f"{name}: never called"  # that one runs as some of the experts
        del seen[name]
    worst = {name: max(calls, key=lambda call: call[1]) for name, calls in seen.items()}
    name = max(worst, key=lambda name: worst[name][1])
    rows, off = worst[name]
    print(f"{family}: {len(seen)} products, the worst is {name}, {off:.1e} off in a step of {rows} rows")
    for name, calls in seen.items():
        assert max(rows for rows, _ in calls) > 100, f"{name}: no large step"
        assert min(rows for rows, _ in calls) <= 16, f"{name}: no step of decoding"
    assert all(off < LIMIT for _, off in worst.values()), worst

    # A scale that is 4 % off for one output in four is noticed. (The product's own: the reference's is another tensor.)
    broken = next(module for module in model.modules() if isinstance(module, Linear) and module.scale is not None)
    with torch.inference_mode():
        broken.scale_row = broken.scale_row.clone()
        broken.scale_row[:, ::4] *= 1.04
    with watched(model) as seen:
        generated(llm, prompts(3, longest=200), SamplingParams(max_tokens=1, temperature=0))
    assert max(off for calls in seen.values() for _, off in calls) > LIMIT
