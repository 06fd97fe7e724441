"""What the self-test computes: each check once with the Triton kernels and once with their plain references.

`CHECKS` lists them. The variants cover what differs: head sizes and groups, one slice or several, padded and full
tiles, window and softcap, bf16, fp8 and int8. Every slot of the KV cache that no sequence owns holds NaN, which
exposes a kernel that reads what it must not.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch

from engine.kernels.attention import kernel_reference as attention_reference
from engine.kernels.gemm import reference as gemm_reference
from engine.kernels.gemm.packed import reference as packed_reference
from engine.kernels.moe import reference as moe_reference
from engine.kernels.moe.tiles import VECTOR_TOKENS
from engine.kernels.pointwise import reference as pointwise_reference
from engine.layers.attention import tile_tokens
from engine.selftest.compare import Result, exact, fp8_kv, fp8_products, fp8_rows, int8_kv, numbers
from engine.selftest.pages import FP8, PAGE, Pages, int8_cache

_NAN = float("nan")


@dataclass
class Side:
    """One of the two sides of a comparison: its device, and its kernels or references.

    The first side draws `numbers` on the CPU, and the second side gets the same. With `dry` they are uninitialised, for
    a pass that only compiles."""

    device: torch.device
    dtype: torch.dtype
    attention: ModuleType = attention_reference
    single: ModuleType = attention_reference  # attention of sequences with one token
    prefix: ModuleType = attention_reference  # and of those that share a prefix
    fused: ModuleType = pointwise_reference
    gemv: ModuleType = gemm_reference
    inputs: ModuleType = pointwise_reference
    quant: ModuleType = pointwise_reference
    moe: ModuleType = moe_reference
    heads: ModuleType = attention_reference
    norm: ModuleType = pointwise_reference
    packed: ModuleType = packed_reference
    int4: ModuleType = packed_reference
    grouped: ModuleType = packed_reference
    dry: bool = False
    ms: float = 0.0  # spent in kernels
    numbers: list[torch.Tensor] = field(default_factory=list)
    _used: int = 0
    _generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    @property
    def is_reference(self) -> bool:
        return self.attention is attention_reference

    def randn(self, *shape: int) -> torch.Tensor:
        if self.dry:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return self._draw(lambda: torch.randn(*shape, generator=self._generator).to(self.dtype))

    def randint(self, high: int, *shape: int) -> torch.Tensor:
        return self._draw(lambda: torch.randint(0, high, shape, generator=self._generator, dtype=torch.int32))

    def _draw(self, draw: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._used == len(self.numbers):
            self.numbers.append(draw())
        self._used += 1
        return self.numbers[self._used - 1].to(self.device, copy=True)

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device)

    def strided(self, rows: int, width: int, spare: int = 64) -> torch.Tensor:
        """Rows of a wider matrix, like views of fused projections; the columns after them hold NaN."""
        whole = torch.full((rows, width + spare), _NAN, dtype=self.dtype, device=self.device)
        whole[:, :width] = self.randn(rows, width)
        return whole[:, :width]

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Add the time of the block, until the device is done, to `ms`."""
        self._wait()
        began = time.perf_counter()
        yield
        self._wait()
        self.ms += (time.perf_counter() - began) * 1000

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def kernel_side(device: torch.device, dtype: torch.dtype, *, dry: bool = False) -> Side:
    """The side of the Triton kernels; with TRITON_INTERPRET=1 also on a CPU, in float32 or float16."""
    from engine.kernels.attention import chunks as attention_chunks
    from engine.kernels.attention import decode as attention_decode
    from engine.kernels.attention import heads as attention_heads
    from engine.kernels.attention import shared_prefix
    from engine.kernels.gemm import small_batch
    from engine.kernels.gemm.packed import group_scaled, int4_gemv, matmul
    from engine.kernels.moe import experts as moe_experts
    from engine.kernels.pointwise import fused as pointwise_fused
    from engine.kernels.pointwise import inputs as pointwise_inputs
    from engine.kernels.pointwise import norm as pointwise_norm
    from engine.kernels.pointwise import quantize as pointwise_quantize

    return Side(
        device, dtype, attention_chunks, attention_decode, shared_prefix, pointwise_fused, small_batch,
        pointwise_inputs, pointwise_quantize, moe_experts, attention_heads, pointwise_norm, matmul, int4_gemv,
        group_scaled, dry,
    )  # fmt: skip


@dataclass(frozen=True)
class Check:
    name: str
    compute: Callable[[Side], list[Result]]
    needs_fp8: bool = False


# Attention.


