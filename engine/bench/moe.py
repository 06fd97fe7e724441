"""``moe``: one layer's router and experts alone, against the time that reading the chosen experts' weights takes.

DIR needs only a config.json. Each step is run with several inputs in turn, which choose different experts: none of them
stays in a cache. With --search, the tiles of the GPU's kernels are tried out instead (engine/kernels/moe_tiles.py).
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from engine.bench import floor, report
from engine.capabilities import resolve_device
from engine.kernels.moe_tiles import MatrixTiles, Shape, Tiles, VectorTiles, tiles_for
from engine.layers.moe import Routing, SparseMLP
from engine.layers.quant import FP8
from engine.models.config import read_json

_TOKENS = (1, 4, 16, 64, 256, 4096)
_INPUTS = 8  # that take turns
_REPEATS = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, nargs="+", default=_TOKENS)
    parser.add_argument("--quantization", choices=["none", "fp8"], help="default: both")
    parser.add_argument("--search", action="store_true", help="try tiles, and print the best of them (a GPU only)")


def run(args: argparse.Namespace) -> Iterator[report.Row]:
    device = torch.device(resolve_device(args.device, torch.cuda.is_available()))
    raw = read_json(args.model / "config.json")
    facts = {"bench": "moe", "engine": "atoll", "model": args.model.name}
    read = floor.bandwidth(device)["copy"]
    for quantization in [args.quantization] if args.quantization else ["none", "fp8"]:
        layer, shape = make_layer(raw, device, fp8=quantization == "fp8")
        for tokens in args.tokens:
            rows = search(layer, shape, tokens) if args.search else [measure(layer, shape, tokens, read)]
            for row in rows:
                yield {**facts, "quantization": quantization, **row, **report.machine(device)}
        del layer


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
    inputs = _inputs(layer, shape, tokens)
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


def search(layer: SparseMLP, shape: Shape, tokens: int) -> Iterator[report.Row]:
    """The fastest tiles for a number of tokens, one kernel after the other; a row for each that beats all before it."""
    from engine.kernels.launch import shared_memory
    from engine.kernels.triton_moe import routed_experts

    inputs = _inputs(layer, shape, tokens)
    shared = shared_memory(inputs[0].device)
    routings = [layer.gate.choose(x) for x in inputs]
    experts = layer.experts

    def seconds(tiles: Tiles) -> float:
        def step(x: torch.Tensor, routing: Routing) -> torch.Tensor:
            return routed_experts(
                x, *routing, experts.gate_up_proj.weight, experts.down_proj.weight, experts.gate_up_proj.scale,
                experts.down_proj.scale, gate=experts.gate, tiles=tiles,
            )  # fmt: skip

        steps = [lambda x=x, r=r: step(x, r) for x, r in zip(inputs, routings, strict=True)]
        return step_seconds(steps, inputs[0].device)

    best = tiles_for(shape, tokens, shared)
    fastest = seconds(best)
    yield {"tokens": tokens, "us": round(fastest * 1e6, 1), "tiles": str(best)}
    for name in ("gate_up", "down"):
        for candidate in candidates(best, name, shape.itemsize, shared):
            took = seconds(candidate)
            if took < fastest * 0.99:
                best, fastest = candidate, took
                yield {"tokens": tokens, "us": round(fastest * 1e6, 1), "tiles": str(best)}


def candidates(start: Tiles, name: str, itemsize: int, shared: int) -> Iterator[Tiles]:
    """`start` with other tiles for the kernel `name`, such as the card has memory for."""
    weights = 2 if name == "gate_up" else 1
    if not start.rows:
        for block_n, block_k, warps in product((1, 2, 4, 8, 16), (256, 512, 1024, 2048), (1, 2, 4, 8)):
            if 16 <= block_n * block_k * itemsize // (32 * warps) <= 128:
                yield start._replace(**{name: VectorTiles(block_n, block_k, warps)})
        return
    for block_n, width, warps, stages in product((64, 128), (64, 128, 256), (4, 8), (2, 3, 4, 5, 6)):
        block_k = width // itemsize
        needed = (weights * block_n + start.rows) * width * stages + 1024
        numbers = weights * block_n * start.rows // (32 * warps)  # of results, that a thread holds
        if shared // 4 <= needed <= shared and numbers <= 128:
            yield start._replace(**{name: MatrixTiles(block_n, block_k, warps, stages)})


def _inputs(layer: SparseMLP, shape: Shape, tokens: int) -> list[torch.Tensor]:
    device = layer.gate.weight.device
    generator = torch.Generator(device=device).manual_seed(1)
    wide = torch.randn(_INPUTS, tokens, shape.hidden, device=device, generator=generator)
    return list(wide.to(layer.gate.weight.dtype))


def step_seconds(steps: Sequence[Callable[[], object]], device: torch.device) -> float:
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
        for _ in range(_REPEATS):
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
