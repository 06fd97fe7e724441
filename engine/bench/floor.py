"""The physical limit of one stream: every weight crosses the memory bus once a token."""

import statistics
import time
from pathlib import Path

import torch

from engine.models.checkpoint import check_checkpoint
from engine.models.config import ModelConfig

_BYTES = 256 << 20  # far larger than any cache


def bandwidth(device: torch.device, repeats: int = 9) -> dict[str, float]:
    """GB/s: `copy` (bytes read plus bytes written, as cards are usually rated) and `read` (a sum, nothing written)."""
    source = torch.ones(_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return {
        "copy": 2 * _BYTES / _median_seconds(lambda: target.copy_(source), device, repeats) / 1e9,
        "read": _BYTES / _median_seconds(lambda: source.sum(), device, repeats) / 1e9,
    }


def bytes_per_token(model_dir: Path) -> int:
    """Bytes of weights that one decoded token must read: all but an embedding table that is no output head too.

    From the checkpoint if there is one, from config.json in bf16 (dummy weights) if not.
    """
    config = ModelConfig.load(model_dir)
    if any(model_dir.glob("*.safetensors")):
        tensors = check_checkpoint(model_dir)
        total = sum(t.num_bytes for t in tensors.values())
        if not config.tie_word_embeddings:
            total -= sum(t.num_bytes for name, t in tensors.items() if name.endswith("embed_tokens.weight"))
        return total
    heads = config.num_heads + 2 * config.num_kv_heads
    layer = config.hidden_size * config.head_dim * (heads + config.num_heads)
    layer += 3 * config.hidden_size * config.intermediate_size
    return 2 * (config.num_layers * layer + config.hidden_size * config.vocab_size)


def _median_seconds(work, device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
