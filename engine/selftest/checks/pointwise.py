"""Norm, gate, softcap, quantisation, RoPE with the write to the cache, and the inputs of a step."""

import itertools
from functools import partial
from typing import Any

import torch

from engine.selftest.checks.check import Check, Side
from engine.selftest.checks.pages import FP8, PAGE, int8_cache
from engine.selftest.compare import Result, exact, fp8_kv, fp8_rows, int8_kv, numbers


def norm(side: Side, *, size: int, residual: bool, quantize: bool) -> list[Result]:
    x, weight = side.strided(9, size), 1 + side.randn(size) * 0.1
    kept = side.randn(9, size) if residual else None
    with side.clock():
        y = side.norm.rms_norm(x, weight, 1e-5, kept, quantize=quantize)
    results = fp8_rows(y) if quantize else [numbers(y, 2)]
    return results if kept is None else [*results, numbers(kept)]


def post_norm(side: Side, *, size: int, quantize: bool) -> list[Result]:
    """The norm of two branches, with a scalar; and three norms of the sum."""
    weights = [1 + side.randn(size) * 0.1 for _ in range(6)]
    x, y, residual = side.strided(9, size), side.strided(9, size), side.randn(9, size)
    branch, scalar = (weights[0], y, weights[1]), 1 + side.randn(1) * 0.1
    with side.clock():
        normed = side.norm.post_norm(
            x, weights[2], residual, weights[3:], 1e-5, 0.0, branch=branch, scalar=scalar, quantize=[quantize] * 2
        )
    results = [fp8_rows(each) if isinstance(each, tuple) else [numbers(each, 5)] for each in normed]
    return [*itertools.chain(*results), numbers(residual, 5)]


def gate_mul(side: Side, *, inner: int, kind: str, quantize: bool) -> list[Result]:
    x = side.strided(9, 2 * inner)
    with side.clock():
        y = side.fused.gate_mul(*x.chunk(2, -1), kind, quantize=quantize)
    return fp8_rows(y) if quantize else [numbers(y, 2)]


def softcap(side: Side) -> list[Result]:
    x = side.strided(9, 5000) * side.ints([1, 1, 30, 1, 1, 1000, 1, 1, 0])[:, None].to(side.dtype)
    with side.clock():
        y = side.fused.softcap(x, 30.0)
    return [numbers(y)]


def quantize_rows(side: Side) -> list[Result]:
    x = side.strided(9, 1536) * side.ints([1, 1, 100, 1, 1, 1000, 1, 1, 0])[:, None].to(side.dtype)
    with side.clock():
        y = side.quant.quantize_rows(x)
    return fp8_rows(y)


