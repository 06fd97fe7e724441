"""Gated DeltaNet on a GPU: sequences with one new token. One kernel, bound by reading and writing the state once.

reference.py has the formulas, and the reference. Key and value dimensions are powers of two, at least 16.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.pointwise.gate import sigmoid, softplus
from engine.kernels.recurrent.shape import DeltaShape, check_contiguous
from engine.kernels.runtime.launcher import kernel, wait_for_previous

_FEW_SEQUENCES = 16  # up to this many, a state is split more finely, so that every multiprocessor has work


@triton.jit
def _conv_newest(x_at, ring_at, weight_ptr, c, position, stride_row, W: tl.constexpr, CACHE: tl.constexpr):
    """The convolution of channels c at `position`, with silu; x_at points to that position's own inputs."""
    x = tl.load(x_at + c, cache_modifier=CACHE)
    y = x.to(tl.float32) * tl.load(weight_ptr + c * W + W - 1).to(tl.float32)
    for j in tl.static_range(W - 1):  # position - (W - 1) + j, modulo W
        row = (position + 1 + j) % W
        live = (c >= 0) & (position + j >= W - 1)
        past = tl.load(ring_at + row * stride_row + c, mask=live, other=0.0, cache_modifier=CACHE)
        y += past.to(tl.float32) * tl.load(weight_ptr + c * W + j).to(tl.float32)
    return x, (y * sigmoid(y)).to(x.dtype).to(tl.float32)


@triton.jit
def _conv_newest_once(
    x_at, ring_at, weight_ptr, c, position, stride_row, W: tl.constexpr, ROWS: tl.constexpr, CACHE: tl.constexpr
):
    """The same as the sum of a tile [ROWS, len(c)], so that no two threads load the same number.

    `_conv_newest` loads a number in every thread that needs the result. For a value, these are all threads that hold
    its row of the state. For q and k they are few, and load eight numbers at a time.
    """
    j = tl.arange(0, ROWS)[:, None]
    past = ring_at + (position + 1 + j) % W * stride_row + c[None, :]
    live = (j < W) & (position + j >= W - 1)
    x = tl.load(tl.where(j == W - 1, x_at + c[None, :], past), mask=live, other=0.0, cache_modifier=CACHE)
    y = tl.sum(x.to(tl.float32) * tl.load(weight_ptr + c[None, :] * W + j, mask=live, other=0.0).to(tl.float32), 0)
    return (y * sigmoid(y)).to(x.dtype).to(tl.float32)


@kernel
def _decode_kernel(
    x_ptr, ba_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, positions_ptr, slots_ptr, q_starts_ptr, counts_ptr,
    state_ptr, ring_ptr, out_ptr, x_stride, ba_stride, state_stride, ring_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr, MIXED: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # EARLY: the previous kernel started this one when all inputs but `ba` were complete, so only `ba` must be waited
    # for. The multiprocessor's L1 cache may hold older contents, so the other loads bypass it.
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    PARTS: tl.constexpr = V // BLOCK_V
    C: tl.constexpr = 2 * HK * K + HV * V
    sequence = tl.program_id(1)
    head = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    decay = -tl.exp(tl.load(a_log_ptr + head))
    dt_bias = tl.load(dt_bias_ptr + head)
    k_range = tl.arange(0, K)
    v_range = part * BLOCK_V + tl.arange(0, BLOCK_V)
    row = head * V + v_range
    q_channel = head // (HV // HK) * K + k_range
    k_channel = q_channel + HK * K
    v_channel = 2 * HK * K + row
    if not EARLY:
        wait_for_previous(PDL)
    token = sequence.to(tl.int64)
    count = 1
    if MIXED:
        token = tl.load(q_starts_ptr + sequence).to(tl.int64)
        count = tl.load(counts_ptr + sequence).to(tl.int32)
    if count == 1:
        position = tl.load(positions_ptr + token, cache_modifier=CACHE)
        slot = tl.load(slots_ptr + sequence, cache_modifier=CACHE).to(tl.int64)
        state_at = state_ptr + slot * state_stride + row[:, None] * K + k_range[None, :]
        live = (row >= 0)[:, None] & (position > 0)
        state = tl.load(state_at, mask=live, other=0.0, cache_modifier=CACHE).to(tl.float32)

        x_at = x_ptr + token * x_stride
        ring_at = ring_ptr + slot * ring_stride
        q_in, q = _conv_newest(x_at, ring_at, weight_ptr, q_channel, position, C, W, CACHE)
        k_in, k = _conv_newest(x_at, ring_at, weight_ptr, k_channel, position, C, W, CACHE)
        v = _conv_newest_once(x_at, ring_at, weight_ptr, v_channel, position, C, W, ROWS, CACHE)
        v_in = tl.load(x_at + v_channel, cache_modifier=CACHE)
        q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * K**-0.5)
        k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        if EARLY:
            wait_for_previous(PDL)
        # The ring's row of this position: no program reads it in this step.
        newest = ring_at + (position % W) * C
        tl.store(newest + v_channel, v_in)
        first = (part == 0) & (head % (HV // HK) == 0)
        tl.store(newest + q_channel, q_in, mask=(k_range >= 0) & first)
        tl.store(newest + k_channel, k_in, mask=(k_range >= 0) & first)

        beta = sigmoid(tl.load(ba_ptr + token * ba_stride + head).to(tl.float32))
        a = tl.load(ba_ptr + token * ba_stride + HV + head).to(tl.float32)
        state = state * tl.exp(decay * softplus(a + dt_bias))
        delta = (v - tl.sum(state * k[None, :], 1)) * beta
        state = state + delta[:, None] * k[None, :]
        out = tl.sum(state * q[None, :], 1)
        tl.store(state_at, state.to(state_ptr.dtype.element_ty))
        tl.store(out_ptr + token * (HV * V) + row, out.to(out_ptr.dtype.element_ty))


def decode(
    qkv: torch.Tensor,
    ba: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    state: torch.Tensor,
    conv_state: torch.Tensor,
    shape: DeltaShape,
    out: torch.Tensor,
    *,
    q_starts: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    early: bool = False,
    block_v: int | None = None,
    num_warps: int = 4,
) -> None:
    """Sequences with one new token: from the convolution's inputs to the rule's outputs; updates both states.

    qkv [T, C] and ba [T, 2 HV] may be columns of wider rows; conv_weight [C, W]; a_log, dt_bias [HV] float32;
    positions [T], slots [B]; out [T, HV, V]. Token i belongs to sequence i. With `q_starts` and `counts` [B], these say
    which tokens a sequence has; those with more than one are left to `prefill`.

    early: the previous kernel produces `ba`, and starts this one as soon as everything older is complete. Ignored with
    `counts`, where another kernel comes first.
    """
    check_contiguous(conv_weight, state, conv_state, out)
    batch = slots.shape[0]
    width = conv_weight.shape[1]
    block_v = block_v or min(shape.value_dim, 32 if batch <= _FEW_SEQUENCES else 256 // state.element_size())
    _decode_kernel(
        (shape.value_heads * (shape.value_dim // block_v), batch), qkv, ba, conv_weight, a_log, dt_bias, positions,
        slots, q_starts, counts, state, conv_state, out, qkv.stride(0), ba.stride(0), state.stride(0),
        conv_state.stride(0),
        **shape.constants, W=width, ROWS=triton.next_power_of_2(width), BLOCK_V=block_v, MIXED=counts is not None,
        EARLY=early and counts is None, num_warps=num_warps,
    )  # fmt: skip
