"""``delta``: a recurrent layer's own work, without its projections, against the time that moving its states takes.

DIR needs only a config.json. A decode step reads and writes the state of each sequence once; steps take turns with
different states, so that none of them stays in a cache. A prompt is one sequence of so many tokens.
"""

import argparse
from collections.abc import Callable, Iterator

import torch

from engine.bench import floor, report
from engine.bench.moe import step_seconds
from engine.capabilities import resolve_device
from engine.config import STATE_DTYPES
from engine.core.kv.spec import StateLayer
from engine.kernels.delta import DeviceRecurrentBatch, RecurrentBatch
from engine.layers.delta import GatedDeltaNet
from engine.models.config import ModelConfig
from engine.models.config_qwen3_5 import read_qwen3_5
from engine.models.registry import model_class

_BATCHES = (1, 4, 16, 64, 256)
_PROMPTS = (64, 1024, 8192)
_STATE_BYTES = 256 << 20  # of the states that take turns: more than caches hold
_TURNS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", type=int, nargs="*", default=_BATCHES, help="sequences of a decode step")
    parser.add_argument("--mamba-ssm-cache-dtype", choices=("auto", *STATE_DTYPES), default="auto")
    parser.add_argument("--prompts", type=int, nargs="*", default=_PROMPTS, help="tokens")


def run(args: argparse.Namespace) -> Iterator[report.Row]:
    device = torch.device(resolve_device(args.device, torch.cuda.is_available()))
    config = ModelConfig.load(args.model)
    layer = make_layer(config, device)
    layer.state_dtype = state_dtype(config, args.mamba_ssm_cache_dtype, device)
    facts = {"bench": "delta", "engine": "atoll", "model": args.model.name, "state": layer.state_dtype}
    copy = floor.bandwidth(device)["copy"]
    with torch.inference_mode():
        for batch in args.batches:
            yield {**facts, **decode(layer, batch, copy), **report.machine(device)}
        for tokens in args.prompts:
            yield {**facts, **prefill(layer, tokens), **report.machine(device)}


def state_dtype(config: ModelConfig, wanted: str, device: torch.device) -> str:
    """As the engine would choose it for this model in bf16."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = model_class(config)(config, 16)
    finally:
        torch.set_default_dtype(torch.float32)
    model.set_state_dtype(wanted, device.type)
    return next(layer.dtypes[0] for layer in model.cache_layers() if isinstance(layer, StateLayer))


def make_layer(config: ModelConfig, device: torch.device) -> GatedDeltaNet:
    """Random small weights, but for the projections, which stay without memory."""
    own = read_qwen3_5(config.raw, config.rope)
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = GatedDeltaNet(
            config.hidden_size, key_heads=own.key_heads, value_heads=own.value_heads, key_dim=own.key_dim,
            value_dim=own.value_dim, conv_width=own.conv_width, eps=config.rms_norm_eps,
        )  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in layer.named_parameters(recurse=False):
        value = torch.randn(parameter.shape, device=device).mul_(0.1).to(parameter.dtype)
        setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))
    return layer


def decode(layer: GatedDeltaNet, batch: int, copy: float) -> report.Row:
    """`copy`: GB/s. `of_floor`: the time to copy the rule's states, over the time of a step."""
    _make_states(layer, 1)
    each = layer.state[0].nbytes
    turns = min(_TURNS, max(2, _STATE_BYTES // (batch * each)))
    _make_states(layer, turns * batch)
    device = layer.a_log.device
    positions, ones = torch.full((batch,), 100, device=device), torch.ones(batch, dtype=torch.int64, device=device)
    inputs = _inputs(layer, batch)

    def step(turn: int) -> Callable[[], torch.Tensor]:
        slots = torch.arange(turn * batch, (turn + 1) * batch, device=device)
        return _step(layer, inputs, positions, slots, ones)

    seconds = step_seconds([step(turn) for turn in range(turns)], device)
    moved = 2 * batch * each
    return {
        "phase": "decode",
        "batch": batch,
        "us": round(seconds * 1e6, 1),
        "tb_s": round(moved / seconds / 1e12, 3),
        "of_floor": round(moved / (copy * 1e9) / seconds, 3),
    }


def prefill(layer: GatedDeltaNet, tokens: int) -> report.Row:
    _make_states(layer, 1)
    device = layer.a_log.device
    counts, slots = torch.tensor([tokens], device=device), torch.zeros(1, dtype=torch.int64, device=device)
    step = _step(layer, _inputs(layer, tokens), torch.arange(tokens, device=device), slots, counts)
    seconds = step_seconds([step], device)
    return {"phase": "prefill", "tokens": tokens, "us": round(seconds * 1e6, 1),
            "us_per_1k_tokens": round(seconds * 1e9 / tokens, 1)}  # fmt: skip


def _step(
    layer: GatedDeltaNet,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
) -> Callable[[], torch.Tensor]:
    q_starts = counts.cumsum(0) - counts
    if not positions.is_cuda:
        on_cpu = RecurrentBatch.build(positions, slots, q_starts, counts)
        return lambda: layer._on_cpu(*inputs, on_cpu)
    if len(counts) == len(positions):
        batch = DeviceRecurrentBatch(positions, slots)
    else:
        from engine.kernels.triton_delta import num_chunks, plan_chunks

        chunks = plan_chunks(counts, num_chunks(counts.tolist()))
        batch = DeviceRecurrentBatch(positions, slots, q_starts, counts, chunks)
    return lambda: layer._on_device(*inputs, batch)


def _inputs(layer: GatedDeltaNet, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the projections would give: q, k, v and z side by side, b and a."""
    device = layer.a_log.device
    qkvz = torch.randn(tokens, layer.channels + layer.value_size, device=device).bfloat16()
    qkv, z = qkvz.split((layer.channels, layer.value_size), -1)
    return qkv, z, torch.randn(tokens, 2 * layer.value_heads, device=device).bfloat16()


def _make_states(layer: GatedDeltaNet, slots: int) -> None:
    spec = layer.cache_layer()
    layer.state = tuple(
        torch.zeros(slots, *shape, dtype=getattr(torch, dtype), device=layer.a_log.device)
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
