"""Router, choice of experts and grouping for 5 to 64 tokens, in one kernel.

Each program multiplies BLOCK_E rows of the router by PART columns of all tokens, and leaves partial sums. The last one
to arrive adds them, always in the same order, chooses the experts of all tokens (moe.top_k), and groups the pairs as
moe.experts.group does. Four or five separate kernels would each take longer to start than to compute.

A dense branch's factor (moe.decode.DenseBranch) is one more row of the router, whose logit gives a last weight.

The pairs are sorted by keys (expert, pair). A pair begins a block if ROWS divides its rank among its expert's pairs.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.moe.decode import arrivals
from engine.kernels.moe.grouped_gemm import Groups
from engine.kernels.moe.tiles import ROUTED_TOKENS, VECTOR_TOKENS, max_blocks, routing_tokens
from engine.kernels.moe.top_k import experts_of_rows
from engine.kernels.pointwise.gate import sigmoid
from engine.kernels.runtime.launcher import kernel, wait_for_previous

_MOST_PAIRS = 512
_MOST_LOGITS = 64 * 256  # that the last program may hold: more would leave it few registers
_BITS, _PAIR = tl.constexpr(10), tl.constexpr(1023)  # of a key: a pair's number


@triton.jit
def _lower(a, b):
    return tl.minimum(a, b)


@triton.jit
def _higher(a, b):
    return tl.maximum(a, b)


@triton.jit
def _group(
    experts_ptr, order_ptr, blocks_ptr, P, num_blocks, E: tl.constexpr, ROWS: tl.constexpr, PP: tl.constexpr
):
    """moe.experts.group. The load bypasses the L1 cache: this program has just written the experts."""
    p = tl.arange(0, PP)
    live = p < P
    chosen = tl.load(experts_ptr + p, mask=live, other=E, cache_modifier=".cg")
    keys = tl.sort((chosen << _BITS) | p)
    expert = keys >> _BITS
    tl.store(order_ptr + p, keys & _PAIR, mask=live)
    starts = (p == 0) | (expert != tl.gather(expert, tl.maximum(p - 1, 0), 0))
    ends = (p == PP - 1) | (expert != tl.gather(expert, tl.minimum(p + 1, PP - 1), 0))
    rank = p - tl.associative_scan(tl.where(starts, p, 0), 0, _higher)
    end = tl.associative_scan(tl.where(ends, p + 1, PP), 0, _lower, reverse=True)
    first = live & (rank % ROWS == 0)
    block = tl.cumsum(first.to(tl.int32), 0) - 1
    tl.store(blocks_ptr + 3 * block, expert, mask=first)
    tl.store(blocks_ptr + 3 * block + 1, p, mask=first)
    tl.store(blocks_ptr + 3 * block + 2, tl.minimum(end - p, ROWS), mask=first)
    unused = (p >= tl.sum(first.to(tl.int32), 0)) & (p < num_blocks)
    tl.store(blocks_ptr + 3 * p, E, mask=unused)
    tl.store(blocks_ptr + 3 * p + 1, 0, mask=unused)
    tl.store(blocks_ptr + 3 * p + 2, 0, mask=unused)


@triton.jit
def _choose_and_group(
    x_ptr, expert_scale_ptr, partial_ptr, weights_ptr, experts_ptr, order_ptr, blocks_ptr, T, num_blocks,
    PARTS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, WIDTH: tl.constexpr, FACTOR: tl.constexpr,
    TOP_K: tl.constexpr, KP: tl.constexpr, TP: tl.constexpr, MOST: tl.constexpr, PP: tl.constexpr, ROWS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    STRIDE: tl.constexpr = TOP_K + 1 if FACTOR else TOP_K
    dtype = x_ptr.dtype.element_ty
    t = tl.arange(0, MOST)
    e = tl.arange(0, EP)
    live = (t < T)[:, None] & (e < E)[None, :]
    logits = tl.zeros([MOST, EP], tl.float32)
    for i in tl.static_range(PARTS):
        at = partial_ptr + i * (TP * WIDTH) + t[:, None] * WIDTH + e[None, :]
        logits += tl.load(at, mask=live, other=0.0, cache_modifier=".cg")
    logits = logits.to(dtype)  # as the router's GEMM rounds them
    if FACTOR:
        factor = tl.zeros([MOST], tl.float32)
        for i in tl.static_range(PARTS):
            at = partial_ptr + i * (TP * WIDTH) + t * WIDTH + E
            factor += tl.load(at, mask=t < T, other=0.0, cache_modifier=".cg")
        factor = sigmoid(factor.to(dtype).to(tl.float32)).to(dtype)
        tl.store(weights_ptr + t * STRIDE + TOP_K, factor.to(tl.float32), mask=t < T)
    experts, weights = experts_of_rows(logits, E, EP, TOP_K, KP, RENORMALIZE)
    j = tl.arange(0, KP)
    chosen = (t < T)[:, None] & (j < TOP_K)[None, :]
    if expert_scale_ptr is not None:  # used last, so that nothing else waits for it
        scale = tl.load(expert_scale_ptr + experts)
    tl.store(experts_ptr + t[:, None] * TOP_K + j[None, :], experts, mask=chosen)
    tl.debug_barrier()  # other threads read the experts
    _group(experts_ptr, order_ptr, blocks_ptr, T * TOP_K, num_blocks, E, ROWS, PP)
    if expert_scale_ptr is not None:
        weights = weights * scale.to(tl.float32)
    tl.store(weights_ptr + t[:, None] * STRIDE + j[None, :], weights, mask=chosen)


@kernel
def _route_and_group_kernel(
    x_ptr, router_ptr, factor_ptr, expert_scale_ptr, partial_ptr, arrived_ptr, weights_ptr, experts_ptr, order_ptr,
    blocks_ptr, T, num_blocks, x_stride,
    E: tl.constexpr, EP: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr,
    TP: tl.constexpr, MOST: tl.constexpr, PP: tl.constexpr, BLOCK_E: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """MOST: the most tokens of this variant; TP: that many, padded for the tensor cores. WIDTH: columns of the partial
    sums, at least the router's rows."""
    PARTS: tl.constexpr = (H + PART - 1) // PART
    FACTOR: tl.constexpr = factor_ptr is not None
    COLUMNS: tl.constexpr = E + 1 if FACTOR else E
    part = tl.program_id(0) % PARTS
    e = tl.program_id(0) // PARTS * BLOCK_E + tl.arange(0, BLOCK_E)
    k = part * PART + tl.arange(0, PART)
    t = tl.arange(0, TP)
    row = router_ptr + e * H
    if FACTOR:
        row = tl.where(e < E, row, factor_ptr + (e - e))
    w = tl.load(row[:, None] + k[None, :], mask=(e < COLUMNS)[:, None] & (k < H)[None, :], other=0.0)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + t[None, :] * x_stride + k[:, None], mask=(t < T)[None, :] & (k < H)[:, None], other=0.0)
    at = partial_ptr + part * (TP * WIDTH) + t[None, :] * WIDTH + e[:, None]
    tl.store(at, tl.dot(w, x), mask=(t < T)[None, :] & (e < WIDTH)[:, None])
    tl.debug_barrier()  # every thread has written its sums before the program announces that it is done
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrived_ptr, 0)
        _choose_and_group(
            x_ptr, expert_scale_ptr, partial_ptr, weights_ptr, experts_ptr, order_ptr, blocks_ptr, T, num_blocks,
            PARTS, E, EP, WIDTH, FACTOR, TOP_K, KP, TP, MOST, PP, ROWS, RENORMALIZE,
        )


