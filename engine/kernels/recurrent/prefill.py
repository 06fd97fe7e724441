"""Gated DeltaNet on a GPU: sequences with several new tokens, which are processed in chunks.

    plan_chunks     once a step: which tokens form a chunk
    conv            causal convolution, silu, norm of q and k               [a chunk, a head]
    keep inputs     the convolution's newest inputs go into the ring        [a sequence, channels]
    solve           U and W: what each token writes and reads               [a chunk, a value head]
    run chunks      chunk after chunk: outputs, and the next chunk's state  [a sequence, a value head, part of V]

In brackets: the work of one program. reference.py has the formulas, and the reference; `solve` is chunk_solve.py. Key
and value dimensions are powers of two, at least 16.
"""

from collections.abc import Iterable, Mapping

import torch
import triton
import triton.language as tl

from engine.kernels.pointwise.gate import sigmoid
from engine.kernels.recurrent.chunk_solve import solve_kernel
from engine.kernels.recurrent.reference import CHUNK
from engine.kernels.recurrent.shape import DeltaShape, check_contiguous
from engine.kernels.runtime.launcher import kernel, target_of, wait_for_previous


@kernel
def _plan_kernel(counts_ptr, chunks_ptr, B, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    chunk = tl.program_id(0)
    before = 0  # chunks of the sequences in earlier blocks
    sequence = 0
    first = 0
    for at in range(0, B, BLOCK):
        i = at + tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + i, mask=i < B, other=0).to(tl.int32)
        chunks = tl.where(counts > 1, (counts + SIZE - 1) // SIZE, 0)
        ends = before + tl.cumsum(chunks, 0)
        mine = (ends - chunks <= chunk) & (chunk < ends)
        sequence += tl.sum(tl.where(mine, i, 0), 0)
        first += tl.sum(tl.where(mine, chunk - ends + chunks, 0), 0)
        before += tl.sum(chunks, 0)
    tl.store(chunks_ptr + chunk * 2, sequence)
    tl.store(chunks_ptr + chunk * 2 + 1, tl.where(chunk < before, first * SIZE, 1 << 30))


def num_chunks(counts: Iterable[int]) -> int:
    """How many chunks a step has whose sequences have `counts` tokens; sequences with one token have none."""
    return sum(-(-count // CHUNK) for count in counts if count > 1)


def plan_chunks(counts: torch.Tensor, total: int) -> torch.Tensor:
    """[total, 2] int32: each chunk's sequence, and its first token among the sequence's tokens of the step.

    `counts` [B]: the tokens of each sequence, on the device. The host only needs to know `total`, which is `num_chunks`
    or more; if it is more, the last chunks are empty.
    """
    chunks = torch.empty(total, 2, dtype=torch.int32, device=counts.device)
    _plan_kernel((total,), counts, chunks, counts.shape[0], SIZE=CHUNK, BLOCK=256, num_warps=4)
    return chunks


@triton.jit
def _unit(x):
    """Rows of x [n, D], normalised to length 1."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@kernel
def _conv_kernel(
    x_ptr, weight_ptr, ring_ptr, positions_ptr, slots_ptr, q_starts_ptr, counts_ptr, chunks_ptr, out_ptr,
    x_stride, ring_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Convolve a chunk's tokens in K channels: a head of q or k, which is normalised, too, or as many channels of v."""
    C: tl.constexpr = 2 * HK * K + HV * V
    head = tl.program_id(0)
    c = head * K + tl.arange(0, K)
    wait_for_previous(PDL)
    sequence = tl.load(chunks_ptr + tl.program_id(1) * 2)
    first = tl.load(chunks_ptr + tl.program_id(1) * 2 + 1)
    q_start = tl.load(q_starts_ptr + sequence).to(tl.int64)
    start = tl.load(positions_ptr + q_start)
    count = tl.load(counts_ptr + sequence)
    t = first + tl.arange(0, SIZE)
    live = (t < count)[:, None]
    x_at = x_ptr + (q_start + t)[:, None] * x_stride + c[None, :]
    x = tl.load(x_at, mask=live, other=0.0)
    y = x.to(tl.float32) * tl.load(weight_ptr + c * W + W - 1).to(tl.float32)[None, :]
    for j in tl.static_range(W - 1):
        back = W - 1 - j
        past = tl.load(x_at - back * x_stride, mask=live & (t >= back)[:, None], other=0.0).to(tl.float32)
        if first == 0:  # inputs from before this step are in the ring
            at = start + t - back
            ring_at = ring_ptr + tl.load(slots_ptr + sequence).to(tl.int64) * ring_stride
            ring_at = ring_at + ((at + W) % W)[:, None] * C + c[None, :]
            past += tl.load(ring_at, mask=((t < back) & (at >= 0))[:, None], other=0.0).to(tl.float32)
        y += past * tl.load(weight_ptr + c * W + j).to(tl.float32)[None, :]
    y = (y * sigmoid(y)).to(x.dtype).to(tl.float32)
    if head < 2 * HK:
        y = _unit(y)
        if head < HK:
            y = y * K**-0.5
    tl.store(out_ptr + (q_start + t)[:, None] * C + c[None, :], y.to(x.dtype), mask=live)


@kernel
def _keep_inputs_kernel(
    x_ptr, ring_ptr, positions_ptr, slots_ptr, q_starts_ptr, counts_ptr, C, x_stride, ring_stride,
    W: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    sequence = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts_ptr + sequence)
    if count > 1:
        q_start = tl.load(q_starts_ptr + sequence).to(tl.int64)
        start = tl.load(positions_ptr + q_start)
        ring_at = ring_ptr + tl.load(slots_ptr + sequence).to(tl.int64) * ring_stride + c
        for j in tl.static_range(W):
            t = count - 1 - j
            live = (c < C) & (t >= 0)
            x = tl.load(x_ptr + (q_start + t) * x_stride + c, mask=live, other=0.0)
            tl.store(ring_at + ((start + t) % W) * C, x, mask=live)


@kernel
def _run_chunks_kernel(
    qkv_ptr, positions_ptr, slots_ptr, q_starts_ptr, counts_ptr, u_ptr, w_ptr, total_ptr, state_ptr, out_ptr,
    state_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr, BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The state is passed from chunk to chunk transposed, [K, BLOCK_V], which is the layout that all matmuls need
    except the one that computes its increment."""
    PARTS: tl.constexpr = V // BLOCK_V
    C: tl.constexpr = 2 * HK * K + HV * V
    sequence = tl.program_id(1)
    head = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    wait_for_previous(PDL)
    count = tl.load(counts_ptr + sequence).to(tl.int32)
    if count > 1:
        q_start = tl.load(q_starts_ptr + sequence).to(tl.int64)
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
        i = tl.arange(0, SIZE)
        row = i[:, None]
        visible = row >= i[None, :]  # rows after the last token may hold anything: no other row sees them
        k_range = tl.arange(0, K)[None, :]
        v_range = part * BLOCK_V + tl.arange(0, BLOCK_V)
        state_row = (head * V + v_range)[:, None]
        state_at = state_ptr + slot * state_stride + state_row * K + k_range
        started = tl.load(positions_ptr + q_start) > 0
        state = tl.trans(tl.load(state_at, mask=(state_row >= 0) & started, other=0.0).to(tl.float32))
        # Rows are counted from the chunk's first row, so that their offsets are known at compile time.
        q_at = qkv_ptr + q_start * C + (head // (HV // HK)) * K
        w_at = w_ptr + (q_start * HV + head) * K
        u_at = u_ptr + (q_start * HV + head) * V
        out_at = out_ptr + (q_start * HV + head) * V
        total_at = total_ptr + q_start * HV + head
        for first in range(0, count, SIZE):
            live = i < count - first
            chunk = tl.cast(first, tl.int64)
            w = tl.load(w_at + chunk * (HV * K) + (row * (HV * K) + k_range), mask=live[:, None], other=0.0)
            q = tl.load(q_at + chunk * C + (row * C + k_range), mask=live[:, None], other=0.0)
            k = tl.load(q_at + chunk * C + HK * K + (row * C + k_range), mask=live[:, None], other=0.0)
            u = tl.load(u_at + chunk * (HV * V) + (row * (HV * V) + v_range[None, :]), mask=live[:, None], other=0.0)
            total = tl.load(total_at + chunk * HV + i * HV, mask=live, other=0.0)
            at_end = tl.load(total_at + (chunk + tl.minimum(SIZE, count - first) - 1) * HV)

            before = state.to(w.dtype)
            delta = u.to(tl.float32) - tl.dot(w, before, input_precision="tf32x3")
            products = tl.dot(q, tl.trans(k), input_precision="tf32x3")
            out = tl.dot(q, before, input_precision="tf32x3") * tl.exp(total)[:, None]
            since = tl.exp(tl.where(visible, total[:, None] - total[None, :], 0.0))
            scores = tl.where(visible, products * since, 0.0).to(w.dtype)
            out = tl.dot(scores, delta.to(w.dtype), out, input_precision="tf32x3")
            delta = (delta * tl.exp(at_end - total)[:, None]).to(w.dtype)
            state = tl.dot(tl.trans(k), delta, state * tl.exp(at_end), input_precision="tf32x3")
            new = out_at + chunk * (HV * V) + (row * (HV * V) + v_range[None, :])
            tl.store(new, out.to(out_ptr.dtype.element_ty), mask=live[:, None])
        tl.store(state_at, tl.trans(state).to(state_ptr.dtype.element_ty))


def prefill(
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
    q_starts: torch.Tensor,
    counts: torch.Tensor,
    chunks: torch.Tensor,
    solve: Mapping[str, int] | None = None,
    run_chunks: Mapping[str, int] | None = None,
) -> None:
    """Like `decode`, for sequences with more than one new token, in `chunks` (see plan_chunks); others are left to
    `decode`.

    `solve` and `run_chunks` override what solve_options and run_options choose.
    """
    check_contiguous(conv_weight, state, conv_state, out)
    key_dim, value_dim, heads = shape.key_dim, shape.value_dim, shape.value_heads
    tokens, channels = qkv.shape
    assert heads * value_dim % key_dim == 0, "the convolution's programs take K channels each"
    options, width = {**shape.constants, "SIZE": CHUNK}, conv_weight.shape[1]
    batch, num = slots.shape[0], chunks.shape[0]
    of_sequence = q_starts, counts
    mixed = torch.empty(tokens, channels, dtype=qkv.dtype, device=qkv.device)
    _conv_kernel(
        (channels // key_dim, num), qkv, conv_weight, conv_state, positions, slots, *of_sequence, chunks, mixed,
        qkv.stride(0), conv_state.stride(0), **options, W=width, num_warps=8,
    )  # fmt: skip
    _keep_inputs_kernel(
        (triton.cdiv(channels, 1024), batch), qkv, conv_state, positions, slots, *of_sequence, channels,
        qkv.stride(0), conv_state.stride(0), W=width, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    u = torch.empty(tokens, heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    w = torch.empty(tokens, heads, key_dim, dtype=qkv.dtype, device=qkv.device)
    total = torch.empty(tokens, heads, dtype=torch.float32, device=qkv.device)
    solve_kernel(
        (heads, num), mixed, ba, a_log, dt_bias, *of_sequence, chunks, u, w, total, ba.stride(0),
        **options, **(solve or solve_options(shape)),
    )  # fmt: skip
    chosen = run_chunks or run_options(shape, qkv.dtype, target_of(qkv.device).multiprocessors)
    _run_chunks_kernel(
        (heads * (value_dim // chosen["BLOCK_V"]), batch), mixed, positions, slots, *of_sequence, u, w, total, state,
        out, state.stride(0), **options, **chosen,
    )  # fmt: skip


def solve_options(shape: DeltaShape) -> dict[str, int]:
    return {"BLOCK_K": min(32, shape.key_dim), "BLOCK_V": min(32, shape.value_dim), "num_warps": 1, "num_stages": 1}


def run_options(shape: DeltaShape, dtype: torch.dtype, multiprocessors: int) -> dict[str, int]:
    """For a long prompt each program owns one part of a state and walks through the chunks in order. Halving the parts
    cuts the time to two thirds as long as each part has a multiprocessor to itself; two on one multiprocessor compete
    for the inputs that all parts of a head read.

    The choice does not depend on the step, because each further variant would have to be compiled before the first
    request.
    """
    if dtype.itemsize == 4:  # shared memory has no room to load the next chunk ahead
        return {"BLOCK_V": min(32, shape.value_dim), "num_warps": 4, "num_stages": 1}
    fine = shape.value_heads * (shape.value_dim // 32) <= multiprocessors
    return {"BLOCK_V": min(32 if fine else 64, shape.value_dim), "num_warps": 4, "num_stages": 2}