def rope(
    side: Side, *, dim: int, heads: int, kv_heads: int, with_norm: bool, cache: torch.dtype | None = None
) -> list[Result]:
    tokens = 6
    qkv = side.strided(tokens, (heads + 2 * kv_heads) * dim)
    angle = torch.arange(100.0)[:, None, None] * 10_000 ** (-torch.arange(dim // 2) / (dim // 2))
    angle = angle.to(side.device)
    positions = side.ints([i * 37 % 100 for i in range(tokens)]).long()
    slots = side.ints([(i * 29 + 5) % (8 * PAGE) for i in range(tokens)]).long()
    both, options = _empty_cache(side, kv_heads, dim, cache)
    if with_norm:
        q_norm, k_norm = (1 + side.randn(dim) * 0.1 for _ in range(2))
        options |= {"q_norm": q_norm, "k_norm": k_norm, "eps": 1e-6}
    with side.clock():
        q = side.fused.rope_and_write_kv(
            qkv, angle.cos(), angle.sin(), positions, slots, both[0], both[1], heads, **options
        )
    keys = qkv[:, heads * dim : (heads + kv_heads) * dim]
    return [numbers(q, 3), numbers(keys, 3), *_written(both, options)]


def _empty_cache(
    side: Side, kv_heads: int, dim: int, cache: torch.dtype | None
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Keys and values of eight pages, and their scales as keyword arguments."""
    zeros = torch.zeros(2, 8, PAGE, kv_heads, dim, device=side.device)
    if cache == torch.int8:
        (k, k_scale), (v, v_scale) = map(int8_cache, zeros)
        return [k, v], {"k_scale": k_scale.zero_(), "v_scale": v_scale.zero_()}
    return [*zeros.to(cache or side.dtype)], {"k_scale": 0.02, "v_scale": 0.05} if cache == FP8 else {}


def _written(both: list[torch.Tensor], options: dict[str, Any]) -> list[Result]:
    """What was written to a cache that was empty."""
    if both[0].dtype == torch.int8:
        return [int8_kv(kv, options[name]) for kv, name in zip(both, ("k_scale", "v_scale"), strict=True)]
    return [fp8_kv(kv) if kv.dtype == FP8 else numbers(kv, 3) for kv in both]


def heads(
    side: Side, *, dim: int, pairs: int, distance: int, cache: torch.dtype | None = None, **options: Any
) -> list[Result]:
    """Four heads of q, two of k and v, with the given options."""
    tokens, num_heads, kv_heads = 6, 4, 2
    x = side.strided(tokens, (num_heads + (1 if options.get("k_eq_v") else 2) * kv_heads) * dim)
    angle = (torch.arange(100.0)[:, None, None] * 10_000 ** (-torch.arange(pairs) / pairs)).to(side.device)
    positions = side.ints([i * 37 % 100 for i in range(tokens)]).long()
    slots = side.ints([(i * 29 + 5) % (8 * PAGE) for i in range(tokens)]).long()
    both, scales = _empty_cache(side, kv_heads, dim, cache)
    options |= scales
    q_norm, k_norm = (side.randn(dim) * 0.1 for _ in range(2))
    with side.clock():
        q, own = side.heads.heads_and_write_kv(
            x, angle.cos(), angle.sin(), distance, positions, slots, both[0], both[1], num_heads,
            q_norm=q_norm, k_norm=k_norm, offset=1.0, keep=True, **options,
        )  # fmt: skip
    assert own is not None
    return [numbers(q, 3), numbers(own, 3), *_written(both, options)]


def inputs(side: Side) -> list[Result]:
    """Changes of the request table, then the inputs of each token."""
    tokens, pages = side.randint(1000, 5, 512), side.randint(90, 5, 33)
    words = side.randint(1000, 700)
    # (table, first word there, first word here, words)
    runs = [(0, 512 + 7, 0, 300), (1, 2 * 33 + 1, 300, 5), (0, 3 * 512, 305, 1), (1, 4 * 33, 310, 33)]
    packed = torch.cat([words, side.ints(runs).flatten()])
    of_rows = side.randint(20, 5)
    row, position = side.ints([1, 1, 2, 4, 3, 0]), side.ints([7, 306, 20, 511, 0, 100])
    ids, positions, slots, states = (torch.full((6,), -1, dtype=torch.int64, device=side.device) for _ in range(4))
    lengths = torch.full((6,), -1, dtype=torch.int32, device=side.device)
    with side.clock():
        side.inputs.apply_runs(packed, len(words), len(runs), tokens, pages)
        side.inputs.gather_inputs(row, position, tokens, pages, PAGE, ids, positions, slots, lengths, of_rows, states)
    return [exact(t) for t in (tokens, pages, ids, positions, slots, lengths, states)]


CHECKS = [
    Check("norm", partial(norm, size=1024, residual=False, quantize=False)),
    Check("norm residual", partial(norm, size=960, residual=True, quantize=False)),
    Check("norm residual to fp8", partial(norm, size=1024, residual=True, quantize=True), True),
    Check("norm, residual, norm", partial(post_norm, size=2816, quantize=False)),
    Check("norm, residual, norm to fp8", partial(post_norm, size=1024, quantize=True), True),
    Check("gate", partial(gate_mul, inner=1536, kind="gelu_tanh", quantize=False)),
    Check("gate to fp8", partial(gate_mul, inner=10240, kind="silu", quantize=True), True),
    Check("softcap", softcap),
    Check("quantise", quantize_rows, True),
    Check("rope, KV write", partial(rope, dim=64, heads=7, kv_heads=1, with_norm=False)),
    Check("norm, rope, KV write", partial(rope, dim=128, heads=8, kv_heads=4, with_norm=True)),
    Check("norm, rope, KV write fp8", partial(rope, dim=128, heads=8, kv_heads=4, with_norm=True, cache=FP8), True),
    Check("norm, rope, KV write int8", partial(rope, dim=128, heads=8, kv_heads=4, with_norm=True, cache=torch.int8)),
    Check("heads d256, partial rope", partial(heads, dim=256, pairs=32, distance=32)),
    Check("heads d512, keys as values", partial(heads, dim=512, pairs=64, distance=256, v_norm=True, k_eq_v=True)),
    Check("heads d256 fp8", partial(heads, dim=256, pairs=128, distance=128, cache=FP8), True),
    Check("heads d256 int8", partial(heads, dim=256, pairs=128, distance=128, cache=torch.int8)),
    Check("step inputs", inputs),
]
