"""A model in its real shape with random weights and a tokenizer of bytes: what a bundle and an installation want."""

import json
from pathlib import Path

import torch
from gpu_kit import centre_of
from safetensors.torch import save_file
from tiny_llama import save_byte_tokenizer

from engine.models.config.model import ModelConfig
from engine.models.registry import model_class

SHARD_BYTES = 4 << 30


def save_random_model(config: Path, directory: Path, device: torch.device) -> None:
    """Write the model of config.json `config` in bf16, drawn on `device`, into `directory`, in shards."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_bytes(config.read_bytes())
    parsed = ModelConfig.load(directory)
    with torch.device(device):
        shapes = {name: tuple(t.shape) for name, t in model_class(parsed)(parsed, 16).weights().items()}
    family = "gemma4" if parsed.raw["model_type"].startswith("gemma4") else "qwen3.5"
    generator = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        scales = any(word in name for word in ("norm", "scalar", "scale"))
        weight = centre_of(family, name, shape) + 0.1 * noise if scales else noise * 0.02
        shard[name] = weight.cpu()
        if sum(t.nbytes for t in shard.values()) > SHARD_BYTES:
            _flush(shard, index, directory)
    _flush(shard, index, directory)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    _tokenizer(directory, parsed.raw["vocab_size"])


def _flush(shard: dict[str, torch.Tensor], index: dict[str, str], directory: Path) -> None:
    name = f"model-{len(set(index.values())) + 1:05d}.safetensors"
    save_file(shard, directory / name)
    index |= dict.fromkeys(shard, name)
    shard.clear()


def _tokenizer(directory: Path, vocab_size: int) -> None:
    """Every id that the model may choose has a text."""
    save_byte_tokenizer(directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"w{i}": i for i in range(len(vocab), vocab_size)}
    path.write_text(json.dumps(tokenizer))
