"""Building blocks of kernels that multiply int4 weights in integers, for one row of x at a time.

An H100's memory delivers 26 numbers of W per clock to each multiprocessor, which can issue 128 instructions in that
time. Converting a number to a float and multiplying it takes four instructions or more: too many to keep up with the
memory. So these kernels multiply integers, four per instruction (dp4a), at 1.1 instructions a number:

    word of W   q7 q6 q5 q4 q3 q2 q1 q0     q0, q2, q4, q6: columns k to k + 3;  q1, q3, q5, q7: the same + PAIR
    x           (256 high + low) * unit     16-bit fixed point: high int8, low uint8; unit: for each CHUNK of 32 columns
                                            their largest |x| / 32767

A chunk is what a thread holds contiguously: four words, within one group. Its sum of q (256 high + low) is exact and
below 2^24, so a float32 holds it exactly, too. x loses at most 2^-16 of the chunk's largest number, a hundredth of what
that number has already lost by rounding to bf16.

Without DP4A, in the interpreter, x is a tensor [chunks, 16] for each half of a byte: the same integers, and a tenth of
the operations, which is what an interpreter's time depends on.
"""

import triton
import triton.language as tl

CHUNK = 32  # columns
WORDS_IN_CHUNK = CHUNK // 8
_CHUNK = tl.constexpr(CHUNK)
_WORDS = tl.constexpr(WORDS_IN_CHUNK)
_LARGEST = tl.constexpr(32767.0)
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: added to a small number it leaves round(number) in the lowest bits


@triton.jit
def _one(four, j: tl.constexpr, TYPE: tl.constexpr):
    """Number j of four 16-bit numbers that were read as one 64-bit number; float32."""
    return (four >> (j * 16)).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)


@triton.jit
def _larger(a, b):
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _high_and_low(a, b, c, d, unit):
    """The high and low bytes of round(number / unit), of four numbers each, in the order of a word's bytes."""
    a = (a * unit + _MAGIC).to(tl.int32, bitcast=True)
    b = (b * unit + _MAGIC).to(tl.int32, bitcast=True)
    c = (c * unit + _MAGIC).to(tl.int32, bitcast=True)
    d = (d * unit + _MAGIC).to(tl.int32, bitcast=True)
    pick: tl.constexpr = """{ .reg .b32 p, q; prmt.b32 p, $2, $3, 0x5410; prmt.b32 q, $4, $5, 0x5410;
        prmt.b32 $0, p, q, 0x7531; prmt.b32 $1, p, q, 0x6420; }"""
    return tl.inline_asm_elementwise(pick, "=r,=r,r,r,r,r", [a, b, c, d], (tl.int32, tl.int32), True, 1)


@triton.jit
def _dot_chunk(w, x):
    """The sum of q (256 high + low), int32, over the numbers of a chunk: four words of codes, and x as `fixed_point`
    returns it. The upper halves of bytes count 16 times until the end, which saves shifting each word."""
    near_high, near_low, far_high, far_low = x
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


@triton.jit
def sum_chunk(x, DP4A: tl.constexpr):
    """The sum of x alone over each chunk, int32."""
    if DP4A:
        ones = tl.full(x[0][0].shape, 0x11111111, tl.int32)
        return _dot_chunk((ones, ones, ones, ones), x)
    else:
        return tl.sum(x[0], 1) + tl.sum(x[1], 1)


