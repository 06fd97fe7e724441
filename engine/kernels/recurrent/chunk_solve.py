"""Solves the triangular system of Gated DeltaNet's chunked form: what each token of a chunk writes and reads.

reference.py has the formulas; prefill.py says when this runs.
"""

import triton
import triton.language as tl

from engine.kernels.pointwise.gate import sigmoid, softplus
from engine.kernels.runtime.launcher import kernel, wait_for_previous


@triton.jit
def _halves(x):
    """x as a sum of two float16 numbers, which together keep 22 bits of it; |x| must not be far above 1."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _times(a, b):
    """a bᵀ of float32 tiles [16, 16], using about 22 bits of their numbers.

    In a program of a single warp, a product's registers already have the layout in which the next matmul takes its left
    factor, or transposed its right factor, so no data moves. (`trans` must come before `_halves`, else Triton
    transposes through shared memory.)
    """
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(tl.trans(b))
    y = tl.dot(a_low, b_high)
    y = tl.dot(a_high, b_low, y)
    return tl.dot(a_high, b_high, y)


@triton.jit
def _pairs(lower, upper):
    """The first step of inverting a [16, 16] tile: X = (I + lower)⁻¹ within pairs of rows, and Y = Xᵀ."""
    differ = tl.arange(0, 16)[:, None] ^ tl.arange(0, 16)[None, :]
    rest = tl.where(differ == 0, 1.0, 0.0)
    return tl.where(differ == 1, -lower, rest), tl.where(differ == 1, -upper, rest)


@triton.jit
def _twice_as_large(x, y, lower, level):
    """From inverted diagonal blocks of 2^level rows to those of twice as many."""
    differ = tl.arange(0, 16)[:, None] ^ tl.arange(0, 16)[None, :]  # the highest bit gives the smallest common block
    step = _times(y, tl.where((differ >> level) == 1, lower, 0.0))  # (B X)ᵀ
    return x - _times(x, step), y - _times(step, x)


@triton.jit
def inverse_64(l00, u00, l11, u11, l22, u22, l33, u33, l10, l20, l21, l30, l31, l32):
    """The ten blocks [16, 16] of (I + L)⁻¹ that are not zero, from those of L [64, 64] and, on the diagonal, of Lᵀ.

    Within a diagonal block, inverses of 1, 2, 4 and 8 rows are combined in pairs; B is the block of L below the first
    and left of the second:

        [X1⁻¹     ]   inverted   [X1         ]
        [B    X2⁻¹]      is      [-X2 B X1  X2]      for all pairs of a size at once: X - X B X

    Below the diagonal, block by block: X[i, j] = -X[i, i] Σ L[i, m] X[m, j], j <= m < i. The Y are the transposes.

    Unlike a series of powers of L, no intermediate number grows beyond the inverse itself. With keys of length 1 and
    beta <= 1, every number stays within [-1, 1], because the inverse, and L times it, are products of contractions
    between two keys. For that range, pairs of float16 numbers are exact enough.
    """
    x00, y00 = _pairs(l00, u00)
    x11, y11 = _pairs(l11, u11)
    x22, y22 = _pairs(l22, u22)
    x33, y33 = _pairs(l33, u33)
    for level in range(1, 4):  # not unrolled: the code would outgrow the instruction cache
        x00, y00 = _twice_as_large(x00, y00, l00, level)
        x11, y11 = _twice_as_large(x11, y11, l11, level)
        x22, y22 = _twice_as_large(x22, y22, l22, level)
        x33, y33 = _twice_as_large(x33, y33, l33, level)
    step = _times(y00, l10)  # (L X)ᵀ
    x10, y10 = -_times(x11, step), -_times(step, x11)
    step = _times(y11, l21)
    x21, y21 = -_times(x22, step), -_times(step, x22)
    x32 = -_times(x33, _times(y22, l32))
    step = _times(y00, l20) + _times(y10, l21)
    x20, y20 = -_times(x22, step), -_times(step, x22)
    x31 = -_times(x33, _times(y11, l31) + _times(y21, l32))
    x30 = -_times(x33, _times(y00, l30) + _times(y10, l31) + _times(y20, l32))
    return x00, x10, x11, x20, x21, x22, x30, x31, x32, x33


@triton.jit
def _gates(ba_at, row, live, ba_stride, decay, dt_bias, before, HV: tl.constexpr):
    """beta of 16 tokens, and the logarithm of the decay since the chunk's start; `before` is its value before them."""
    beta = sigmoid(tl.load(ba_at + row * ba_stride, mask=live, other=0.0).to(tl.float32))
    a = tl.load(ba_at + row * ba_stride + HV, mask=live, other=0.0).to(tl.float32)
    g = tl.where(live, decay * softplus(a + dt_bias), 0.0)
    return beta, before + tl.cumsum(g, 0), before + tl.sum(g, 0)


