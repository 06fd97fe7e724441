"""Products of up to 128 rows, bound by reading the weight: every multiprocessor reads an equal share of it.

W [N, K] is cut into tiles of BLOCK_N rows, a tile into blocks of BLOCK_K columns. All blocks of all tiles stand in one
row, which is dealt to the programs in equal, contiguous parts; one program to a multiprocessor. Where a tile's blocks
went to several programs, each leaves its sum in scratch memory, and the one that comes last adds them up, always in the
same order ("stream-K", Osama et al. 2023, arXiv:2301.03598).

    tiles      |    0    |    1    |    2    |    3    |    4    |
    blocks     |. . . . .|. . . . .|. . . . .|. . . . .|. . . . .|
    programs   |   0   |   1   |   2   |   3   |   4   |   5   |
"""

import functools

import torch
import triton
import triton.language as tl

from engine.kernels.launch import interpreted, kernel, shared_memory, wait_for_previous

_THREADS = tl.constexpr(128)
_AHEAD = 1024         # bytes of each row that a program asks for before it waits for its input
_INTERPRETED = 7      # programs in the interpreter


@triton.jit
def _ask_for_rows(w_ptr, first, column, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr):
    """AHEAD bytes of rows first ... of W, from a column on, are to come into the L2 cache: the kernel before this one
    is still at work and leaves the memory idle. Cards that know dependent launch know this too."""
    thread = tl.arange(0, _THREADS)
    share: tl.constexpr = AHEAD * BLOCK_N // _THREADS
    row = tl.minimum(first + thread % BLOCK_N, N - 1).to(tl.int64)
    size: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    offset = tl.minimum(column * size + thread // BLOCK_N * share, K * size - share)
    address = w_ptr.to(tl.int64) + row * (K * size) + offset
    ask: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(ask, "=r,l,r", [address, tl.full([_THREADS], share, tl.int32)], tl.int32, False, 1)


@triton.jit
def _store(
    acc, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, n, m, M, y_stride, N: tl.constexpr, FP8: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    if FP8:
        acc = acc * tl.load(scale_ptr + n, mask=n < N, other=0.0)[:, None]
        acc = acc * tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[None, :]
    if BIAS:
        acc = acc + tl.load(bias_ptr + n, mask=n < N, other=0.0)[:, None].to(tl.float32)
    mask = (n < N)[:, None] & (m < M)[None, :]
    tl.store(y_ptr + m[None, :] * y_stride + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _stream_kernel(
    x_ptr, w_ptr, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, part_ptr, arrived_ptr, M, x_stride, y_stride,
    N: tl.constexpr, K: tl.constexpr, MP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FP8: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr, PROGRAMS: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K  # of a tile
    TOTAL: tl.constexpr = BLOCKS * ((N + BLOCK_N - 1) // BLOCK_N)
    program = tl.program_id(0)
    start = program * TOTAL // PROGRAMS
    end = (program + 1) * TOTAL // PROGRAMS
    if PDL and AHEAD > 0:
        _ask_for_rows(w_ptr, start // BLOCKS * BLOCK_N, start % BLOCKS * BLOCK_K, N, K, BLOCK_N, AHEAD)
    wait_for_previous(PDL)
    m = tl.arange(0, MP)
    k = tl.arange(0, BLOCK_K)
    m_mask = (m < M)[None, :]
    x_at = x_ptr + m[None, :] * x_stride + k[:, None]
    row = tl.arange(0, BLOCK_N)
    scratch = row[:, None] * MP + m[None, :]
    at = start
    while at < end:
        tile = at // BLOCKS
        origin = tile * BLOCKS
        last = tl.minimum(end - origin, BLOCKS)
        n = tile * BLOCK_N + row
        n_mask = (n < N)[:, None]
        w_at = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
        acc = tl.zeros([BLOCK_N, MP], tl.float32)
        for block in tl.range(at - origin, last, num_stages=STAGES):
            column = block * BLOCK_K
            if K % BLOCK_K != 0:
                k_live = k < K - column
                w = tl.load(w_at + column, mask=n_mask & k_live[None, :], other=0.0)
                x = tl.load(x_at + column, mask=m_mask & k_live[:, None], other=0.0)
            else:
                if N % BLOCK_N == 0:
                    w = tl.load(w_at + column)
                else:
                    w = tl.load(w_at + column, mask=n_mask, other=0.0)
                x = tl.load(x_at + column, mask=m_mask, other=0.0)
            acc = tl.dot(w, x, acc)
        if last - (at - origin) == BLOCKS:
            _store(acc, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, n, m, M, y_stride, N, FP8, BIAS)
        else:
            # A program has at most two parts of tiles: that where it begins, and that where it ends.
            slot = 2 * program + (start < origin).to(tl.int32)
            tl.store(part_ptr + slot.to(tl.int64) * (BLOCK_N * MP) + scratch, acc)
            tl.debug_barrier()  # the whole part is written before its arrival is
            first_program = ((origin + 1) * PROGRAMS - 1) // TOTAL
            last_program = ((origin + BLOCKS) * PROGRAMS - 1) // TOTAL
            arrived = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel")
            if arrived == last_program - first_program:
                total = tl.zeros([BLOCK_N, MP], tl.float32)
                for other in range(first_program, last_program + 1):
                    slot = 2 * other + (other * TOTAL // PROGRAMS < origin).to(tl.int32)
                    at_part = part_ptr + slot.to(tl.int64) * (BLOCK_N * MP) + scratch
                    total += tl.load(at_part, cache_modifier=".cg")
                _store(total, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, n, m, M, y_stride, N, FP8, BIAS)
                tl.store(arrived_ptr + tile, 0)
        at = origin + last


def few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    tiles: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """Up to 128 rows: x [M, K] (rows may be strided), weight [N, K], bias [N] -> [M, N] in `dtype` or x's.

    x and weight have the same dtype; fp8 ones have a scale each, x_scale [M] and scale [N].
    """
    rows, inner = x.shape
    out_features = weight.shape[0]
    size = weight.element_size()
    y = torch.empty(rows, out_features, dtype=dtype or x.dtype, device=x.device)
    padded = max(16, triton.next_power_of_2(rows))
    block_n, block_k, stages = tiles or _tiles(padded, size, shared_memory(x.device))
    num_tiles = triton.cdiv(out_features, block_n)
    programs = min(_multiprocessors(x.device), num_tiles * triton.cdiv(inner, block_k))
    arrived = _arrivals(x.device)
    assert num_tiles <= len(arrived)
    part = torch.empty(2 * programs * block_n * padded, dtype=torch.float32, device=x.device)
    _stream_kernel(
        (programs,), x, weight, x_scale, scale, bias, y, part, arrived, rows, x.stride(0), y.stride(0),
        N=out_features, K=inner, MP=padded, BLOCK_N=block_n, BLOCK_K=block_k, FP8=size == 1, BIAS=bias is not None,
        STAGES=stages, PROGRAMS=programs, AHEAD=_ahead(inner * size, block_n), num_warps=4, num_stages=stages,
    )  # fmt: skip
    return y


def _tiles(padded_rows: int, itemsize: int, shared: int) -> tuple[int, int, int]:
    """(BLOCK_N, BLOCK_K, stages)."""
    return 64, 256 // itemsize, min(6, (shared - 1024) // (256 * (64 + padded_rows)))


def _ahead(row_bytes: int, block_n: int) -> int:
    """Bytes of each row to ask for: as many for each thread, in units of 16."""
    each = min(_AHEAD, row_bytes)
    return 0 if interpreted() or row_bytes % 16 or each * block_n % (16 * 128) else each


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _INTERPRETED


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """How many parts of a tile are done: zeros between launches, each last program sees to it."""
    return torch.zeros(1 << 15, dtype=torch.int32, device=device)
