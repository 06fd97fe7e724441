"""Top-k of a token's router logits. With many tokens, each has its own program (experts.py). With few, the last of
the router's programs does it for all (router.py, routing.py), and later kernels wait for it.

Experts are ordered by keys:

    16-bit logits   int32   sortable bits of the logit (19) | EP - 1 - expert (13)
    float32         int64   sortable bits of the logit (32) | EP - 1 - expert (32)

so the largest key holds the largest logit and, among equal logits, the first expert. Sortable bits, compared as signed
integers, have the order of the floats. 19 bits are enough for a bf16 or float16 logit, because as float32 it ends in 13
zero bits. Short keys are faster: a warp finds the maximum of 32-bit integers in one instruction, of 64-bit ones in ten.
"""

import triton
import triton.language as tl

from engine.kernels.pointwise.gate import sigmoid

_LOW = tl.constexpr(0x1FFF)  # the bits of a 32-bit key that hold the expert
MOST_EXPERTS = 1 << 13


@triton.jit
def _keys(logits, e, E: tl.constexpr, EP: tl.constexpr):
    bits = (logits.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0, which equals it
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    if logits.dtype.primitive_bitwidth == 16:
        return tl.where(e < E, (bits & ~_LOW) | (EP - 1 - e), -0x80000000)
    else:
        return tl.where(e < E, (bits.to(tl.int64) << 32) | (EP - 1 - e), -0x8000000000000000)


@triton.jit
def _largest(keys):
    """The largest key, and the remaining keys."""
    best = tl.max(keys, 0)
    lowest: tl.constexpr = -0x80000000 if keys.dtype.primitive_bitwidth == 32 else -0x8000000000000000
    return best, tl.where(keys == best, lowest, keys)


@triton.jit
def _expert(key, E: tl.constexpr, EP: tl.constexpr):
    """The expert of a key, clamped to one that exists, whatever the logits were (even NaN)."""
    low = key & _LOW if key.dtype.primitive_bitwidth == 32 else (key & 0x7FFFFFFF).to(tl.int32)
    return tl.minimum(tl.maximum(EP - 1 - low, 0), E - 1)


@triton.jit
def _logit(key):
    bits = key & ~_LOW if key.dtype.primitive_bitwidth == 32 else (key >> 32).to(tl.int32)
    negative = bits ^ 0x7FFFFFFF
    if key.dtype.primitive_bitwidth == 32:
        negative = negative & ~_LOW
    return tl.where(bits < 0, negative, bits).to(tl.float32, bitcast=True)


@triton.jit
def all_experts(
    logits_ptr, expert_scale_ptr, E: tl.constexpr, EP: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """The TOP_K experts with the largest logits, and their weights as in moe.experts.choose_experts: [KP] int32 and
    [KP] float32, whose entries after the first TOP_K are meaningless.

    Loads of logits bypass the L1 cache, because other programs of this launch may have written them."""
    e = tl.arange(0, EP)
    j = tl.arange(0, KP)
    logits = tl.load(logits_ptr + e, mask=e < E, other=float("-inf"), cache_modifier=".cg")
    keys = _keys(logits, e, E, EP)
    first, keys = _largest(keys)
    chosen = tl.where(j == 0, first, first)  # [KP], with the dtype of the keys
    for i in tl.static_range(1, TOP_K):
        best, keys = _largest(keys)
        chosen = tl.where(j == i, best, chosen)
    highest = _logit(first)
    total = tl.sum(tl.exp(logits.to(tl.float32) - highest), 0)
    weights = tl.where(j < TOP_K, tl.exp(_logit(chosen) - highest) / total, 0.0)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 0)
    weights = tl.where(total == total, weights, float("nan"))
    experts = _expert(chosen, E, EP)
    if expert_scale_ptr is not None:
        weights = weights * tl.load(expert_scale_ptr + experts).to(tl.float32)
    return experts, weights


@triton.jit
def experts_of_rows(
    logits, E: tl.constexpr, EP: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """all_experts for each row of logits [T, EP], without their scales: [T, KP] int32 and [T, KP] float32."""
    e = tl.arange(0, EP)[None, :]
    j = tl.arange(0, KP)[None, :]
    keys = _keys(logits, e, E, EP)
    lowest: tl.constexpr = -0x80000000 if keys.dtype.primitive_bitwidth == 32 else -0x8000000000000000
    first = tl.max(keys, 1)[:, None]
    keys = tl.where(keys == first, lowest, keys)
    chosen = tl.where(j == 0, first, first)
    for i in tl.static_range(1, TOP_K):
        best = tl.max(keys, 1)[:, None]
        keys = tl.where(keys == best, lowest, keys)
        chosen = tl.where(j == i, best, chosen)
    highest = _logit(first)
    total = tl.sum(tl.where(e < E, tl.exp(logits.to(tl.float32) - highest), 0.0), 1)[:, None]
    weights = tl.where(j < TOP_K, tl.exp(_logit(chosen) - highest) / total, 0.0)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 1)[:, None]
    weights = tl.where(total == total, weights, float("nan"))
    return _expert(chosen, E, EP), weights


@triton.jit
def dense_factor(logits_ptr, E: tl.constexpr):
    """The sigmoid of the logit after the experts', rounded as their weights are."""
    factor = tl.load(logits_ptr + E, cache_modifier=".cg")
    return sigmoid(factor.to(tl.float32)).to(factor.dtype).to(tl.float32)
