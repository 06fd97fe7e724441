"""``moe``: one layer's router and experts alone, against the time that reading the chosen experts' weights takes.

DIR needs only a config.json; without one the shapes of three shipped models are measured. Each step is run with several
inputs in turn, which choose different experts: none of them stays in a cache.

``--search`` tries out tiles of the GPU's kernels instead, for at most ``--budget`` seconds, and prints the best for
each number of tokens as they are found. With ``--out engine/kernels/moe/tuned.json`` they are used from then on.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine.bench import floor, report
from engine.capabilities import resolve_device
from engine.errors import ConfigError
from engine.kernels.moe.tiles import Shape, write_measured
from engine.layers.moe import SparseMLP
from engine.layers.quant import FP8, quantize_weight
from engine.models.config.model import read_json

if TYPE_CHECKING:
    from engine.kernels.moe.decode import Beside

DEFAULT_MODELS = ("gemma4-26b-a4b", "qwen3.6-35b-a3b", "qwen3-30b-a3b")
_TOKENS = (1, 4, 16, 64, 256, 4096)
_SEARCH_TOKENS = (1, 16, 64, 256, 4096, 4, 1024, 2)
_INPUTS = 8  # that take turns
_REPEATS = 15


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
    from engine.bench import moe_search
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


@dataclass(slots=True)
class Subject:
    """One layer: random weights in a model's shapes."""

    model: str
    quantization: str
    layer: SparseMLP
    shape: Shape
    beside: "Beside | None"  # the MLP beside the experts, which only a search runs
    width: int

    @property
    def facts(self) -> report.Row:
        return {"bench": "moe", "engine": "atoll", "model": self.model, "quantization": self.quantization}


def make_subject(config: Path, device: torch.device, quantization: str) -> Subject:
    raw = read_json(config / "config.json")
    layer, shape = make_layer(raw, device, fp8=quantization == "fp8")
    width, factor = floor.beside_experts(raw)
    beside = None
    if width and device.type == "cuda":
        from engine.kernels.moe.decode import Beside

        def weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            values = torch.randn(rows, columns, device=device).mul_(0.02).bfloat16()
            return quantize_weight(values) if shape.itemsize == 1 else (values, None)

        first, second = weight(2 * width, shape.hidden), weight(shape.hidden, width)
        beside = Beside(*first, *second, layer.gate.weight[:1] if factor else None)
    return Subject(config.name, quantization, layer, shape, beside, width)


def make_layer(raw: dict[str, Any], device: torch.device, *, fp8: bool) -> tuple[SparseMLP, Shape]:
    """Random weights in a model's shapes: a router that uses all experts alike, and the experts."""
    shape, gate = floor.read_shape(raw, 1 if fp8 else 2)
    dtype = torch.bfloat16
    layer = SparseMLP(shape.hidden, shape.inner, shape.num_experts, shape.top_k)
    layer.experts.gate = gate
    generator = torch.Generator(device=device).manual_seed(0)
    for module in (layer.gate, layer.experts.gate_up_proj, layer.experts.down_proj):
        weight = torch.empty(module.weight.shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
        module.weight = nn.Parameter(weight, requires_grad=False)
        module.quantization = "fp8" if fp8 and module is not layer.gate else None
        module.finalize()
    layer.experts.finalize()
    if fp8 and layer.experts.down_proj.weight.dtype != FP8:
        shape = shape._replace(itemsize=2)
    return layer, shape


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


def inputs_for(layer: SparseMLP, shape: Shape, tokens: int) -> list[torch.Tensor]:
    device = layer.gate.weight.device
    generator = torch.Generator(device=device).manual_seed(1)
    wide = torch.randn(_INPUTS, tokens, shape.hidden, device=device, generator=generator)
    return list(wide.to(layer.gate.weight.dtype))


def step_seconds(steps: Sequence[Callable[[], object]], device: torch.device, repeats: int = _REPEATS) -> float:
    """Median time of a step. On a GPU all are captured in one graph, as decode steps are."""
    with torch.inference_mode():
        for step in steps:
            step()
        if device.type != "cuda":
            return statistics.median(_timed(step) for step in steps)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in steps:
                step()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times[2:]) / len(steps)


def _timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
