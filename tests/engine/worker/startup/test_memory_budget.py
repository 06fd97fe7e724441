"""A GPU's share, overhead and refusals, computed from what a pretended card says."""

from dataclasses import dataclass

import pytest
import torch

from engine.config import EngineConfig
from engine.core.kv.planner import GIB
from engine.errors import OutOfMemoryPlanError
from engine.models.config.model import ModelConfig
from engine.models.loading.loader import fill_randomly, quantize
from engine.models.registry import model_class
from engine.worker.startup.memory import GpuMemory, StepNeeds, check_weights_fit, gpu_budget, loaded_bytes, weight_bytes

DEVICE = torch.device("cuda", 0)


@dataclass
class FakeGpu:
    """80 GiB: what all processes hold, and which part of it torch reserved in this one."""

    in_use: int
    reserved: int = 0


@pytest.fixture
def card(monkeypatch):
    state = FakeGpu(GIB // 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB - state.in_use, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: state.reserved)
    return state


@pytest.fixture
def model(tiny_llama_dir):
    config = ModelConfig.load(tiny_llama_dir("gqa"))
    torch.set_default_dtype(torch.float16)  # not packed on a CPU, so of the same size as on a GPU
    try:
        return model_class(config)(config, 64)
    finally:
        torch.set_default_dtype(torch.float32)


def config(utilization=0.9, **kwargs) -> EngineConfig:
    return EngineConfig("model", gpu_memory_utilization=utilization, **kwargs)  # type: ignore[arg-type]


def budget(seen: GpuMemory, weights: int, in_use: int, utilization: float = 0.9):
    return gpu_budget(config(utilization), weights, StepNeeds(GIB, GIB // 4, GIB // 8, in_use), seen)


def test_alone_on_the_card_the_context_counts_as_ours(card):
    seen = GpuMemory.now(DEVICE)
    assert (seen.total, seen.others) == (80 * GIB, 0)
    made = budget(seen, 16 * GIB, in_use=17 * GIB)
    assert made.usable == 72 * GIB
    assert made.overhead == pytest.approx(GIB, abs=64 << 20), "the context, and all that is there beside the weights"
    assert (made.activations, made.graphs, made.buffers) == (GIB, GIB // 4, GIB // 8)
    assert made.left == 72 * GIB - 16 * GIB - made.overhead - GIB - GIB // 4 - GIB // 8


def test_another_process_does_not_shrink_the_share_while_there_is_room(card):
    """As in vLLM: two instances with 0.45 each fit on one card."""
    card.in_use = 36 * GIB + GIB // 2
    seen = GpuMemory.now(DEVICE)
    assert 0 <= 36 * GIB - seen.others <= GIB // 4
    made = budget(seen, 16 * GIB, in_use=36 * GIB + 17 * GIB, utilization=0.45)
    assert made.usable == 36 * GIB
    assert GIB <= made.overhead <= GIB + GIB // 4 + (64 << 20)
    assert budget(seen, 16 * GIB, in_use=53 * GIB, utilization=0.9).usable == 80 * GIB - seen.others


def test_an_engine_that_this_process_has_already_is_another(card):
    card.in_use, card.reserved = 11 * GIB, 10 * GIB + GIB // 2
    assert GpuMemory.now(DEVICE).others == card.reserved


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_the_size_of_weights_is_known_before_they_are_there(model, quantization):
    if quantization:
        quantize(model, quantization)
    expected = loaded_bytes(model)
    fill_randomly(model)
    assert weight_bytes(model) == expected


def test_weights_that_cannot_fit_are_refused_before_they_are_read(card, model):
    check_weights_fit(model, config(), GpuMemory.now(DEVICE))
    with pytest.raises(OutOfMemoryPlanError, match=r"weights take .* of the 80\.00 GiB") as refusal:
        check_weights_fit(model, config(1e-9), GpuMemory.now(DEVICE))
    assert refusal.value.flag == "--gpu-memory-utilization"
    assert refusal.value.hint.startswith("What helps: raise --gpu-memory-utilization; --quantization fp8")
    with pytest.raises(OutOfMemoryPlanError, match=r"other processes hold 80\.00 GiB") as refusal:
        check_weights_fit(model, config(quantization="fp8"), GpuMemory(DEVICE, 80 * GIB, 80 * GIB))
    assert refusal.value.hint == "What helps: a smaller model or a larger GPU."