@triton.jit
def _on_diagonal(products, total, beta):
    """A diagonal block of the system, and its transpose. Both come from the same products and decay differences, whose
    magnitudes are symmetric."""
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    since = products * tl.exp(-tl.abs(total[:, None] - total[None, :]))
    return tl.where(i > j, since * beta[:, None], 0.0), tl.where(i < j, since * beta[None, :], 0.0)


@triton.jit
def _below(products, total, beta, earlier):
    return products * tl.exp(total[:, None] - earlier[None, :]) * beta[:, None]


@triton.jit
def _scaled(x00, x10, x11, x20, x21, x22, x30, x31, x32, x33, scale0, scale1, scale2, scale3, dtype: tl.constexpr):
    """The ten blocks, each column times its scale, rounded to the dtype of the matmuls."""
    scale0, scale1, scale2, scale3 = scale0[None, :], scale1[None, :], scale2[None, :], scale3[None, :]
    x00, x10, x11 = (x00 * scale0).to(dtype), (x10 * scale0).to(dtype), (x11 * scale1).to(dtype)
    x20, x21, x22 = (x20 * scale0).to(dtype), (x21 * scale1).to(dtype), (x22 * scale2).to(dtype)
    x30, x31 = (x30 * scale0).to(dtype), (x31 * scale1).to(dtype)
    return x00, x10, x11, x20, x21, x22, x30, x31, (x32 * scale2).to(dtype), (x33 * scale3).to(dtype)


@triton.jit
def _product(a, b, y):
    return tl.dot(a, tl.trans(b), y, input_precision="tf32x3")


