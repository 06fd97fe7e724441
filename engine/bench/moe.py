"""``moe``: one layer's router and experts alone, against the time that reading the chosen experts' weights takes.

DIR needs only a config.json; without one the shapes of three shipped models are measured. Each step is run with several
inputs in turn, which choose different experts: none of them stays in a cache.

``--search`` tries out tiles of the GPU's kernels instead, for at most ``--budget`` seconds, and prints the best for
each number of tokens as they are found. With ``--out engine/kernels/moe/tuned.json`` they are used from then on.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from engine.bench import floor, moe_search, report
from engine.bench.moe_layer import inputs_for, make_subject
from engine.bench.timing import step_seconds
from engine.capabilities import resolve_device
from engine.errors import ConfigError
from engine.kernels.moe.tiles import Shape, write_measured
from engine.layers.moe import SparseMLP

DEFAULT_MODELS = ("gemma4-26b-a4b", "qwen3.6-35b-a3b", "qwen3-30b-a3b")
_TOKENS = (1, 4, 16, 64, 256, 4096)
_SEARCH_TOKENS = (1, 16, 64, 256, 4096, 4, 1024, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, nargs="+", help="of a step; default: several")
    parser.add_argument("--quantization", choices=["none", "fp8"], help="default: both")
    parser.add_argument("--search", action="store_true", help="try tiles, and print the best of them (a GPU only)")
    parser.add_argument("--budget", type=float, default=150, metavar="SECONDS", help="of a search (default: 150)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where a search also writes what it found, as JSON")


def run(args: argparse.Namespace) -> Iterator[report.Row]:
    device = torch.device(resolve_device(args.device, torch.cuda.is_available()))
    if args.search and device.type == "cpu":
        raise ConfigError("--search needs a GPU: tiles of its kernels are timed.", "--search")
    forms = [args.quantization] if args.quantization else ["fp8", "none"]
    configs = [args.model] if args.model else [floor.CONFIGS / name for name in DEFAULT_MODELS]
    if args.search:
        yield from _run_search(args, configs, forms, device)
        return
    read = floor.bandwidth(device)["copy"]
    for config in configs:
        for form in forms:
            subject = make_subject(config, device, form)
            for tokens in args.tokens or _TOKENS:
                row = measure(subject.layer, subject.shape, tokens, read)
                yield {**subject.facts, **row, **report.machine(device)}
            del subject


def _run_search(
    args: argparse.Namespace, configs: Sequence[Path], forms: Sequence[str], device: torch.device
) -> Iterator[report.Row]:
    from engine.kernels.runtime.launcher import target_of

    start = time.monotonic()
    subjects = [make_subject(config, device, form) for form in forms for config in configs]
    gpu = target_of(device)
    todo = moe_search.cells(subjects, args.tokens or _SEARCH_TOKENS, gpu.shared_memory, gpu)
    done = 0
    with torch.inference_mode(), moe_search.OnGpu(todo, device) as ready:
        budget = args.budget - (time.monotonic() - start)
        for subject, measured, row in moe_search.search(todo, ready, budget):
            if args.out is not None:
                write_measured(args.out, [measured])
            done += 1
            yield {**subject.facts, **row, **report.machine(device)}
    report.say(f"{done} of {len(todo)} searched in {time.monotonic() - start:.0f} s")


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
