"""KV caches for the self-test: pages that sequences share, in the formats that a cache can have."""

from typing import Any, Protocol

import torch

from engine.kernels.pointwise.reference import to_int8

PAGE = 16
FP8 = torch.float8_e4m3fn
_NAN = float("nan")


class Numbers(Protocol):
    """What a side of a comparison draws its numbers with (check.Side)."""

    device: torch.device
    dtype: torch.dtype

    def randn(self, *shape: int) -> torch.Tensor: ...

    def ints(self, values: Any) -> torch.Tensor: ...


class Pages:
    """Keys and values of sequences with given lengths, in shuffled pages, and the block table. Row 0 owns nothing.

    `cache`: the cache's dtype, if it is not that of activations. Slots that no sequence owns hold NaN, in an int8 cache
    as their scale.
    """

    def __init__(self, side: Numbers, lengths: list[int], kv_heads: int, dim: int, cache: torch.dtype | None) -> None:
        counts = [-(-n // PAGE) for n in lengths]
        total = sum(counts) + 1  # page 0 is the null page
        order = (torch.randperm(total - 1, generator=torch.Generator().manual_seed(2)) + 1).int()
        table = torch.zeros(len(lengths) + 1, max(counts) + 1, dtype=torch.int32)
        slots = []
        for row, (length, pages) in enumerate(zip(lengths, order.split(counts), strict=True), 1):
            table[row, : len(pages)] = pages
            slots.append((pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length])
        both = torch.full((2, total * PAGE, kv_heads, dim), _NAN, device=side.device)
        both[:, torch.cat(slots).to(side.device)] = side.randn(2, sum(lengths), kv_heads, dim).float()
        both = both.unflatten(1, (total, PAGE))
        self.scales: dict[str, Any] = {}
        if cache == torch.int8:
            (self.k, k_scale), (self.v, v_scale) = map(int8_cache, both)
            self.scales = {"k_scale": k_scale, "v_scale": v_scale}
        else:
            self.k, self.v = both.to(cache or side.dtype).unbind(0)
            if cache == FP8:
                self.scales = {"k_scale": 0.7, "v_scale": 1.3}
        self.table = table.to(side.device)
        self.rows = side.ints(range(1, len(lengths) + 1))


def int8_cache(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [pages, P, Hkv, D] and scales [pages, P, Hkv] of an int8 cache, of keys or of values. They lie in memory
    as the worker puts them there (engine/worker/cache.py)."""
    pages, page, heads, dim = numbers.shape
    size = page * heads
    memory = torch.zeros(pages, size * (dim + 4), dtype=torch.uint8, device=numbers.device)
    strides = memory.stride(0), dim, page * dim, 1  # heads before tokens
    cache = memory.view(torch.int8).as_strided((pages, page, heads, dim), strides)
    scale = memory.view(torch.float32).as_strided((pages, page, heads), (strides[0] // 4, 1, page), size * dim // 4)
    stored, found = to_int8(numbers)
    cache.copy_(stored)
    scale.copy_(found)
    return cache, scale