def decode(
    side: Side, *, dim: int, group: int, splits: int = 1, cache: torch.dtype | None = None, kv_heads: int = 2,
    **options: Any,
) -> list[Result]:  # fmt: skip
    lengths = [1, 17, 333, 900]
    pages = Pages(side, lengths, kv_heads, dim, cache)
    q = _queries(side, len(lengths), group * kv_heads, kv_heads, dim)
    out = torch.full(q.shape, _NAN, dtype=side.dtype, device=side.device)
    with side.clock():
        side.single.decode(
            q, pages.k, pages.v, pages.rows, side.ints(lengths), pages.table, out,
            splits=splits, **{"scale": dim**-0.5, **pages.scales, **options},
        )  # fmt: skip
    return [numbers(out, 2)]  # probabilities are rounded before they meet the values


def decode_shared(
    side: Side, *, dim: int, group: int, splits: int = 1, cache: torch.dtype | None = None, kv_heads: int = 2
) -> list[Result]:
    """Sequences that begin with the same pages, beside one that shares nothing."""
    lengths, common, members = [370, 353, 900, 352 + 70, 333], 352, 4
    pages = Pages(side, lengths, kv_heads, dim, cache)
    pages.table[2 : members + 1, : common // PAGE] = pages.table[1, : common // PAGE].clone()
    q = _queries(side, len(lengths), group * kv_heads, kv_heads, dim)
    out = torch.full(q.shape, _NAN, dtype=side.dtype, device=side.device)
    shared = side.ints([common] * members + [0] * (len(lengths) - members))
    with side.clock():
        side.prefix.decode_shared(
            q, pages.k, pages.v, pages.rows, side.ints(lengths), shared, pages.table, out,
            splits=splits, prefix_splits=4, scale=dim**-0.5, **pages.scales,
        )  # fmt: skip
    return [numbers(out, 2)]  # probabilities are rounded before they meet the values


def mixed(
    side: Side, *, dim: int, group: int, cache: torch.dtype | None = None, kv_heads: int = 2, **options: Any
) -> list[Result]:
    """Whole prompts, later chunks and single tokens in one launch."""
    chunks = [(0, 1), (70, 1), (0, 17), (333, 1), (33, 40), (64, 64), (250, 90), (0, 150)]
    pages = Pages(side, [start + count for start, count in chunks], kv_heads, dim, cache)
    block_q = tile_tokens(group * kv_heads, kv_heads, dim, side.device)
    starts, counts = (side.ints(column) for column in zip(*chunks, strict=True))
    tiles = [(i, first) for i, (_, count) in enumerate(chunks) for first in range(0, count, block_q)]
    tiles.append((0, 10_000))  # padding: past the chunk's end
    total = sum(count for _, count in chunks)
    qkv = side.randn(total, (group + 2) * kv_heads * dim).unflatten(1, (-1, dim))
    q, k, v = qkv.split((group * kv_heads, kv_heads, kv_heads), 1)
    out = torch.full(q.shape, _NAN, dtype=side.dtype, device=side.device)
    q_starts = (counts.cumsum(0) - counts).int()
    with side.clock():
        side.attention.mixed(
            q, k, v, pages.k, pages.v, side.ints(tiles), pages.rows, starts, q_starts, counts, pages.table, out,
            block_q=block_q, **{"scale": dim**-0.5, **pages.scales, **options},
        )  # fmt: skip
    return [numbers(out, 2)]  # probabilities are rounded before they meet the values


def _queries(side: Side, tokens: int, heads: int, kv_heads: int, dim: int) -> torch.Tensor:
    """[T, Hq, D], a view of a fused projection."""
    return side.randn(tokens, (heads + 2 * kv_heads) * dim)[:, : heads * dim].unflatten(1, (heads, dim))


# Small-batch GEMMs.


def gemv(
    side: Side,
    *,
    rows: int,
    out_features: int,
    inner: int,
    is_fp8: bool = False,
    bias: bool = False,
    **options: Any,
) -> list[Result]:
    x = side.strided(rows, inner)
    weight = side.randn(out_features, inner) * 0.05
    scale = None
    if is_fp8:
        weight, scale = pointwise_reference.quantize_rows(weight)
    added = side.randn(out_features) if bias else None
    with side.clock():
        y = side.gemv.gemv(x, weight, scale, added, **options)
    return [numbers(y, 3 if options else 1)]  # with a gate: after the products, after silu, and at last


def gemv_in_layer(side: Side, *, rows: int, is_fp8: bool) -> list[Result]:
    """A GEMV with the norm before it, and added to the residual stream after it."""
    x, weight = side.strided(rows, 1024), side.randn(512, 1024) * 0.05
    scale = None
    if is_fp8:
        weight, scale = pointwise_reference.quantize_rows(weight)
    norm, residual = (1 + side.randn(1024) * 0.1, 1e-5), side.randn(rows, 512)
    with side.clock():
        side.gemv.gemv(x, weight, scale, norm=norm, residual=residual)
    return [numbers(residual, 3)]


def small_batch_gemm(side: Side, *, rows: int, out_features: int, inner: int, is_fp8: bool = False) -> list[Result]:
    x = side.strided(rows, inner)
    weight = side.randn(out_features, inner) * 0.05
    scales = {}
    if is_fp8:
        x, scales["x_scale"] = pointwise_reference.quantize_rows(x)
        weight, scales["scale"] = pointwise_reference.quantize_rows(weight)
    with side.clock():
        y = side.gemv.small_batch_gemm(x, weight, dtype=side.dtype, **scales)
    return [numbers(y, 2)]


# Mixture of experts.


def choose_experts(side: Side) -> list[Result]:
    logits, factor = side.strided(9, 100), 1 + side.randn(100) * 0.1
    with side.clock():
        weights, experts = side.moe.choose_experts(logits, 6, expert_scale=factor)
    return [numbers(weights), exact(experts)]


def experts(side: Side, *, tokens: int, num_experts: int, is_fp8: bool = False, gate: str = "silu") -> list[Result]:
    """Experts, added to the residual stream. Both sides use the reference's routing."""
    hidden, inner = 512, 256
    x, residual = side.strided(tokens, hidden), side.randn(tokens, hidden)
    weights, chosen = moe_reference.choose_experts(side.randn(tokens, num_experts), 2)
    stacks, scales = [side.randn(num_experts, *size) * 0.05 for size in ((2 * inner, hidden), (hidden, inner))], []
    if is_fp8:
        pairs = [pointwise_reference.quantize_rows(stack.flatten(0, 1)) for stack in stacks]
        stacks = [values.view(stack.shape) for (values, _), stack in zip(pairs, stacks, strict=True)]
        scales = [scale.view(stack.shape[:2]) for (_, scale), stack in zip(pairs, stacks, strict=True)]
    with side.clock():
        side.moe.routed_experts(x, weights, chosen, *stacks, *scales, gate=gate, residual=residual)
    units = is_fp8 and tokens > VECTOR_TOKENS
    return [fp8_products(residual) if units else numbers(residual, 4)]


def experts_in_blocks(side: Side, *, tokens: int) -> list[Result]:
    """The same of weights with a scale for each 128 x 128 numbers, on sides that do not fill their blocks."""
    num_experts, hidden, inner = 4, 576, 192
    x, residual = side.strided(tokens, hidden), side.randn(tokens, hidden)
    weights, chosen = moe_reference.choose_experts(side.randn(tokens, num_experts), 2)
    stacks = [pointwise_reference.quantize_rows(side.randn(num_experts * rows, columns))[0].view(num_experts, rows, -1)
              for rows, columns in ((2 * inner, hidden), (hidden, inner))]  # fmt: skip
    scales = [0.0006 + side.randn(num_experts, *blocks).float().abs() * 0.0001 for blocks in ((4, 5), (5, 2))]
    with side.clock():
        side.moe.routed_experts(x, weights, chosen, *stacks, *scales, residual=residual)
    return [fp8_products(residual) if tokens > VECTOR_TOKENS else numbers(residual, 4)]


def experts_in_int4(side: Side, *, tokens: int, group: int) -> list[Result]:
    """The same of packed weights: integers for few tokens, 16-bit or fp8 activations for more."""
    num_experts, hidden, inner = 4, 512, 256
    dtype = side.dtype if side.dtype.itemsize == 2 else torch.float16  # few tokens are read in 16 bits only
    x, residual = side.strided(tokens, hidden).to(dtype), side.randn(tokens, hidden).to(dtype)
    weights, chosen = moe_reference.choose_experts(side.randn(tokens, num_experts), 2)
    stacks, scales = [], []
    for rows, columns in ((2 * inner, hidden), (hidden, inner)):
        stacks.append(side.randint(256, num_experts, rows, columns // 2).to(torch.uint8))
        scales.append((0.01 + side.randn(num_experts, rows, columns // group).abs() * 0.001).to(dtype))
    with side.clock():
        side.moe.routed_experts(x, weights, chosen, *stacks, *scales, residual=residual)
    return [fp8_products(residual) if tokens > VECTOR_TOKENS and group >= 128 else numbers(residual, 6)]


# Norm, gate, RoPE, quantisation.


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


# Inputs of a step.


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


def _attention_checks() -> Iterator[Check]:
    for name, kernel, needs_fp8, options in [
        ("decode d128", decode, False, {"dim": 128, "group": 4, "splits": 8}),
        ("decode d64 window softcap", decode, False,
         {"dim": 64, "group": 7, "splits": 8, "window": 100, "softcap": 5.0}),
        ("decode d80", decode, False, {"dim": 80, "group": 1, "splits": 4}),
        ("decode d96, one slice", decode, False, {"dim": 96, "group": 3}),
        ("decode d256", decode, False, {"dim": 256, "group": 2, "splits": 4}),
        ("decode d512", decode, False, {"dim": 512, "group": 8, "splits": 8}),
        ("decode d128 fp8", decode, True, {"dim": 128, "group": 5, "splits": 8, "cache": FP8}),
        ("decode d128 int8", decode, False, {"dim": 128, "group": 5, "splits": 8, "cache": torch.int8}),
        ("shared prefix d128", decode_shared, False, {"dim": 128, "group": 4}),
        ("shared prefix d64", decode_shared, False, {"dim": 64, "group": 7, "splits": 4}),
        ("shared prefix d128 fp8", decode_shared, True, {"dim": 128, "group": 5, "splits": 8, "cache": FP8}),
        ("shared prefix d128 int8", decode_shared, False, {"dim": 128, "group": 5, "cache": torch.int8}),
        ("mixed d128", mixed, False, {"dim": 128, "group": 4}),
        ("mixed d64 window softcap", mixed, False, {"dim": 64, "group": 7, "window": 100, "softcap": 5.0}),
        ("mixed d80", mixed, False, {"dim": 80, "group": 1}),
        ("mixed d96", mixed, False, {"dim": 96, "group": 3}),
        ("mixed d256", mixed, False, {"dim": 256, "group": 2}),
        ("mixed d512", mixed, False, {"dim": 512, "group": 8}),
        ("mixed d128 fp8", mixed, True, {"dim": 128, "group": 5, "cache": FP8}),
        ("mixed d128 int8", mixed, False, {"dim": 128, "group": 5, "cache": torch.int8}),
    ]:  # fmt: skip
        yield Check(name, partial(kernel, **options), needs_fp8)


CHECKS: list[Check] = [
    Check("product 1 row", partial(gemv, rows=1, out_features=1024, inner=2048)),
    Check("product 16 rows", partial(small_batch_gemm, rows=16, out_features=1024, inner=2048)),
    Check("product, odd shape, bias", partial(gemv, rows=3, out_features=1000, inner=1048, bias=True)),
    Check("product and gate", partial(gemv, rows=2, out_features=2048, inner=1024, gate="silu")),
    Check("norm, product, residual", partial(gemv_in_layer, rows=3, is_fp8=False)),
    Check("norm, product, residual fp8", partial(gemv_in_layer, rows=1, is_fp8=True), True),
    Check(
        "product and gate fp8",
        partial(gemv, rows=1, out_features=2048, inner=1024, is_fp8=True, gate="gelu_tanh"),
        True,
    ),
    Check("product 1 row fp8", partial(gemv, rows=1, out_features=1024, inner=2048, is_fp8=True), True),
    Check("product 16 rows fp8", partial(small_batch_gemm, rows=16, out_features=1024, inner=2048, is_fp8=True), True),
    Check("choice of experts", choose_experts),
    Check("experts, 3 tokens", partial(experts, tokens=3, num_experts=8)),
    Check("experts, 20 tokens", partial(experts, tokens=20, num_experts=8, gate="gelu_tanh")),
    Check("experts, 150 tokens", partial(experts, tokens=150, num_experts=3)),
    Check("experts, 3 tokens fp8", partial(experts, tokens=3, num_experts=8, is_fp8=True), True),
    Check("experts, 20 tokens fp8", partial(experts, tokens=20, num_experts=8, is_fp8=True), True),
    Check("experts, 150 tokens fp8", partial(experts, tokens=150, num_experts=3, is_fp8=True), True),
    Check("experts, 2 tokens fp8 blocks", partial(experts_in_blocks, tokens=2), True),
    Check("experts, 30 tokens fp8 blocks", partial(experts_in_blocks, tokens=30), True),
    Check("experts, 2 tokens int4", partial(experts_in_int4, tokens=2, group=32)),
    Check("experts, 20 tokens int4", partial(experts_in_int4, tokens=20, group=32)),
    Check("experts, 20 tokens int4, fp8 rows", partial(experts_in_int4, tokens=20, group=128), True),
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
    *_attention_checks(),  # they take longest to compile
]
