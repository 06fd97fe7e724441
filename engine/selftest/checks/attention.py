"""Attention of decode steps and of steps with prompts, from a cache whose free slots hold NaN.

The variants cover what differs: head sizes and groups, one slice or several, padded and full tiles, window and softcap,
bf16, fp8 and int8.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from engine.layers.attention import tile_tokens
from engine.selftest.checks.check import Check, Side
from engine.selftest.checks.pages import FP8, PAGE, Pages
from engine.selftest.compare import Result, numbers

_NAN = float("nan")


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


def _checks() -> Iterator[Check]:
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
        ("mixed d128, slices", mixed, False, {"dim": 128, "group": 4, "splits": 8, "shortest": 64}),
        ("mixed d64 window softcap", mixed, False, {"dim": 64, "group": 7, "window": 100, "softcap": 5.0}),
        ("mixed d80", mixed, False, {"dim": 80, "group": 1}),
        ("mixed d96", mixed, False, {"dim": 96, "group": 3}),
        ("mixed d256", mixed, False, {"dim": 256, "group": 2}),
        ("mixed d512", mixed, False, {"dim": 512, "group": 8}),
        ("mixed d128 fp8", mixed, True, {"dim": 128, "group": 5, "cache": FP8}),
        ("mixed d128 int8", mixed, False, {"dim": 128, "group": 5, "cache": torch.int8}),
    ]:  # fmt: skip
        yield Check(name, partial(kernel, **options), needs_fp8)


CHECKS = [*_checks()]
