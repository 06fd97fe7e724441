"""GEMMs of one or two rows with an int4 weight: y [M, N] = x [M, K] W [N, K]ᵀ, W as packed_weight.py describes it.

An H100's memory delivers 26 numbers of W per clock to each multiprocessor, which can issue 128 instructions in that
time. Converting a number to a float and multiplying it takes four instructions or more: too many to keep up with the
memory. So this kernel multiplies integers, four per instruction (dp4a), at 1.6 instructions a number:

    word of W   q7 q6 q5 q4 q3 q2 q1 q0     q0, q2, q4, q6: columns k to k + 3;  q1, q3, q5, q7: the same + PAIR
    x           (256 high + low) * unit     16-bit fixed point: high int8, low uint8; unit: for each CHUNK of 32 columns
                                            their largest |x| / 32767

A chunk is what a thread holds contiguously: four words, within one group. Its sum of q (256 high + low) is exact and
below 2^24, so a float32 holds it exactly, too. x loses at most 2^-16 of the chunk's largest number, a hundredth of what
that number has already lost by rounding to bf16.

As in small_batch.py, the operations around the GEMM are fused: a norm before it, a gate or the residual after it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.gemm.packed_weight import MIDDLE, Packed, pair_distance
from engine.kernels.pointwise.gate import activated
from engine.kernels.runtime.launcher import interpreted, kernel, wait_for_previous

MOST_ROWS = 2
CHUNK = 32  # columns
_CHUNK = tl.constexpr(CHUNK)
_WORDS = tl.constexpr(CHUNK // 8)  # words in a chunk
_LARGEST = tl.constexpr(32767.0)
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: added to a small number it leaves round(number) in the lowest bits


class Int4Tiles(NamedTuple):
    """A program computes BLOCK_N outputs, and reads BLOCK_W words of each at a time. `ahead`: how many programs' rows
    each of the first ones prefetches; 0 prefetches nothing."""

    block_n: int
    block_w: int
    warps: int
    ahead: int


@triton.jit
def _one(four, j: tl.constexpr, TYPE: tl.constexpr):
    """Number j of four 16-bit numbers that were read as one 64-bit number; float32."""
    return (four >> (j * 16)).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)


@triton.jit
def _larger(a, b):
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _high_and_low(a, b, c, d, unit, DP4A: tl.constexpr):
    """The high and low bytes of round(number / unit), of four numbers each, in the order of a word's bytes."""
    a = (a * unit + _MAGIC).to(tl.int32, bitcast=True)
    b = (b * unit + _MAGIC).to(tl.int32, bitcast=True)
    c = (c * unit + _MAGIC).to(tl.int32, bitcast=True)
    d = (d * unit + _MAGIC).to(tl.int32, bitcast=True)
    if DP4A:
        pick: tl.constexpr = """{ .reg .b32 p, q; prmt.b32 p, $2, $3, 0x5410; prmt.b32 q, $4, $5, 0x5410;
            prmt.b32 $0, p, q, 0x7531; prmt.b32 $1, p, q, 0x6420; }"""
        high, low = tl.inline_asm_elementwise(pick, "=r,=r,r,r,r,r", [a, b, c, d], (tl.int32, tl.int32), True, 1)
    else:
        low = (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | ((d & 255) << 24)
        high = ((a >> 8) & 255) | (b & 0xFF00) | ((c << 8) & 0xFF0000) | ((d & 0xFF00) << 16)
    return high, low


@triton.jit
def _dot4(q, high, low):
    """The sum of q (256 high + low), int32, over a word's bytes q, which are 0 to 15. Without dp4a."""
    total = q * 0
    for j in tl.static_range(4):
        x = ((high << (24 - 8 * j)) >> 24) * 256 + ((low >> (8 * j)) & 255)
        total += ((q >> (8 * j)) & 15) * x
    return total


@triton.jit
def dot_chunk(w, x, DP4A: tl.constexpr):
    """The sum of q (256 high + low), int32, over the numbers of a chunk: four words of codes, and x as `fixed_point`
    returns it. The upper halves of bytes count 16 times until the end, which saves shifting each word."""
    near_high, near_low, far_high, far_low = x
    if DP4A:
        dot: tl.constexpr = """{ .reg .b32 q, p; .reg .s32 h, l, u, v;
            and.b32 q, $1, 0x0F0F0F0F; and.b32 p, $1, 0xF0F0F0F0; dp4a.u32.s32 h, q, $5, 0; dp4a.u32.u32 l, q, $9, 0;
            dp4a.u32.s32 u, p, $13, 0; dp4a.u32.u32 v, p, $17, 0;
            and.b32 q, $2, 0x0F0F0F0F; and.b32 p, $2, 0xF0F0F0F0; dp4a.u32.s32 h, q, $6, h; dp4a.u32.u32 l, q, $10, l;
            dp4a.u32.s32 u, p, $14, u; dp4a.u32.u32 v, p, $18, v;
            and.b32 q, $3, 0x0F0F0F0F; and.b32 p, $3, 0xF0F0F0F0; dp4a.u32.s32 h, q, $7, h; dp4a.u32.u32 l, q, $11, l;
            dp4a.u32.s32 u, p, $15, u; dp4a.u32.u32 v, p, $19, v;
            and.b32 q, $4, 0x0F0F0F0F; and.b32 p, $4, 0xF0F0F0F0; dp4a.u32.s32 h, q, $8, h; dp4a.u32.u32 l, q, $12, l;
            dp4a.u32.s32 u, p, $16, u; dp4a.u32.u32 v, p, $20, v;
            mad.lo.s32 l, h, 256, l; mad.lo.s32 v, u, 256, v; shr.s32 v, v, 4; add.s32 $0, l, v; }"""
        operands = [
            w[0], w[1], w[2], w[3], near_high[0], near_high[1], near_high[2], near_high[3], near_low[0], near_low[1],
            near_low[2], near_low[3], far_high[0], far_high[1], far_high[2], far_high[3], far_low[0], far_low[1],
            far_low[2], far_low[3],
        ]  # fmt: skip
        registers: tl.constexpr = "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r"
        return tl.inline_asm_elementwise(dot, registers, operands, tl.int32, True, 1)
    else:
        total = _dot4(w[0] & 0x0F0F0F0F, near_high[0], near_low[0])
        total += _dot4((w[0] >> 4) & 0x0F0F0F0F, far_high[0], far_low[0])
        for i in tl.static_range(1, 4):
            total += _dot4(w[i] & 0x0F0F0F0F, near_high[i], near_low[i])
            total += _dot4((w[i] >> 4) & 0x0F0F0F0F, far_high[i], far_low[i])
        return total


@triton.jit
def sum_chunk(x, DP4A: tl.constexpr):
    """The sum of x alone over each chunk, int32."""
    ones = tl.full(x[0][0].shape, 0x11111111, tl.int32)
    return dot_chunk((ones, ones, ones, ones), x, DP4A)


@triton.jit
def _sixteen(at_ptr, at, live, DP4A: tl.constexpr):
    """The 16 numbers from column `at` of each chunk on, as four 64-bit numbers of four each; zeros outside. A thread
    reads those of its own chunks, so nothing moves between threads."""
    if DP4A:
        load: tl.constexpr = """{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b64 $0, 0; mov.b64 $1, 0; mov.b64 $2, 0;
            mov.b64 $3, 0; @p ld.global.v2.b64 {$0, $1}, [$4]; @p ld.global.v2.b64 {$2, $3}, [$4 + 16]; }"""
        address = at_ptr.to(tl.int64) + at * (at_ptr.dtype.element_ty.primitive_bitwidth // 8)
        operands = [address, live.to(tl.int32)]
        return tl.inline_asm_elementwise(load, "=&l,=&l,=&l,=&l,l,r", operands, (tl.int64, tl.int64, tl.int64, tl.int64), False, 1)
    else:
        fours = at_ptr.to(tl.pointer_type(tl.int64)) + at // 4
        first = tl.load(fours, mask=live, other=0)
        second = tl.load(fours + 1, mask=live, other=0)
        third = tl.load(fours + 2, mask=live, other=0)
        return first, second, third, tl.load(fours + 3, mask=live, other=0)


@triton.jit
def _numbers(sixteen, TYPE: tl.constexpr):
    """The 16 numbers as float32."""
    found = ()
    for i in tl.static_range(4):
        for j in tl.static_range(4):
            found = found + (_one(sixteen[i], j, TYPE),)  # noqa: RUF005 - Triton's tuples
    return found


@triton.jit
def _normed(numbers, weights, offset):
    found = ()
    for i in tl.static_range(16):
        found = found + (numbers[i] * (weights[i] + offset),)  # noqa: RUF005
    return found


@triton.jit
def _in_bytes(numbers, steps, DP4A: tl.constexpr):
    high = ()
    low = ()
    for i in tl.static_range(4):
        h, l = _high_and_low(
            numbers[4 * i], numbers[4 * i + 1], numbers[4 * i + 2], numbers[4 * i + 3], steps, DP4A
        )
        high = high + (h,)  # noqa: RUF005
        low = low + (l,)  # noqa: RUF005
    return high, low


@triton.jit
def fixed_point(x_ptr, norm_ptr, offset, at, live, PAIR: tl.constexpr, DP4A: tl.constexpr):
    """x in fixed point for the chunks that begin at columns `at`: (high and low bytes, those of the columns PAIR
    farther), each for a chunk's four words; the chunks' units; and, for a norm, the sum of squares of x [chunks]."""
    x_type: tl.constexpr = x_ptr.dtype.element_ty
    near = _numbers(_sixteen(x_ptr, at, live, DP4A), x_type)
    far = _numbers(_sixteen(x_ptr, at + PAIR, live, DP4A), x_type)
    squares = near[0] * near[0] + far[0] * far[0]
    for i in tl.static_range(1, 16):
        squares += near[i] * near[i] + far[i] * far[i]
    if norm_ptr is not None:
        norm_type: tl.constexpr = norm_ptr.dtype.element_ty
        near = _normed(near, _numbers(_sixteen(norm_ptr, at, live, DP4A), norm_type), offset)
        far = _normed(far, _numbers(_sixteen(norm_ptr, at + PAIR, live, DP4A), norm_type), offset)
    largest = _larger(near[0], far[0])
    for i in tl.static_range(1, 16):
        largest = _larger(largest, _larger(near[i], far[i]))
    steps = _LARGEST / tl.maximum(largest, 1e-30)
    near_high, near_low = _in_bytes(near, steps, DP4A)
    far_high, far_low = _in_bytes(far, steps, DP4A)
    return (near_high, near_low, far_high, far_low), largest / _LARGEST, squares


@triton.jit
def first_columns(chunk, PAIR: tl.constexpr):
    """The first column of each chunk."""
    byte = chunk * (4 * _WORDS)
    return byte // PAIR * (2 * PAIR) + byte % PAIR


@triton.jit
def load_words(w_at, n_live, words, start: tl.constexpr, WORDS: tl.constexpr, BLOCK_W: tl.constexpr):
    """W's words [BLOCK_N, BLOCK_W] from `start` on, zeros outside."""
    if start + BLOCK_W <= WORDS:
        return tl.load(w_at + start, mask=n_live[:, None], other=0)
    else:
        return tl.load(w_at + start, mask=n_live[:, None] & (words < WORDS - start)[None, :], other=0)


@triton.jit
def of_chunks(at_ptr, n, n_live, column, K: tl.constexpr, GROUP: tl.constexpr):
    """A per-group quantity (scale or zero point) for outputs n and the chunks that begin at `column`: [N, chunks]."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    place = n[:, None].to(tl.int64) * GROUPS + (column // GROUP)[None, :]
    return tl.load(at_ptr + place, mask=n_live[:, None] & (column < K)[None, :], other=0)


@triton.jit
def _words_of_chunks(words):
    """The four words of each chunk: [N, words] -> four times [N, chunks]. A thread holds all four."""
    even, odd = tl.split(tl.reshape(words, [words.shape[0], words.shape[1] // _WORDS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _for_outputs(four):
    return four[0][None, :], four[1][None, :], four[2][None, :], four[3][None, :]


@triton.jit
def chunk_sums(words, x, total, zero, scale, unit, DP4A: tl.constexpr):
    """Sums of (q - zero) scale x over the chunks of words [BLOCK_N, BLOCK_W]; `total` is the sum of x alone."""
    x = (_for_outputs(x[0]), _for_outputs(x[1]), _for_outputs(x[2]), _for_outputs(x[3]))
    dots = dot_chunk(_words_of_chunks(words), x, DP4A)
    return (dots - zero * total[None, :]).to(tl.float32) * (scale * unit[None, :])


@triton.jit
def _of_all_chunks(at_ptr, n, n_live, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_W: tl.constexpr):
    """`of_chunks` for all columns: a tuple of one tensor for each BLOCK_W words; empty without a pointer."""
    found = ()
    if at_ptr is not None:
        for start in tl.static_range(0, K // 8, BLOCK_W):
            column = start * 8 + tl.arange(0, BLOCK_W // _WORDS) * _CHUNK
            found = found + (of_chunks(at_ptr, n, n_live, column, K, GROUP),)  # noqa: RUF005 - Triton's tuples
    return found


@triton.jit
def _prefetch(start_ptr, row, live, BYTES: tl.constexpr):
    """Prefetch BYTES bytes of each row of a matrix, of rows that are so long, into the L2 cache."""
    if BYTES % 16 == 0:
        ask: tl.constexpr = """{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.b32 $0, 0; }"""
        size = tl.where(live, BYTES, 0)
        address = start_ptr.to(tl.int64) + row * BYTES
        tl.inline_asm_elementwise(ask, "=r,l,r", [address, size], tl.int32, False, 1)


@triton.jit
def _prefetch_rows(
    w_ptr, scale_ptr, first, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_N: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Prefetch AHEAD programs' rows of W, counted from row `first` on, while the previous kernel still runs and leaves
    the memory idle. The first programs do this for all."""
    COUNT: tl.constexpr = AHEAD * BLOCK_N
    tl.static_assert(COUNT <= THREADS)
    thread = tl.arange(0, THREADS)
    row = tl.program_id(0).to(tl.int64) * COUNT + thread
    live = (thread < COUNT) & (row < N)
    _prefetch(w_ptr, first + row, live, K // 2)
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    if AHEAD > 1:
        _prefetch(scale_ptr, first + row, live, GROUPS * (scale_ptr.dtype.element_ty.primitive_bitwidth // 8))


@kernel
def _int4_gemv_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, M, x_stride, y_stride, eps, offset,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr, PAIR: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, GATE: tl.constexpr, IN_ORDER: tl.constexpr,
    AHEAD: tl.constexpr, THREADS: tl.constexpr, DP4A: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = K // 8
    CHUNKS: tl.constexpr = BLOCK_W // _WORDS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    words = tl.arange(0, BLOCK_W)
    n_live = n < N
    w_at = w_ptr + n[:, None].to(tl.int64) * WORDS + words[None, :]
    up_at = w_at + N * WORDS
    w = load_words(w_at, n_live, words, 0, WORDS, BLOCK_W)
    up = w
    if GATE is not None:
        up = load_words(up_at, n_live, words, 0, WORDS, BLOCK_W)
    if PDL and AHEAD > 0:
        _prefetch_rows(w_ptr, scale_ptr, 0, N, K, GROUP, AHEAD, BLOCK_N, THREADS)
        if GATE is not None:
            _prefetch_rows(w_ptr, scale_ptr, N, N, K, GROUP, AHEAD, BLOCK_N, THREADS)
    # Scales and zero points, too, do not depend on the previous kernel. Loaded where they are used, each would wait for
    # the memory.
    scales = _of_all_chunks(scale_ptr, n, n_live, K, GROUP, BLOCK_W)
    zeros = _of_all_chunks(zero_ptr, n, n_live, K, GROUP, BLOCK_W)
    up_scales = scales
    up_zeros = zeros
    if GATE is not None:
        up_scales = _of_all_chunks(scale_ptr, N + n, n_live, K, GROUP, BLOCK_W)
        up_zeros = _of_all_chunks(zero_ptr, N + n, n_live, K, GROUP, BLOCK_W)
    bias = 0.0
    up_bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n, mask=n_live, other=0.0).to(tl.float32)
        if GATE is not None:
            up_bias = tl.load(bias_ptr + N + n, mask=n_live, other=0.0).to(tl.float32)
    if IN_ORDER and PDL:
        gdc_wait()
        gdc_launch_dependents()
    else:
        wait_for_previous(PDL)
    before = ()
    if residual_ptr is not None:  # y is the residual stream: each program adds to its own part
        for m in tl.static_range(ROWS):
            before = before + (tl.load(residual_ptr + m * y_stride + n, mask=n_live & (m < M), other=0.0),)  # noqa: RUF005
    sums = ()
    squares = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros([BLOCK_N, CHUNKS], tl.float32),)  # noqa: RUF005 - Triton's tuples
        squares = squares + (tl.zeros([CHUNKS], tl.float32),)  # noqa: RUF005
    up_sums = sums
    for start in tl.static_range(0, WORDS, BLOCK_W):
        next_w = w
        next_up = up
        if start + BLOCK_W < WORDS:  # load the next block while this one is multiplied
            next_w = load_words(w_at, n_live, words, start + BLOCK_W, WORDS, BLOCK_W)
            if GATE is not None:
                next_up = load_words(up_at, n_live, words, start + BLOCK_W, WORDS, BLOCK_W)
        scale = scales[start // BLOCK_W].to(tl.float32)
        up_scale = up_scales[start // BLOCK_W].to(tl.float32)
        zero = MIDDLE
        up_zero = MIDDLE
        if zero_ptr is not None:
            zero = zeros[start // BLOCK_W].to(tl.int32)
            up_zero = up_zeros[start // BLOCK_W].to(tl.int32)
        chunk = start // _WORDS + tl.arange(0, CHUNKS)
        at = first_columns(chunk, PAIR)
        live = chunk < WORDS // _WORDS
        so_far, up_so_far, squares_so_far = sums, up_sums, squares
        sums, up_sums, squares = (), (), ()
        for m in tl.static_range(ROWS):
            in_bytes, unit, square = fixed_point(
                x_ptr + m * x_stride, norm_ptr, offset, at, live & (m < M), PAIR, DP4A
            )
            total = sum_chunk(in_bytes, DP4A)
            added = chunk_sums(w, in_bytes, total, zero, scale, unit, DP4A)
            sums = sums + (so_far[m] + added,)  # noqa: RUF005
            if GATE is not None:
                added = chunk_sums(up, in_bytes, total, up_zero, up_scale, unit, DP4A)
            up_sums = up_sums + (up_so_far[m] + added,)  # noqa: RUF005
            squares = squares + (squares_so_far[m] + square,)  # noqa: RUF005
        w = next_w
        up = next_up
    dtype = y_ptr.dtype.element_ty
    for m in tl.static_range(ROWS):
        factor = 1.0
        if norm_ptr is not None:  # apply the row's norm last, so that no multiplication waits for it
            factor = tl.rsqrt(tl.sum(squares[m], 0) / K + eps)
        y = (tl.sum(sums[m], 1) * factor + bias).to(dtype)
        if GATE is not None:  # rounded where separate kernels would round
            y = activated(y.to(tl.float32), GATE).to(dtype).to(tl.float32)
            y = (y * (tl.sum(up_sums[m], 1) * factor + up_bias).to(dtype).to(tl.float32)).to(dtype)
        if residual_ptr is not None:
            y = (y.to(tl.float32) + before[m].to(tl.float32)).to(dtype)
        tl.store(y_ptr + m * y_stride + n, y, mask=n_live & (m < M))


def supports(packed: Packed, dtype: torch.dtype) -> bool:
    """Whether `gemv` multiplies activations of `dtype` with this weight (apart from the order of its columns)."""
    whole_chunks = packed.group % CHUNK == 0 and packed.shape[1] % CHUNK == 0
    return packed.kind == "int4" and dtype in (torch.bfloat16, torch.float16) and whole_chunks


def gemv(
    x: torch.Tensor,
    packed: Packed,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    wide_offset: float | None = None,
    gate: str | None = None,
    residual: torch.Tensor | None = None,
    in_order: bool = False,
    tiles: Int4Tiles | None = None,
) -> torch.Tensor:
    """small_batch.gemv for up to MOST_ROWS rows and a weight that passes `supports`; columns of x in packed order."""
    rows, inner = x.shape
    assert rows <= MOST_ROWS
    x = aligned(x)
    outputs = packed.shape[0] // (1 if gate is None else 2)
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if residual is None else residual
    norm_weight, eps = (None, 0.0) if norm is None else (aligned(norm[0]), norm[1])
    tiles = tiles or tiles_for(rows, gated=gate is not None)
    block_n, block_w, warps, ahead = tiles
    _int4_gemv_kernel(
        (triton.cdiv(outputs, block_n),), x, packed.values.view(torch.int32), packed.scale, packed.zero, bias,
        norm_weight, residual, y, rows, x.stride(0), y.stride(0), eps, wide_offset or 0.0,
        N=outputs, K=inner, GROUP=packed.group, MIDDLE=MIDDLE[packed.kind], PAIR=pair_distance(packed.group),
        ROWS=triton.next_power_of_2(rows), BLOCK_N=block_n,
        BLOCK_W=max(4, min(block_w, triton.next_power_of_2(inner // 8))), GATE=gate, IN_ORDER=in_order,
        AHEAD=min(ahead, 32 * warps // block_n), THREADS=32 * warps, DP4A=not interpreted(), num_warps=warps,
    )  # fmt: skip
    return y


def tiles_for(rows: int, *, gated: bool) -> Int4Tiles:
    """The fastest, or nearly so, of those that were tried with the shapes of an 8B model on an H100."""
    if rows == 1:
        return Int4Tiles(4, 512, 4, 4) if gated else Int4Tiles(8, 256, 2, 1)
    return Int4Tiles(8, 512, 4, 1)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, copied if it is not aligned for reading eight numbers at a time."""
    rows_apart = x.stride(0) if x.ndim > 1 else 0
    return x.clone(memory_format=torch.contiguous_format) if rows_apart % 8 or x.data_ptr() % 16 else x