@triton.jit
def _mix(x, y):
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def _apply(
    x00, x10, x11, x20, x21, x22, x30, x31, x32, x33, in_at, out_at, live0, live1, live2, live3,
    IN: tl.constexpr, OUT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The blocks of a matrix times 64 rows of D numbers. IN and OUT are the strides of these rows and of the
    result's."""
    row = tl.arange(0, 16)[:, None]
    live0, live1, live2, live3 = live0[:, None], live1[:, None], live2[:, None], live3[:, None]
    for first in range(0, D, BLOCK):
        d = first + tl.arange(0, BLOCK)[None, :]
        at = in_at + row * IN + d
        y0 = tl.load(at, mask=live0, other=0.0)
        y1 = tl.load(at + 16 * IN, mask=live1, other=0.0)
        y2 = tl.load(at + 32 * IN, mask=live2, other=0.0)
        y3 = tl.load(at + 48 * IN, mask=live3, other=0.0)
        at = out_at + row * OUT + d
        tl.store(at, _mix(x00, y0).to(y0.dtype), mask=live0)
        out = _mix(x10, y0) + _mix(x11, y1)
        tl.store(at + 16 * OUT, out.to(y0.dtype), mask=live1)
        out = _mix(x20, y0) + _mix(x21, y1) + _mix(x22, y2)
        tl.store(at + 32 * OUT, out.to(y0.dtype), mask=live2)
        out = _mix(x30, y0) + _mix(x31, y1) + _mix(x32, y2) + _mix(x33, y3)
        tl.store(at + 48 * OUT, out.to(y0.dtype), mask=live3)


@kernel
def solve_kernel(
    qkv_ptr, ba_ptr, a_log_ptr, dt_bias_ptr, q_starts_ptr, counts_ptr, chunks_ptr, u_ptr, w_ptr, total_ptr, ba_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Runs on a single warp, so that 16 x 16 tiles pass from one matmul to the next in registers."""
    tl.static_assert(SIZE == 64)
    C: tl.constexpr = 2 * HK * K + HV * V
    head = tl.program_id(0)
    decay = -tl.exp(tl.load(a_log_ptr + head))
    dt_bias = tl.load(dt_bias_ptr + head)
    wait_for_previous(PDL)
    sequence = tl.load(chunks_ptr + tl.program_id(1) * 2)
    first = tl.load(chunks_ptr + tl.program_id(1) * 2 + 1)
    left = tl.load(counts_ptr + sequence).to(tl.int32) - first
    token = tl.load(q_starts_ptr + sequence).to(tl.int64) + first
    i = tl.arange(0, 16)
    live0, live1, live2, live3 = i < left, i + 16 < left, i + 32 < left, i + 48 < left

    k_at = qkv_ptr + token * C + (HK + head // (HV // HK)) * K
    p00 = tl.zeros((16, 16), tl.float32)
    p10, p11, p20, p21, p22, p30, p31, p32, p33 = p00, p00, p00, p00, p00, p00, p00, p00, p00
    for first_k in range(0, K, BLOCK_K):
        at = k_at + i[:, None] * C + first_k + tl.arange(0, BLOCK_K)[None, :]
        k0 = tl.load(at, mask=live0[:, None], other=0.0)
        k1 = tl.load(at + 16 * C, mask=live1[:, None], other=0.0)
        k2 = tl.load(at + 32 * C, mask=live2[:, None], other=0.0)
        k3 = tl.load(at + 48 * C, mask=live3[:, None], other=0.0)
        p00, p10, p20, p30 = _product(k0, k0, p00), _product(k1, k0, p10), _product(k2, k0, p20), _product(k3, k0, p30)
        p11, p21, p31 = _product(k1, k1, p11), _product(k2, k1, p21), _product(k3, k1, p31)
        p22, p32, p33 = _product(k2, k2, p22), _product(k3, k2, p32), _product(k3, k3, p33)

    ba_at = ba_ptr + token * ba_stride + head
    beta0, total0, before = _gates(ba_at, i, live0, ba_stride, decay, dt_bias, 0.0, HV)
    beta1, total1, before = _gates(ba_at, i + 16, live1, ba_stride, decay, dt_bias, before, HV)
    beta2, total2, before = _gates(ba_at, i + 32, live2, ba_stride, decay, dt_bias, before, HV)
    beta3, total3, before = _gates(ba_at, i + 48, live3, ba_stride, decay, dt_bias, before, HV)
    total_at = total_ptr + token * HV + head + i * HV
    tl.store(total_at, total0, mask=live0)
    tl.store(total_at + 16 * HV, total1, mask=live1)
    tl.store(total_at + 32 * HV, total2, mask=live2)
    tl.store(total_at + 48 * HV, total3, mask=live3)

    l00, u00 = _on_diagonal(p00, total0, beta0)
    l11, u11 = _on_diagonal(p11, total1, beta1)
    l22, u22 = _on_diagonal(p22, total2, beta2)
    l33, u33 = _on_diagonal(p33, total3, beta3)
    x00, x10, x11, x20, x21, x22, x30, x31, x32, x33 = inverse_64(
        l00, u00, l11, u11, l22, u22, l33, u33,
        _below(p10, total1, beta1, total0), _below(p20, total2, beta2, total0), _below(p21, total2, beta2, total1),
        _below(p30, total3, beta3, total0), _below(p31, total3, beta3, total1), _below(p32, total3, beta3, total2),
    )  # fmt: skip
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    v00, v10, v11, v20, v21, v22, v30, v31, v32, v33 = _scaled(
        x00, x10, x11, x20, x21, x22, x30, x31, x32, x33, beta0, beta1, beta2, beta3, dtype
    )
    beta0, beta1 = beta0 * tl.exp(total0), beta1 * tl.exp(total1)
    beta2, beta3 = beta2 * tl.exp(total2), beta3 * tl.exp(total3)
    k00, k10, k11, k20, k21, k22, k30, k31, k32, k33 = _scaled(
        x00, x10, x11, x20, x21, x22, x30, x31, x32, x33, beta0, beta1, beta2, beta3, dtype
    )
    _apply(
        v00, v10, v11, v20, v21, v22, v30, v31, v32, v33, qkv_ptr + token * C + 2 * HK * K + head * V,
        u_ptr + (token * HV + head) * V, live0, live1, live2, live3, C, HV * V, V, BLOCK_V,
    )  # fmt: skip
    _apply(
        k00, k10, k11, k20, k21, k22, k30, k31, k32, k33, k_at, w_ptr + (token * HV + head) * K,
        live0, live1, live2, live3, C, HV * K, K, BLOCK_K,
    )  # fmt: skip
