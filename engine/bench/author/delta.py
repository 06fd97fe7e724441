"""``delta``: a recurrent layer without its projections, compared with the time that moving its states takes.

DIR needs only a config.json. A decode step reads and writes the state of each sequence once; steps take turns with
different states, so that no state stays in a cache. A prompt is one sequence with the given number of tokens.

``--search`` times variants of the kernels instead (prompt kernels together with the kernels around them) for at most
``--budget`` seconds, to find the best tiles, warps and stages for the constants in engine/kernels/recurrent. A summary
names the best.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from engine.bench import floor, report
from engine.capabilities import resolve_device
from engine.config import STATE_DTYPES
from engine.core.kv.spec import StateLayer
from engine.errors import ConfigError
from engine.kernels.recurrent.reference import DeviceRecurrentBatch, RecurrentBatch
from engine.kernels.tuning.timing import step_seconds
from engine.layers.gated_delta import GatedDeltaNet
from engine.models.config.model import ModelConfig
from engine.models.config.qwen3_5 import read_qwen3_5
from engine.models.registry import model_class

DEFAULT_MODELS = ("qwen3.6-27b",)
_BATCHES = (1, 4, 16, 64, 256)
_PROMPTS = (64, 1024, 8192)
_STATE_BYTES = 256 << 20  # total size of the states that take turns: more than caches hold
_TURNS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", type=int, nargs="*", default=_BATCHES, help="sequences of a decode step")
    parser.add_argument("--mamba-ssm-cache-dtype", choices=("auto", *STATE_DTYPES), default="auto")
    parser.add_argument("--prompts", type=int, nargs="*", default=_PROMPTS, help="tokens")
    parser.add_argument("--search", action="store_true", help="time variants of the kernels (a GPU only)")
    parser.add_argument("--budget", type=float, default=120, metavar="SECONDS", help="of a search (default: 120)")


def run(args: argparse.Namespace) -> Iterator[report.Row]:
    device = torch.device(resolve_device(args.device, torch.cuda.is_available()))
    if args.search and device.type == "cpu":
        raise ConfigError("--search needs a GPU: variants of its kernels are timed.", "--search")
    model = args.model or floor.CONFIGS / DEFAULT_MODELS[0]
    config = ModelConfig.load(model)
    layer = make_layer(config, device)
    layer.state_dtype = state_dtype(config, args.mamba_ssm_cache_dtype, device)
    facts = {"bench": "delta", "engine": "atoll", "model": model.name, "state": layer.state_dtype}
    copy = floor.bandwidth(device)["copy"]
    with torch.inference_mode():
        if args.search:
            for row in search(layer, copy, args.budget):
                yield {**facts, **row, **report.machine(device)}
            return
        for batch in args.batches:
            yield {**facts, **decode(layer, batch, copy), **report.machine(device)}
        for tokens in args.prompts:
            yield {**facts, **prefill(layer, tokens), **report.machine(device)}


def state_dtype(config: ModelConfig, wanted: str, device: torch.device) -> str:
    """The dtype that the engine would choose for this model in bf16."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = model_class(config)(config, 16)
    finally:
        torch.set_default_dtype(torch.float32)
    model.set_state_dtype(wanted, device.type)
    return next(layer.dtypes[0] for layer in model.cache_layers() if isinstance(layer, StateLayer))


def make_layer(config: ModelConfig, device: torch.device) -> GatedDeltaNet:
    """A layer with random small weights; its projections get no memory."""
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
    slots = torch.arange(turns * batch, device=device).split(batch)
    steps = [_step(layer, inputs, positions, each, ones) for each in slots]
    return _decode_row(layer, batch, step_seconds(steps, device), copy)


def _decode_row(layer: GatedDeltaNet, batch: int, seconds: float, copy: float) -> report.Row:
    moved = 2 * batch * layer.state[0][0].nbytes
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


# -- variants ---------------------------------------------------------------------------------------------------------

_SEARCH_BATCHES = (1, 4, 16, 64)
_SEARCH_PROMPTS = ((8192,), (1024,) * 8)
_DECODE = [{"block_v": v, "num_warps": w} for v in (16, 32, 64, 128) for w in (2, 4, 8)]
_SOLVE = [{"BLOCK_K": b, "BLOCK_V": b, "num_warps": 1, "num_stages": s} for b in (16, 32, 64) for s in (1, 2)]
_RUN = [{"BLOCK_V": v, "num_warps": w, "num_stages": s} for v, w in ((16, 4), (32, 4), (64, 4), (64, 8), (128, 8))
        for s in (1, 2, 3)]  # fmt: skip


