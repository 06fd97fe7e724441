"""The sampling parameters of a step's requests, as kernels read them.

`columns` int32 [8, S] has one entry per request; floats are stored as their bits.
"""

import triton
import triton.language as tl

ROW, POSITION, TEMPERATURE, SEED_LO, SEED_HI, TOP_K, TOP_P, LOG_MIN_P = range(8)
NUM_COLUMNS = 8

BLOCK = 4096          # tokens per program, in kernels that split the vocabulary
STREAM_BLOCK = 8192   # tokens at a time, in kernels that loop over a whole row
STREAM_WARPS = 16

INF = tl.constexpr(float("inf"))
ONE = tl.constexpr(float(1 << 40))  # fixed point: the weight of the best token; 2^18 of them still fit 63 bits


@triton.jit
def word_of(columns_ptr, stride, which, b):
    return tl.load(columns_ptr + which * stride + b)


@triton.jit
def number_of(columns_ptr, stride, which, b):
    return tl.load(columns_ptr + which * stride + b).to(tl.float32, bitcast=True)


# Integers that sort like the floats: for bisection, and for comparing (logit, id) pairs.


@triton.jit
def key_of(x, EMPTY: tl.constexpr):
    """The int64 key of a float32 whose low EMPTY bits are 0; keys sort like the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) >> EMPTY


@triton.jit
def value_of(key, EMPTY: tl.constexpr):
    """The float32 that has this key."""
    whole = (key << EMPTY) + tl.where(key < 0, (1 << EMPTY) - 1, 0)
    bits = whole.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(scaled, top):
    """Fixed-point weight exp(scaled - top) of scaled logits."""
    return (tl.exp(scaled - top) * ONE).to(tl.int64)
