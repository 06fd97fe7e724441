"""The physical limit of one stream: for each token, every weight crosses the memory bus once and every state twice."""

import statistics
import time
from pathlib import Path

import torch

from engine.core.kv.spec import StateLayer
from engine.kernels.tuning.experts_layer import read_shape
from engine.models.config.model import ModelConfig
from engine.models.loading.checkpoint import check_checkpoint
from engine.models.registry import empty_model
from engine.plan import SHAPES

CONFIGS = SHAPES
_BYTES = 256 << 20  # far larger than any cache
_CALLS = 20         # calls on a GPU between two synchronisations


def bandwidth(device: torch.device, repeats: int = 9) -> dict[str, float]:
    """GB/s: `copy` (bytes read plus bytes written, as GPUs are usually rated) and `read` (a sum, nothing written)."""
    source = torch.ones(_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return {
        "copy": 2 * _BYTES / _median_seconds(lambda: target.copy_(source), device, repeats) / 1e9,
        "read": _BYTES / _median_seconds(lambda: source.sum(), device, repeats) / 1e9,
    }


def bytes_per_token(model_dir: Path, state_dtype: str = "auto", device: str = "cpu") -> int:
    """Bytes that one decoded token must move: all weights except lookup tables (embeddings that are not also the output
    head), and only the experts that one token goes to; recurrent states are read and written.

    Computed from the checkpoint if there is one, else from config.json for bf16 (dummy weights). `state_dtype`: the
    value of --mamba-ssm-cache-dtype.
    """
    config = ModelConfig.load(model_dir)
    tensors = check_checkpoint(model_dir) if any(model_dir.glob("*.safetensors")) else {}
    tables = ("embed_tokens_per_layer.weight", *(() if config.tie_word_embeddings else ("embed_tokens.weight",)))
    model = empty_model(model_dir)
    model.set_state_dtype(state_dtype, device)
    states = sum(2 * sum(layer.sizes) for layer in model.cache_layers() if isinstance(layer, StateLayer))
    dense, experts = 0, 0
    for name, target in model.weights().items():
        size = tensors[name].num_bytes if name in tensors else 2 * target.numel()
        if ".experts." in name:
            experts += size
        elif not name.endswith(tables):
            dense += size
    if experts:
        shape, _ = read_shape(config.raw)
        experts = experts * shape.top_k // shape.num_experts
    return dense + experts + states


def _median_seconds(work, device: torch.device, repeats: int) -> float:
    """Median seconds of one call. On a GPU several calls are queued at a time, because synchronising after each would
    distort the time."""
    times, calls = [], _CALLS if device.type == "cuda" else 1
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times[1:])