def search(layer: GatedDeltaNet, copy: float, budget: float) -> Iterator[report.Row]:
    """A row for every variant, with its options; for variants that do not fit the GPU, with the driver's message. After
    `budget` seconds the rest is left out."""
    from engine.kernels.runtime.compile_ahead import compile_ahead
    from engine.kernels.runtime.driver import KernelError
    from engine.kernels.runtime.launcher import recording

    device, deadline = layer.a_log.device, time.monotonic() + budget
    cases = [*_decode_cases(layer), *_prompt_cases(layer)]
    with recording() as jobs:
        for _, steps in cases:
            for step in steps():
                step()
    compile_ahead(jobs, torch.cuda.get_device_capability(device))
    best: dict[str, tuple[float, report.Row]] = {}
    for number, (facts, steps) in enumerate(cases):
        if time.monotonic() > deadline:
            report.say(f"the time is up: {len(cases) - number} of {len(cases)} variants are left out")
            break
        try:
            seconds = step_seconds(steps(), device)
        except KernelError as error:
            yield {**facts, "error": str(error)}
            continue
        options = {name: value for name, value in facts.items() if name not in _CASE}
        case = " ".join(str(facts[name]) for name in (*_CASE, "kernel") if name in facts)
        best[case] = min(best.get(case, (seconds, options)), (seconds, options), key=lambda each: each[0])
        if facts["phase"] == "decode":
            yield {**facts, **_decode_row(layer, int(facts["batch"]), seconds, copy)}
        else:
            yield {**facts, "us": round(seconds * 1e6, 1)}
    for case, (seconds, options) in best.items():
        report.say(f"best of {case}: {options}, {seconds * 1e6:.1f} us")


_CASE = ("phase", "batch", "prompts", "tokens")  # what a row measures; its other fields are the variant's options
_Case = tuple[report.Row, Callable[[], Sequence[Callable[[], object]]]]


def _decode_cases(layer: GatedDeltaNet) -> Iterator[_Case]:
    from engine.kernels.recurrent import decode

    device = layer.a_log.device
    for batch in _SEARCH_BATCHES:
        qkv, _, ba = _inputs(layer, batch)
        positions = torch.full((batch,), 100, device=device)
        out = torch.empty(batch, layer.value_heads, layer.value_dim, dtype=qkv.dtype, device=device)

        def steps(options, batch=batch, qkv=qkv, ba=ba, positions=positions, out=out):
            _make_states(layer, 1)
            turns = min(_TURNS, max(2, _STATE_BYTES // (batch * layer.state[0].nbytes)))
            _make_states(layer, turns * batch)
            each = torch.arange(turns * batch, device=device).split(batch)
            taken = [layer.kernel_arguments(qkv, ba, DeviceRecurrentBatch(positions, slots), out) for slots in each]
            return [partial(decode.decode, *arguments, **options) for arguments in taken]

        for options in _DECODE:
            if options["block_v"] <= layer.value_dim:
                yield {"phase": "decode", "batch": batch, **options}, partial(steps, options)


def _prompt_cases(layer: GatedDeltaNet) -> Iterator[_Case]:
    from engine.kernels.recurrent import prefill

    device = layer.a_log.device
    for prompts in _SEARCH_PROMPTS:
        tokens = sum(prompts)
        counts = torch.tensor(prompts, device=device)
        q_starts, slots = counts.cumsum(0) - counts, torch.arange(len(prompts), device=device)
        positions = torch.cat([torch.arange(count, device=device) for count in prompts])
        chunks = prefill.plan_chunks(counts, prefill.num_chunks(prompts))
        batch = DeviceRecurrentBatch(positions, slots, q_starts, counts, chunks)
        qkv, _, ba = _inputs(layer, tokens)
        out = torch.empty(tokens, layer.value_heads, layer.value_dim, dtype=qkv.dtype, device=device)

        def steps(options, qkv=qkv, ba=ba, batch=batch, out=out):
            _make_states(layer, len(batch.slots))
            arguments = layer.kernel_arguments(qkv, ba, batch, out)
            ranges = {"q_starts": batch.q_starts, "counts": batch.counts, "chunks": batch.chunks}
            return [partial(prefill.prefill, *arguments, **ranges, **options)]

        facts = {"phase": "prefill", "prompts": len(prompts), "tokens": tokens}
        yield {**facts, "kernel": "as chosen"}, partial(steps, {})
        for name, variants in (("solve", _SOLVE), ("run_chunks", _RUN)):
            for options in variants:
                if options["BLOCK_V"] <= layer.value_dim:
                    yield {**facts, "kernel": name, **options}, partial(steps, {name: options})


# -- steps ------------------------------------------------------------------------------------------------------------


def _step(
    layer: GatedDeltaNet,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
) -> Callable[[], object]:
    q_starts = counts.cumsum(0) - counts
    if not positions.is_cuda:
        on_cpu = RecurrentBatch.build(positions, slots, q_starts, counts)
        return lambda: layer._on_cpu(*inputs, on_cpu)
    if len(counts) == len(positions):
        batch = DeviceRecurrentBatch(positions, slots)
    else:
        from engine.kernels.recurrent.prefill import num_chunks, plan_chunks

        chunks = plan_chunks(counts, num_chunks(counts.tolist()))
        batch = DeviceRecurrentBatch(positions, slots, q_starts, counts, chunks)
    return lambda: layer._on_device(*inputs, batch, early=False)


def _inputs(layer: GatedDeltaNet, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The outputs that the projections would have: q, k, v and z side by side, b and a."""
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
