"""Weights on a GPU: the bits of the files, fp8 as the CPU quantises it, and little memory beside them meanwhile."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from engine.bench.author import random_checkpoint
from engine.errors import ModelError
from engine.layers.linear import Linear
from engine.layers.quant.fp8 import FP8, quantize_weight
from engine.models.base import CausalLM
from engine.models.loading.checkpoint import check_checkpoint
from engine.models.loading.loader import load_weights, quantize
from engine.worker.startup.memory import weight_bytes

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

_DEVICE = torch.device("cuda")
_CONFIG = Path(__file__).parents[2] / "engine" / "bench" / "configs" / "qwen3-8b" / "config.json"
_QUANTIZE_CHUNK = 16 << 20  # elements: float32 input, float32 quotient, and the fp8 of both
_SLACK = 32 << 20           # small tensors, rounding


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """1.7 GB: three layers in Qwen3-8B's shapes, and a smaller vocabulary."""
    config = tmp_path_factory.mktemp("config")
    (config / "config.json").write_text(json.dumps(json.loads(_CONFIG.read_text()) | {"vocab_size": 32000}))
    with random_checkpoint.temporary(config, None, 3) as directory:
        yield directory


def load(checkpoint: Path, quantization: str | None = None) -> tuple[CausalLM, int, int]:
    """The model on the GPU, and the peaks of allocated and of reserved bytes while it was loaded."""
    model = random_checkpoint.empty_model(checkpoint)
    if quantization:
        quantize(model, quantization)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with torch.inference_mode():
        load_weights(model, checkpoint, device=_DEVICE)
    torch.cuda.synchronize()
    return model, torch.cuda.max_memory_allocated() - allocated, torch.cuda.max_memory_reserved() - reserved


def from_files(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for shard in {info.shard for info in check_checkpoint(checkpoint).values()}:
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (the file is no dictionary)
                yield name, file.get_tensor(name)


def test_every_weight_has_the_bits_of_its_file(checkpoint: Path) -> None:
    model, peak, _ = load(checkpoint)
    loaded = model.weights()
    for name, value in from_files(checkpoint):
        assert torch.equal(loaded[name].cpu().view(torch.int16), value.view(torch.int16)), name
    extra = peak - weight_bytes(model)
    assert extra <= _SLACK, f"{extra / 1e6:.1f} MB beside the weights"


def test_fp8_is_what_the_cpu_makes_of_it_and_one_module_stands_in_two_forms(checkpoint: Path) -> None:
    model, peak, reserved = load(checkpoint, "fp8")
    quantized = {n: m for n, m in model.named_modules() if isinstance(m, Linear) and m.weight.dtype == FP8}
    assert len(quantized) == 4 * 3, "qkv, o, gate_up and down of each layer"
    files = dict(from_files(checkpoint))
    parts = {"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
             "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
             "self_attn.o_proj": ("self_attn.o_proj",), "mlp.down_proj": ("mlp.down_proj",)}  # fmt: skip
    for name, module in quantized.items():
        layer, kind = name.split(".", 2)[1], name.split(".", 2)[2]
        whole = torch.cat([files[f"model.layers.{layer}.{part}.weight"] for part in parts[kind]])
        weight, scale = quantize_weight(whole)
        assert module.scale is not None
        differing = (module.weight.cpu().view(torch.uint8) != weight.view(torch.uint8)).sum().item()
        # A GPU divides by multiplying with the reciprocal: a scale may be its neighbour, and a value the next one.
        assert differing <= weight.numel() // 10_000, f"{name}: {differing} of {weight.numel()} values differ"
        torch.testing.assert_close(module.scale.cpu(), scale, rtol=3e-7, atol=0)
    assert torch.equal(model.weights()["lm_head.weight"].cpu(), files["lm_head.weight"])

    weights = weight_bytes(model)
    largest = max(2 * m.weight.numel() for m in quantized.values())
    bound = largest + (4 + 4 + 2) * _QUANTIZE_CHUNK + _SLACK
    assert peak - weights <= bound, f"{(peak - weights) / 1e6:.0f} MB beside the weights, bound {bound / 1e6:.0f} MB"
    assert reserved - weights <= 2e9, f"{(reserved - weights) / 1e9:.2f} GB of the card beside the weights"


def test_a_failing_file_leaves_no_memory_behind(checkpoint: Path, tmp_path: Path) -> None:
    """The shards are links but for one, which another process cuts short while it is read."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    victim = tmp_path / "model-00002.safetensors"
    content = victim.read_bytes()
    victim.unlink()
    victim.write_bytes(content)
    model = random_checkpoint.empty_model(tmp_path)
    before = torch.cuda.memory_allocated()
    seen = []

    def progress(_stage: str, done: int, _total: int) -> None:
        if not seen:
            seen.append(done)
            with victim.open("r+b") as file:
                file.truncate(len(content) // 2)

    with pytest.raises(ModelError, match="model-00002"):
        load_weights(model, tmp_path, progress, _DEVICE)
    del model
    gc.collect()  # the error's traceback and the thread that raised it hold each other
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= _SLACK
