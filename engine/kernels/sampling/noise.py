"""Gumbel noise on the GPU: the functions of engine/worker/sample/rng.py, on uint32."""

import triton
import triton.language as tl

from engine.kernels.sampling.columns import POSITION, SEED_HI, SEED_LO, word_of

_POSITION = tl.constexpr(POSITION)
_SEED_LO = tl.constexpr(SEED_LO)
_SEED_HI = tl.constexpr(SEED_HI)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _mix(x, key):
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) ^ key
    x = x ^ (x >> 15)
    x = x * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def _row_keys(low, high, position):
    """The two key words of a row."""
    k0 = _mix(low ^ 0x85EBCA6B, 0)
    k0 = _mix(k0 + high, 0)
    k0 = _mix(k0 + position, 0)
    k1 = _mix(high ^ 0xC2B2AE35, 0)
    k1 = _mix(k1 + low, 0)
    k1 = _mix(k1 ^ position, 0)
    return k0, k1


@triton.jit
def _fast_log(x, FAST: tl.constexpr):
    """log(x) with an error of about 2e-7, relative or absolute, whichever is larger: one instruction instead of
    twenty."""
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1) * _LN2
    else:
        return tl.log2(x) * _LN2


@triton.jit
def gumbel(tokens, k0, k1, FAST: tl.constexpr):
    """The float32 noise of `tokens`."""
    word = _mix(_mix(tokens.to(tl.uint32) * 0x9E3779B9, 0) ^ k0, k1) & 0x7FFFFFFF
    v = tl.minimum((word.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.999999940395355)
    # -log1p(-v); for small v, where the winners are, by its series: 1 - v would round off the bits that tell them
    # apart.
    series = v * (1.0 + v * (0.5 + v * (0.3333333333333333 + v * (0.25 + v * 0.2))))
    exponential = tl.where(v < 0.0625, series, -_fast_log(1.0 - v, FAST))
    return -_fast_log(exponential, FAST)


@triton.jit
def noise_keys_of(columns_ptr, stride, b):
    low = word_of(columns_ptr, stride, _SEED_LO, b).to(tl.uint32, bitcast=True)
    high = word_of(columns_ptr, stride, _SEED_HI, b).to(tl.uint32, bitcast=True)
    return _row_keys(low, high, word_of(columns_ptr, stride, _POSITION, b).to(tl.uint32, bitcast=True))
