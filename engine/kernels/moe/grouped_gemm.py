"""The GEMMs of grouped pairs: each block of rows times its expert's weight, on tensor cores.

The weight's rows are on the tile's wide side, so a block is padded to 16 rows at most. Each pair has its own row of
results. `add_up` weights and sums the k rows of a token, in the order in which its experts were chosen.

fp8 weights have a scale for each output of an expert, or for each block of 128 x 128 numbers (moe.group_scaled);
activations are quantised to fp8, with a scale per row. On GPUs without fp8 units, and where the caller wants it,
activations stay as they are, and weights are widened on the fly. int8 weights have a scale for each output; they are
widened, too, or meet activations in int8, if the checkpoint wants these. int4: moe.int4; fp4, and int8 in groups:
moe.packed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.moe import group_scaled, int4, packed
from engine.kernels.moe.tiles import Form, MatrixTiles, form_of, is_int8, reads_fp8
from engine.kernels.pointwise.e4m3 import widened
from engine.kernels.pointwise.gate import activated
from engine.kernels.pointwise.quantize import quantize_rows, quantize_rows_to_int8
from engine.kernels.runtime.launcher import kernel, target_of, wait_for_previous, wait_in_order

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # activations [T, K], or in fp8 (values [T, K], scale [T])


class Groups(NamedTuple):
    """The (token, expert) pairs of a step in blocks of one expert each, see `group`."""

    order: torch.Tensor   # [T k] int32
    blocks: torch.Tensor  # [n, 3] int32
    rows: int             # the most pairs in a block


class DenseParts(NamedTuple):
    """A weight of an MLP that every token goes through, cut into `parts` that have the shape of an expert's.

    Part p of token t is pair (number of routed pairs) + t parts + p. Gate and up [2 J, K]: rows p I to (p + 1) I of
    both halves, with J = parts I. Down [N, J]: columns p I to (p + 1) I.
    """

    x: Rows | None  # of gate and up; the down product reads the pairs' rows
    weight: torch.Tensor
    scale: torch.Tensor | None
    parts: int
    tokens: int


@triton.jit
def _store(at, y, mask, ADD: tl.constexpr):
    """Store y, or with ADD add y to what is there: rounded where a separate addition would round."""
    y = y.to(at.dtype.element_ty)
    if ADD:
        y = (tl.load(at, mask=mask, other=0.0).to(tl.float32) + y.to(tl.float32)).to(y.dtype)
    tl.store(at, y, mask=mask)


@kernel
def _grouped_kernel(
    x_ptr, w_ptr, x_scale_ptr, scale_ptr, order_ptr, blocks_ptr, y_ptr, dense_x_ptr, dense_ptr, dense_x_scale_ptr,
    dense_scale_ptr, x_stride, dense_x_stride, T, P,
    N: tl.constexpr, K: tl.constexpr, SHARE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr, GATE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    if GATE is not None:  # in order, so that the down GEMM, which comes next, may read the blocks before it waits
        wait_in_order(PDL)
    m = tl.arange(0, ROWS)
    block = tl.program_id(1)
    if PARTS > 0:  # the first blocks are the dense branch's: PARTS for each ROWS tokens
        first = block // PARTS * ROWS
        part = block % PARTS
        is_dense = first < T
        block = tl.maximum(block - PARTS * tl.cdiv(T, ROWS), 0)
    # Requested together, before the branch: otherwise each would wait for the one before it.
    expert = tl.load(blocks_ptr + 3 * block).to(tl.int64)
    start = tl.load(blocks_ptr + 3 * block + 1)
    rows = tl.load(blocks_ptr + 3 * block + 2)
    if PARTS > 0:
        rows = tl.where(is_dense, tl.minimum(T - first, ROWS), rows)
    if rows == 0:
        if GATE is None:
            wait_for_previous(PDL)
        return
    pair = tl.load(order_ptr + start + m, mask=m < rows, other=0).to(tl.int64)
    weight = w_ptr + expert * ((1 if GATE is None else 2) * N * K)
    if SCALED:
        scale_at = scale_ptr + expert * ((1 if GATE is None else 2) * N)
    to_next = K  # from a row of the weight to the next one
    to_up = N    # rows from a row of the gate to that of the up projection
    if PARTS > 0:
        token = tl.minimum(first + m, T - 1).to(tl.int64)
        pair = tl.where(is_dense, P + token * PARTS + part, pair)
        if GATE is None:
            weight = tl.where(is_dense, dense_ptr + part * K, weight)
            to_next = tl.where(is_dense, PARTS * K, K)
            if SCALED:
                scale_at = tl.where(is_dense, dense_scale_ptr, scale_at)
        else:
            weight = tl.where(is_dense, dense_ptr + part * (N * K), weight)
            to_up = tl.where(is_dense, PARTS * N, N)
            if SCALED:
                scale_at = tl.where(is_dense, dense_scale_ptr + part * N, scale_at)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    n_mask = (n < N)[:, None]
    w_at = weight + n[:, None] * to_next + k[None, :]
    # Scales are requested before the loop: after it, the program would wait for the memory once more.
    if SCALED:
        scale = tl.load(scale_at + n, mask=n < N, other=0.0)
        if GATE is not None:
            up_scale = tl.load(scale_at + to_up + n, mask=n < N, other=0.0)
    if GATE is None:
        wait_for_previous(PDL)
    if SCALED:
        x_scale = 1.0
        if x_scale_ptr is not None:
            x_scale_at = x_scale_ptr + pair // SHARE
            if PARTS > 0 and GATE is not None:
                x_scale_at = tl.where(is_dense, dense_x_scale_ptr + token, x_scale_at)
            x_scale = tl.load(x_scale_at)[None, :]
    # SHARE pairs share a row of x. Rows beyond the end of the block read pair 0's row, and are not stored.
    x_row = x_ptr + pair // SHARE * x_stride
    if PARTS > 0 and GATE is not None:
        x_row = tl.where(is_dense, dense_x_ptr + token * dense_x_stride, x_ptr + pair // SHARE * x_stride)
    x_at = x_row[None, :] + k[:, None]
    acc = tl.zeros([BLOCK_N, ROWS], SUM)
    up = acc
    for at_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):  # x last: its rows are known later than the weight's
        if K % BLOCK_K != 0:
            k_live = k < K - at_k
            w = tl.load(w_at + at_k, mask=n_mask & k_live[None, :], other=0.0)
            if GATE is not None:
                u = tl.load(w_at + to_up * K + at_k, mask=n_mask & k_live[None, :], other=0.0)
            x = tl.load(x_at + at_k, mask=k_live[:, None], other=0.0)
        else:
            if N % BLOCK_N == 0:
                w = tl.load(w_at + at_k)
                if GATE is not None:
                    u = tl.load(w_at + to_up * K + at_k)
            else:
                w = tl.load(w_at + at_k, mask=n_mask, other=0.0)
                if GATE is not None:
                    u = tl.load(w_at + to_up * K + at_k, mask=n_mask, other=0.0)
            x = tl.load(x_at + at_k)
        if SCALED and x_scale_ptr is None:
            w = widened(w, x.dtype)
            if GATE is not None:
                u = widened(u, x.dtype)
        acc = tl.dot(w, x, acc, out_dtype=SUM)
        if GATE is not None:
            up = tl.dot(u, x, up, out_dtype=SUM)
    if SCALED:
        acc = acc.to(tl.float32) * scale[:, None] * x_scale
        if GATE is not None:
            up = up.to(tl.float32) * up_scale[:, None] * x_scale
    if GATE is not None:
        acc = activated(acc, GATE) * up
    tl.store(
        y_ptr + pair[None, :] * N + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=n_mask & (m < rows)[None, :]
    )


@kernel
def _sum_kernel(
    y_ptr, weights_ptr, out_ptr, dense_out_ptr, H, TOP_K: tl.constexpr, PARTS: tl.constexpr, FACTOR: tl.constexpr,
    BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token's rows of y, weighted and summed. Its dense branch's rows: with FACTOR multiplied by the weight that
    follows the experts', and part of the result; else a result of their own."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype = y_ptr.dtype.element_ty
    weights_at = weights_ptr + token * (TOP_K + 1 if FACTOR else TOP_K)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        y = tl.load(y_ptr + (token * TOP_K + j) * H + h, mask=h < H, other=0.0)
        total += tl.load(weights_at + j) * y.to(tl.float32)
    if PARTS > 0:
        dense_at = y_ptr + (tl.num_programs(0) * TOP_K + token * PARTS) * H + h
        dense = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            dense += tl.load(dense_at + part * H, mask=h < H, other=0.0).to(tl.float32)
        dense = dense.to(dtype)
        if FACTOR:  # rounded where separate kernels would round
            total = total.to(dtype).to(tl.float32) + tl.load(weights_at + TOP_K) * dense.to(tl.float32)
        else:
            tl.store(dense_out_ptr + token * H + h, dense, mask=h < H)
    _store(out_ptr + token * H + h, total, h < H, ADD)


def expert_product(
    x: Rows,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    groups: Groups,
    share: int,
    tiles: MatrixTiles,
    *,
    gate: str | None,
    dtype: torch.dtype,
    fp8_activations: bool = True,
    int8_activations: bool = False,
    dense: DenseParts | None = None,
    zero: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """[pairs, N]: each pair's row of x (number pair // share) times its expert's weight, with the gate applied. Pairs
    of the dense branch follow those of the experts. `fp8_activations` and `int8_activations` as in
    moe.experts.routed_experts. `zero`, `factor`: zero points, and factors of fp4's outputs."""
    form = form_of(weight, scale)
    fp8 = fp8_activations and _meets_fp8(weight, scale, zero, form)
    values, x_scale = _in_int8(x, weight, form) if int8_activations else _in_form(x, fp8)
    parts, tokens, more, more_scale = 0, 0, None, None
    if dense is not None:
        parts, tokens = dense.parts, dense.tokens
        if dense.x is not None:
            more, more_scale = (values, x_scale) if dense.x is x else _in_form(dense.x, fp8)
    order, blocks, rows = groups
    pairs, inner = order.shape[0], weight.shape[2]
    outputs = weight.shape[1] if gate is None else weight.shape[1] // 2
    out = torch.empty(pairs + tokens * parts, outputs, dtype=dtype, device=weight.device)
    if scale is not None and form != "rows":
        assert dense is None
        places = order, blocks, out, share, rows, tiles
        if form == "int4":
            int4.grouped_product(values, x_scale, weight, scale, zero, *places, gate=gate)
        elif form in ("int8", "fp4"):
            packed.grouped_product(values, weight, scale, zero, factor, *places, gate=gate)
        else:
            group_scaled.grouped_product(values, x_scale, weight, scale, *places, gate=gate)
        return out
    num_blocks = blocks.shape[0] + parts * triton.cdiv(tokens, rows)
    _grouped_kernel(
        (triton.cdiv(outputs, tiles.block_n), num_blocks), values, weight, x_scale, scale, order, blocks, out,
        more, None if dense is None else dense.weight, more_scale, None if dense is None else dense.scale,
        values.stride(0), 0 if more is None else more.stride(0), tokens, pairs, N=outputs, K=inner, SHARE=share,
        PARTS=parts, ROWS=rows, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, SCALED=scale is not None, GATE=gate,
        STAGES=tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def _meets_fp8(weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None, form: Form) -> bool:
    """Whether activations in fp8 may meet this weight."""
    if scale is None or zero is not None or is_int8(weight) or not target_of(weight.device).fp8_units:
        return False
    if form == "fp4":
        return False
    return form != "int4" or reads_fp8(2 * weight.shape[2] // scale.shape[2])


def _in_int8(x: Rows, weight: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x rounded to int8: as codes and scales for a weight in int8; for any other weight as the numbers they stand
    for."""
    assert isinstance(x, torch.Tensor)
    values, scale = quantize_rows_to_int8(x)
    if is_int8(weight) and form == "rows":
        return values, scale
    return (values.float() * scale[:, None]).to(x.dtype), None


def _in_form(x: Rows, fp8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(x, torch.Tensor):
        return quantize_rows(x) if fp8 else (x, None)
    assert fp8
    return x


def add_up(
    y: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    top_k: int,
    *,
    add: bool,
    parts: int = 0,
    dense_out: torch.Tensor | None = None,
) -> None:
    """out [T, H] = Σ_j weights[t, j] y[t k + j], or with `add` out += that.

    With `parts` the dense branch's rows follow: their sum goes to `dense_out`, or without one into out, multiplied by
    weights[t, k].
    """
    tokens, hidden = out.shape
    block = min(1024, triton.next_power_of_2(hidden))
    _sum_kernel(
        (tokens, triton.cdiv(hidden, block)), y, weights, out, dense_out, hidden, TOP_K=top_k, PARTS=parts,
        FACTOR=parts > 0 and dense_out is None, BLOCK=block, ADD=add, num_warps=4,
    )  # fmt: skip
