"""Gathers rows of a table in host memory by a kernel that reads over the bus. This needs no copy engine, the host never
waits, and it works in a CUDA graph because the ids are read on the device.

    out[t] = table[ids[t]] * scale        table [V, W] page-locked (host_memory.py), out [T, W] on the GPU

The bus has a latency of one to two microseconds, so about 100 KB must be in flight to use its bandwidth (50 GB/s). A
program requests BLOCK numbers of a row at a time, 16 bytes a thread; the programs of a launch together have ten times
as much in flight. More programs would only take room from other kernels.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.runtime.launcher import kernel, wait_for_previous

_BLOCK = 1024
_PROGRAMS = 512  # each requests 2 KB at a time


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
    """Rows `ids` (int64 [T]) of the table, times `scale`: [T, W] on the device of `ids`. `table` [V, W] is contiguous,
    in host or GPU memory."""
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
