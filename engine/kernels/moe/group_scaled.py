"""Grouped GEMMs of experts whose weights have scales along the inputs: the kernel of moe.experts for many tokens.

    weight   e4m3, a scale for each GROUP x GROUP numbers; gate and up each have blocks of their own
    x        e4m3 with a scale for each row; or 16 bits, for which the weight is widened

    acc += (x_g W_gᵀ) * scale[g]      for each step of BLOCK_K columns, which belong to one group; in float32

A program's outputs lie in one block, so a step has a single scale (two with a gate).
"""

import torch
import triton
import triton.language as tl

from engine.kernels.moe.tiles import SCALE_BLOCK, MatrixTiles
from engine.kernels.pointwise.e4m3 import widened
from engine.kernels.pointwise.gate import activated
from engine.kernels.runtime.launcher import kernel, wait_for_previous


@kernel
def _group_scaled_kernel(
    x_ptr, w_ptr, x_scale_ptr, scale_ptr, order_ptr, blocks_ptr, y_ptr, x_stride,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALVES: tl.constexpr = 1 if GATE is None else 2
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    OF_HALF: tl.constexpr = (N + GROUP - 1) // GROUP * GROUPS
    wait_for_previous(PDL)
    block = blocks_ptr + 3 * tl.program_id(1)
    rows = tl.load(block + 2)
    if rows == 0:
        return
    expert = tl.load(block).to(tl.int64)
    m = tl.arange(0, ROWS)
    pair = tl.load(order_ptr + tl.load(block + 1) + m, mask=m < rows, other=0).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    n_mask = (n < N)[:, None]
    w_at = w_ptr + expert * (HALVES * N * K) + n[:, None] * K + k[None, :]
    x_at = x_ptr + (pair // SHARE)[None, :] * x_stride + k[:, None]  # as in experts._grouped_kernel
    scale_at = scale_ptr + expert * (HALVES * OF_HALF) + tl.program_id(0) * BLOCK_N // GROUP * GROUPS
    scale = tl.load(scale_at)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    if GATE is not None:
        up_scale = tl.load(scale_at + OF_HALF)
        up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        following = tl.minimum((at + BLOCK_K) // GROUP, GROUPS - 1)  # loaded ahead
        next_scale = tl.load(scale_at + following)
        if GATE is not None:
            next_up_scale = tl.load(scale_at + OF_HALF + following)
        if K % BLOCK_K != 0:
            k_live = k < K - at
            x = tl.load(x_at + at, mask=k_live[:, None], other=0.0)
            w = tl.load(w_at + at, mask=n_mask & k_live[None, :], other=0.0)
            if GATE is not None:
                u = tl.load(w_at + N * K + at, mask=n_mask & k_live[None, :], other=0.0)
        else:
            x = tl.load(x_at + at)
            if N % BLOCK_N == 0:  # a mask would keep the loads narrow
                w = tl.load(w_at + at)
                if GATE is not None:
                    u = tl.load(w_at + N * K + at)
            else:
                w = tl.load(w_at + at, mask=n_mask, other=0.0)
                if GATE is not None:
                    u = tl.load(w_at + N * K + at, mask=n_mask, other=0.0)
        if x_scale_ptr is None:
            w = widened(w, x.dtype)
            if GATE is not None:
                u = widened(u, x.dtype)
        product = tl.dot(w, x)
        if GATE is not None:
            up_product = tl.dot(u, x)
        acc += product * scale
        scale = next_scale
        if GATE is not None:
            up += up_product * up_scale
            up_scale = next_up_scale
    if x_scale_ptr is not None:
        x_scale = tl.load(x_scale_ptr + pair // SHARE)[None, :]
        acc = acc * x_scale
        if GATE is not None:
            up = up * x_scale
    if GATE is not None:
        acc = activated(acc, GATE) * up
    tl.store(
        y_ptr + pair[None, :] * N + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=n_mask & (m < rows)[None, :]
    )


def grouped_product(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    order: torch.Tensor,
    blocks: torch.Tensor,
    out: torch.Tensor,
    share: int,
    rows: int,
    tiles: MatrixTiles,
    *,
    gate: str | None,
) -> None:
    """out [pairs, N] = each pair's row of x (number pair // share) times its expert's weight, with the gate applied.

    x is e4m3 if it has scales. `order` and `blocks` as in moe.experts.group.
    """
    outputs, inner = out.shape[1], weight.shape[2]
    assert SCALE_BLOCK % tiles.block_n == 0
    assert SCALE_BLOCK % tiles.block_k == 0
    _group_scaled_kernel(
        (triton.cdiv(outputs, tiles.block_n), blocks.shape[0]), x, weight, x_scale, scale, order, blocks, out,
        x.stride(0), N=outputs, K=inner, GROUP=SCALE_BLOCK, SHARE=share, ROWS=rows, BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k, GATE=gate, STAGES=tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
