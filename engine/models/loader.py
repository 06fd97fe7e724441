"""Weights from safetensors files straight into the model's tensors, one tensor at a time: no second copy in memory."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from engine.errors import ModelError
from engine.models.base import CausalLM
from engine.models.checkpoint import check_checkpoint

Progress = Callable[[str, int, int], None]


def load_weights(model: CausalLM, model_dir: Path, progress: Progress | None = None) -> None:
    """Fill `model`. Raises ModelError naming the first tensor that is missing, unexpected or misshapen."""
    tensors = check_checkpoint(model_dir)
    wanted = model.weights()
    if missing := [name for name in wanted if name not in tensors]:
        raise ModelError(f"The checkpoint {model_dir} lacks tensor {missing[0]}{_and_more(missing)}.")
    if unexpected := [name for name in tensors if name not in wanted and not model.ignores(name)]:
        raise ModelError(f"The checkpoint {model_dir} holds tensor {unexpected[0]}{_and_more(unexpected)}, which this "
                         "architecture does not have.")
    for name, target in wanted.items():
        if tensors[name].shape != tuple(target.shape):
            raise ModelError(f"Tensor {name} has shape {list(tensors[name].shape)} in the checkpoint; config.json "
                             f"implies {list(target.shape)}.")
    total, done = sum(tensors[name].num_bytes for name in wanted), 0
    by_shard: dict[Path, list[str]] = {}
    for name in wanted:
        by_shard.setdefault(tensors[name].shard, []).append(name)
    for shard, names in by_shard.items():
        with safe_open(shard, framework="pt") as file:
            for name in names:
                wanted[name].copy_(file.get_tensor(name))
                done += tensors[name].num_bytes
                if progress:
                    progress("loading weights", done, total)


def fill_randomly(model: CausalLM, seed: int = 0) -> None:
    """Random weights in the real shapes (load_format="dummy"): benchmarks and sizing without a checkpoint."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for name, target in model.weights().items():
        if name.endswith("norm.weight"):
            target.fill_(1)
        else:
            target.normal_(0, 0.02, generator=generator)


def finalize(model: CausalLM) -> None:
    """Let every layer settle into its fastest form."""
    for module in model.modules():
        settle = getattr(module, "finalize", None)
        if settle is not None:
            settle()


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
