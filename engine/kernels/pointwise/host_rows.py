"""Rows of a table in host memory, read by a kernel over the bus: it needs no copy engine, the host never waits, and it
fits into a CUDA graph because the ids are read on the device.

    out[t] = table[ids[t]] * scale        table [V, W] page-locked (host_memory.py), out [T, W] on the GPU

The bus answers after one to two microseconds; to keep it full (50 GB/s), some 100 KB must be under way. A program asks
for BLOCK numbers of a row at a time, 16 bytes a thread, and the programs of a launch have ten times as much in flight.
More of them would only stand in the way of other kernels.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.runtime.launcher import kernel, wait_for_previous

_BLOCK = 1024
_PROGRAMS = 512  # of 2 KB each


@kernel
def _gather_rows_kernel(ids_ptr, table_ptr, out_ptr, T, scale, W: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    parts: tl.constexpr = (W + BLOCK - 1) // BLOCK
    for tile in range(tl.program_id(0), T * parts, tl.num_programs(0)):
        t = tile // parts
        at = tile % parts * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(ids_ptr + t)
        values = tl.load(table_ptr + row * W + at, mask=at < W)
        scaled = values.to(tl.float32) * scale
        tl.store(out_ptr + t * W + at, scaled.to(out_ptr.dtype.element_ty), mask=at < W)


def gather_rows(
    table: torch.Tensor, ids: torch.Tensor, scale: float = 1.0, *, programs: int = _PROGRAMS
) -> torch.Tensor:
    """int64 `ids` [T] -> [T, W] on their device. `table` [V, W] is contiguous, in host or GPU memory."""
    assert table.is_contiguous()
    count, width = ids.shape[0], table.shape[1]
    out = torch.empty(count, width, dtype=table.dtype, device=ids.device)
    assert out.numel() < 2**31, "offsets in the output are 32 bits"
    block = min(_BLOCK, triton.next_power_of_2(width))
    tiles = count * triton.cdiv(width, block)
    if tiles:
        _gather_rows_kernel(
            (min(tiles, programs),), ids, table, out, count, float(scale), W=width, BLOCK=block, num_warps=4
        )
    return out
