"""Checkpoints of random numbers with a model's real shapes, made from its config.json alone."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.errors import AtollError
from engine.models.base import CausalLM
from engine.models.config.model import ModelConfig, read_json
from engine.models.registry import empty_model

_POOL = (32 << 20) + 1   # random numbers that all tensors share: drawing new ones for each would take minutes
_DEFAULT_BYTES = 8 << 30


def write(config_dir: Path, target: Path, *, num_layers: int | None = None) -> Path:
    """Write config.json, cut to `num_layers`, and bf16 weights, a file for each layer and one for the rest."""
    raw = read_json(config_dir / "config.json")
    raw["num_hidden_layers"] = num_layers or raw["num_hidden_layers"]
    (target / "config.json").write_text(json.dumps(raw))
    pool = torch.empty(_POOL, dtype=torch.bfloat16).normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    at = 0
    for part, names in enumerate(_by_layer(empty_model(target))):
        tensors = {}
        for name, shape in names.items():
            size = shape.numel()
            copies = -(-(at + size) // _POOL)
            tensors[name] = pool.repeat(copies)[at : at + size].view(shape)
            at = (at + size) % _POOL
        save_file(tensors, target / f"model-{part:05}.safetensors")
    return target


def num_bytes(config_dir: Path) -> tuple[int, int]:
    """Bytes of (everything except the layers, one layer) of the bf16 weights that a config.json describes."""
    rest, *layers = _by_layer(empty_model(config_dir))
    return 2 * sum(s.numel() for s in rest.values()), 2 * sum(s.numel() for s in layers[0].values())


def layers_within(config_dir: Path, limit: int = _DEFAULT_BYTES) -> int:
    """How many of the model's layers a checkpoint of at most `limit` bytes holds; one at least."""
    rest, layer = num_bytes(config_dir)
    return max(1, min(ModelConfig.load(config_dir).num_layers, (limit - rest) // layer))


@contextmanager
def temporary(config_dir: Path, root: Path | None, num_layers: int) -> Iterator[Path]:
    """A checkpoint of `num_layers` layers under `root` (default: memory, if it is there), removed afterwards."""
    rest, layer = num_bytes(config_dir)
    need = rest + num_layers * layer
    shm = Path("/dev/shm")  # noqa: S108 (the directory made there has a name of its own)
    root = root or (shm if shm.is_dir() else Path(tempfile.gettempdir()))
    free = shutil.disk_usage(root).free
    if free < need * 1.02:
        raise AtollError(f"{root} has {free / 1e9:.1f} GB free; {num_layers} layers take {need / 1e9:.1f} GB.",
                         "Give another place with --dir, or fewer --layers.")
    with tempfile.TemporaryDirectory(prefix="atoll-load-", dir=root) as directory:
        yield write(config_dir, Path(directory), num_layers=num_layers)


def _by_layer(model: CausalLM) -> list[dict[str, torch.Size]]:
    """Shapes by name: first those outside of layers, then a dictionary for each layer."""
    found: dict[int, dict[str, torch.Size]] = {-1: {}}
    for name, target in model.weights().items():
        words = name.split(".")
        layer = int(words[words.index("layers") + 1]) if "layers" in words else -1
        found.setdefault(layer, {})[name] = target.shape
    return [found[layer] for layer in sorted(found)]