def supports(tokens: int, top_k: int, router: torch.Tensor) -> bool:
    """Whether `route_and_group` can be used for so many tokens."""
    if not VECTOR_TOKENS < tokens <= ROUTED_TOKENS or routing_tokens(tokens) * top_k > _MOST_PAIRS:
        return False
    logits = routing_tokens(tokens) * triton.next_power_of_2(router.shape[0])
    return logits <= _MOST_LOGITS and router.dtype in (torch.bfloat16, torch.float16)


def route_and_group(
    x: torch.Tensor,
    router: torch.Tensor,
    top_k: int,
    rows: int,
    *,
    renormalize: bool = True,
    expert_scale: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Groups]:
    """x [T, H] (rows may be strided), router [E, H] -> weights [T, k] float32 and experts [T, k] int32, as
    moe.experts.choose_experts chooses them by the logits x routerᵀ, and their pairs in blocks of up to `rows` rows.

    With `factor` [1, H] the weights are [T, k + 1], and the last is sigmoid(x factorᵀ)."""
    (tokens, hidden), num_experts = x.shape, router.shape[0]
    assert supports(tokens, top_k, router)
    device, padded = x.device, triton.next_power_of_2(num_experts)
    most = routing_tokens(tokens)
    # The last program reads parts x tokens x experts sums: with many tokens, fewer parts.
    part, block_e = (256, 32) if most <= 32 else (512, 16)
    across, parts = triton.cdiv(num_experts + (factor is not None), block_e), triton.cdiv(hidden, part)
    all_tokens, width, pairs = max(16, most), across * block_e, tokens * top_k
    num_blocks = max_blocks(pairs, num_experts, rows)
    partial = torch.empty(parts, all_tokens, width, dtype=torch.float32, device=device)
    weights = torch.empty(tokens, top_k + (factor is not None), dtype=torch.float32, device=device)
    experts = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    blocks = torch.empty(num_blocks, 3, dtype=torch.int32, device=device)
    _route_and_group_kernel(
        (across * parts,), x, router, factor, expert_scale, partial, arrivals(device), weights, experts, order, blocks,
        tokens, num_blocks, x.stride(0), E=num_experts, EP=padded, WIDTH=width, H=hidden, TOP_K=top_k,
        KP=triton.next_power_of_2(top_k), TP=all_tokens, MOST=most, PP=triton.next_power_of_2(most * top_k),
        BLOCK_E=block_e, PART=part, ROWS=rows, RENORMALIZE=renormalize,
        num_warps=8 if most * padded <= 32 * 256 else 16,
    )  # fmt: skip
    return weights, experts, Groups(order, blocks, rows)