@triton.jit
def _sixteen(at_ptr, at, live):
    """The 16 numbers from column `at` of each chunk on, as four 64-bit numbers of four each; zeros outside. A thread
    reads those of its own chunks, so nothing moves between threads."""
    load: tl.constexpr = """{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b64 $0, 0; mov.b64 $1, 0; mov.b64 $2, 0;
        mov.b64 $3, 0; @p ld.global.v2.b64 {$0, $1}, [$4]; @p ld.global.v2.b64 {$2, $3}, [$4 + 16]; }"""
    address = at_ptr.to(tl.int64) + at * (at_ptr.dtype.element_ty.primitive_bitwidth // 8)
    return tl.inline_asm_elementwise(
        load, "=&l,=&l,=&l,=&l,l,r", [address, live.to(tl.int32)], (tl.int64, tl.int64, tl.int64, tl.int64), False, 1
    )


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
        weight = weights[i]
        if offset is not None:
            weight += offset
        found = found + (numbers[i] * weight,)  # noqa: RUF005
    return found


@triton.jit
def _in_bytes(numbers, steps):
    high = ()
    low = ()
    for i in tl.static_range(4):
        four = numbers[4 * i], numbers[4 * i + 1], numbers[4 * i + 2], numbers[4 * i + 3]
        highs, lows = _high_and_low(four[0], four[1], four[2], four[3], steps)
        high = high + (highs,)  # noqa: RUF005
        low = low + (lows,)  # noqa: RUF005
    return high, low


@triton.jit
def fixed_point(x_ptr, norm_ptr, offset, at, live, PAIR: tl.constexpr, DP4A: tl.constexpr):
    """x in fixed point for the chunks that begin at columns `at`: (high and low bytes, those of the columns PAIR
    farther), each for a chunk's four words; the chunks' units; and, for a norm, the sum of squares of x [chunks]."""
    if not DP4A:
        return _fixed_point_interpreted(x_ptr, norm_ptr, offset, at, live, PAIR)
    x_type: tl.constexpr = x_ptr.dtype.element_ty
    near = _numbers(_sixteen(x_ptr, at, live), x_type)
    far = _numbers(_sixteen(x_ptr, at + PAIR, live), x_type)
    near_squares = near[0] * near[0]
    far_squares = far[0] * far[0]
    for i in tl.static_range(1, 16):
        near_squares += near[i] * near[i]
        far_squares += far[i] * far[i]
    if norm_ptr is not None:
        norm_type: tl.constexpr = norm_ptr.dtype.element_ty
        near = _normed(near, _numbers(_sixteen(norm_ptr, at, live), norm_type), offset)
        far = _normed(far, _numbers(_sixteen(norm_ptr, at + PAIR, live), norm_type), offset)
    largest = _larger(near[0], far[0])
    for i in tl.static_range(1, 16):
        largest = _larger(largest, _larger(near[i], far[i]))
    steps = _LARGEST / tl.maximum(largest, 1e-30)
    near_high, near_low = _in_bytes(near, steps)
    far_high, far_low = _in_bytes(far, steps)
    return (near_high, near_low, far_high, far_low), largest / _LARGEST, near_squares + far_squares


@triton.jit
def _fixed_point_interpreted(x_ptr, norm_ptr, offset, at, live, PAIR: tl.constexpr):
    columns = at[:, None] + tl.arange(0, 16)[None, :]
    near = tl.load(x_ptr + columns, mask=live[:, None], other=0.0).to(tl.float32)
    far = tl.load(x_ptr + columns + PAIR, mask=live[:, None], other=0.0).to(tl.float32)
    squares = tl.sum(near * near, 1) + tl.sum(far * far, 1)
    if norm_ptr is not None:
        near_weight = tl.load(norm_ptr + columns, mask=live[:, None], other=0.0).to(tl.float32)
        far_weight = tl.load(norm_ptr + columns + PAIR, mask=live[:, None], other=0.0).to(tl.float32)
        if offset is not None:
            near_weight += offset
            far_weight += offset
        near *= near_weight
        far *= far_weight
    larger = _larger(near, far)
    largest = tl.max(larger, 1) + tl.sum(tl.where(larger == larger, 0.0, larger), 1)  # NaN stays NaN
    steps = _LARGEST / tl.maximum(largest, 1e-30)[:, None]
    near = ((near * steps + _MAGIC).to(tl.int32, bitcast=True) << 16) >> 16
    far = ((far * steps + _MAGIC).to(tl.int32, bitcast=True) << 16) >> 16
    return (near, far), largest / _LARGEST, squares


@triton.jit
def first_columns(chunk, PAIR: tl.constexpr):
    """The first column of each chunk."""
    byte = chunk * (4 * _WORDS)
    return byte // PAIR * (2 * PAIR) + byte % PAIR


@triton.jit
def load_words(
    w_at, n_live, words, start: tl.constexpr, WORDS: tl.constexpr, BLOCK_W: tl.constexpr, ALL: tl.constexpr
):
    """W's words [BLOCK_N, BLOCK_W] from `start` on, zeros outside. ALL: all rows are live, and masks are left out."""
    if ALL and start + BLOCK_W <= WORDS:
        return tl.load(w_at + start)
    elif start + BLOCK_W <= WORDS:
        return tl.load(w_at + start, mask=n_live[:, None], other=0)
    else:
        return tl.load(w_at + start, mask=n_live[:, None] & (words < WORDS - start)[None, :], other=0)


@triton.jit
def of_chunks(
    at_ptr, n, n_live, start: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_W: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """A per-group quantity (scale or zero point) for outputs n and the chunks of BLOCK_W words from word `start` on:
    [N, chunks]."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    column = start * 8 + tl.arange(0, BLOCK_W // _WORDS) * _CHUNK
    place = n[:, None].to(tl.int64) * GROUPS + (column // GROUP)[None, :]
    if ALL and start + BLOCK_W <= K // 8:
        return tl.load(at_ptr + place)
    else:
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
    if DP4A:
        x = (_for_outputs(x[0]), _for_outputs(x[1]), _for_outputs(x[2]), _for_outputs(x[3]))
        dots = _dot_chunk(_words_of_chunks(words), x)
    else:
        codes = words[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]
        codes = tl.reshape(codes, [words.shape[0], words.shape[1] // _WORDS, 4 * _WORDS])
        dots = tl.sum((codes & 15) * x[0][None, :, :] + ((codes >> 4) & 15) * x[1][None, :, :], 2)
    return (dots - zero * total[None, :]).to(tl.float32) * (scale * unit[None, :])
