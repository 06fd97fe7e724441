"""What default flags come to on GPUs of many sizes: the plan's arithmetic alone, in the shapes of published models."""

from pathlib import Path

import pytest
import torch

import engine.bench
from engine.config import EngineConfig
from engine.core.kv.planner import GIB, plan_memory, sensible_batched_tokens, sensible_seqs
from engine.core.kv.spec import CacheSpec
from engine.models.config.model import ModelConfig
from engine.models.loading.loader import quantize
from engine.models.registry import model_class
from engine.worker.startup.memory import GpuMemory, StepNeeds, activation_bytes, gpu_budget, loaded_bytes
from engine.worker.startup.resolve import DEFAULT_BATCHED_TOKENS, DEFAULT_SEQS

CONFIGS = Path(engine.bench.__file__).parent / "configs"
MIB = 1 << 20
BF16 = torch.bfloat16
# As nvidia-smi gives them, MiB.
L4, A10, RTX_4090, L40S = 23034, 23028, 24564, 46068
A100, H100, H200, B200, PRO_6000 = 81920, 81559, 143771, 183359, 97887


def default_tokens(total: int, config: ModelConfig, weights: int) -> int:
    """As in build_engine."""
    free = GpuMemory(torch.device("cuda"), total, 0).usable(0.9) - weights
    most = DEFAULT_BATCHED_TOKENS["cuda"]
    return sensible_batched_tokens(most, total, free, lambda tokens: activation_bytes(config, BF16, tokens, 0))


def model_of(name: str, quantization: str | None = None):
    config = ModelConfig.load(CONFIGS / name)
    torch.set_default_dtype(BF16)
    try:
        model = model_class(config)(config, 64)  # its weights take no memory before they are loaded
    finally:
        torch.set_default_dtype(torch.float32)
    if quantization is not None:
        quantize(model, quantization)
    return config, model


def plan_of(total: int, name: str, quantization: str | None = None):
    """The plan, with more beside weights and activations than an H100 was seen to take."""
    config, model = model_of(name, quantization)
    weights = loaded_bytes(model)
    spec = CacheSpec(tuple(model.cache_layers()), 2, 16)
    card = GpuMemory(torch.device("cuda"), total, 0)
    tokens = default_tokens(total, config, weights)
    seqs = sensible_seqs(spec, DEFAULT_SEQS["cuda"], card.usable(0.9) - weights)
    activations = activation_bytes(config, BF16, tokens, max(seqs, 512))  # 512: prompt positions with logprobs
    needs = StepNeeds(activations, GIB // 2, GIB // 8, weights + GIB)
    budget = gpu_budget(EngineConfig("model"), weights, needs, card)  # type: ignore[arg-type]
    return plan_memory(
        budget, spec, device="cuda:0", max_model_len=None, model_max_len=config.max_position_embeddings,
        max_num_seqs=None, default_num_seqs=seqs, usual_num_seqs=DEFAULT_SEQS["cuda"], step_tokens=tokens,
    )  # fmt: skip


@pytest.mark.parametrize("total", [L4, A10, RTX_4090])
def test_an_8b_model_in_bf16_starts_on_24_gb_with_room_to_work(total):
    made = plan_of(total * MIB, "qwen3-8b")
    assert made.step_tokens == 2048
    assert made.max_model_len >= 12_000
    assert made.max_num_seqs >= 32
    assert made.kv_tokens >= 12_000
    assert made.resident_bytes + made.budget.activations <= 0.9 * total * MIB


def test_steps_of_8192_tokens_would_leave_less_of_24_gb():
    config, _ = model_of("qwen3-8b")
    more = activation_bytes(config, BF16, 8192, 0) - activation_bytes(config, BF16, 2048, 0)
    made = plan_of(L4 * MIB, "qwen3-8b")
    assert more > made.kv_bytes / 4, "a quarter of the pages"


@pytest.mark.parametrize("name, quantization", [
    ("qwen3-0.6b", None), ("qwen3-8b", None), ("qwen3-8b", "fp8"), ("gemma4-26b-a4b", "fp8"), ("gemma4-31b", "fp8"),
    ("qwen3.6-27b", "fp8"), ("qwen3.6-35b-a3b", "fp8"),
])  # fmt: skip
def test_large_gpus_keep_steps_of_8192_tokens(name, quantization):
    config, model = model_of(name, quantization)
    for total in (A100, H100, H200, B200, PRO_6000):
        assert default_tokens(total * MIB, config, loaded_bytes(model)) == 8192


def test_less_memory_beside_the_weights_means_smaller_steps():
    config, model = model_of("qwen3-8b")
    weights = loaded_bytes(model)
    assert default_tokens(L40S * MIB, config, weights) == 2048
    assert default_tokens(19 * GIB, config, weights) == 1024
    assert default_tokens(18 * GIB, config, weights) == 512
    assert default_tokens(weights, config, weights) == 512, "the plan refuses it with the numbers"
    assert default_tokens(H100 * MIB, config, 70 * GIB) < 8192
