"""``moe``: one layer's router and experts, compared with the time that reading the chosen experts' weights takes.

DIR needs only a config.json; without DIR, the shapes of three shipped models are measured. Each step is run with
several inputs in turn, which choose different experts, so that no weight stays in a cache.

The search for better tiles is `python -m engine.kernels.tuning`.
"""

import argparse
from collections.abc import Iterator

import torch

from engine.bench import floor, report
from engine.capabilities import resolve_device
from engine.kernels.moe.tiles import Shape
from engine.kernels.tuning.experts_layer import inputs_for, make_subject
from engine.kernels.tuning.timing import step_seconds
from engine.layers.moe import SparseMLP

DEFAULT_MODELS = ("gemma4-26b-a4b", "qwen3.6-35b-a3b", "qwen3-30b-a3b")
_TOKENS = (1, 4, 16, 64, 256, 4096)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, nargs="+", help="of a step; default: several")
    parser.add_argument("--quantization", choices=["none", "fp8"], help="default: both")


def run(args: argparse.Namespace) -> Iterator[report.Row]:
    device = torch.device(resolve_device(args.device, torch.cuda.is_available()))
    forms = [args.quantization] if args.quantization else ["fp8", "none"]
    configs = [args.model] if args.model else [floor.CONFIGS / name for name in DEFAULT_MODELS]
    read = floor.bandwidth(device)["copy"]
    for config in configs:
        for form in forms:
            subject = make_subject(config, device, form)
            for tokens in args.tokens or _TOKENS:
                row = measure(subject.layer, subject.shape, tokens, read)
                yield {**subject.facts, **row, **report.machine(device)}
            del subject


def measure(layer: SparseMLP, shape: Shape, tokens: int, read: float) -> report.Row:
    """`read`: GB/s. `of_floor`: the time to read the chosen experts once, over the time of a step."""
    inputs = inputs_for(layer, shape, tokens)
    active = sum(int(layer.gate.choose(x).experts.unique().numel()) for x in inputs) / len(inputs)
    seconds = step_seconds([lambda x=x: layer(x) for x in inputs], inputs[0].device)
    weight_bytes = active * 3 * shape.inner * shape.hidden * shape.itemsize
    flops = 2 * tokens * shape.top_k * 3 * shape.inner * shape.hidden
    return {
        "tokens": tokens,
        "active_experts": round(active, 1),
        "us": round(seconds * 1e6, 1),
        "tb_s": round(weight_bytes / seconds / 1e12, 3),
        "tflop_s": round(flops / seconds / 1e12, 2),
        "of_floor": round(weight_bytes / (read * 1e9) / seconds, 3),
    }
