"""Weights on their way into the L2 cache while kernels run that leave the memory idle.

Between two products of a decode step stand kernels of a few microseconds that move little: norms, gates. Each of their
threads asks for a share of the next product's weight before anything else; the product then finds its beginning in the
cache. Nobody waits for what is asked for here, and asking changes no result.

    product ─► norm, and 12 MB of the next weight ─► product ─► gate, and 12 MB of the next weight ─► product
"""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import interpreted

AHEAD = 0     # bytes asked for: what the memory brings while a norm or a gate runs
_MOST_ROWS = 512     # of the product; more keep the arithmetic busy, not the memory
_ALIGN = 16          # bytes


@triton.jit
def prefetch_share(weight_ptr, share, program, THREADS: tl.constexpr, PDL: tl.constexpr):
    """Each of this program's THREADS threads asks for `share` bytes of the weight. (Cards that know programmatic
    dependent launch know this instruction too.)"""
    if PDL and weight_ptr is not None:
        thread = program.to(tl.int64) * THREADS + tl.arange(0, THREADS)
        address = weight_ptr.to(tl.int64) + thread * share
        size = tl.full([THREADS], 0, tl.int32) + share
        ask: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(ask, "=r,l,r", [address, size], tl.int32, False, 1)


def shares(weight: torch.Tensor | None, rows: int, threads: int) -> tuple[torch.Tensor | None, int]:
    """(weight, bytes a thread) for `threads` threads in all; (None, 0) where it is not worth it."""
    if weight is None or rows > _MOST_ROWS or interpreted():
        return None, 0
    share = min(AHEAD, weight.nbytes) // threads // _ALIGN * _ALIGN
    return (weight, share) if share else (None, 0)
