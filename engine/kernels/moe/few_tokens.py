"""A sparse block for 5 to 64 tokens, with a dense branch up to 256. Such steps are bound by reading weights, and every
additional kernel takes longer to start than its work takes.

    route     router, choice of experts, and their pairs by expert                       moe.routing; beyond 64 tokens
                                                                                         the caller has chosen
    gate_up   gate and up GEMMs of the chosen experts and of the dense branch            moe.grouped_gemm
    down      down GEMMs of both
    sum       weighted sums, added to the residual

In fp8 the inputs of both GEMMs are quantised in between, unless the norm before this block has done so.

The dense branch (moe.decode.DenseBranch) is as wide as one or a few experts: it runs as that many experts of every
token, so its weights are read at the same rate as theirs, by programs that would otherwise wait for the router.
"""

import torch

from engine.kernels.moe.decode import DenseBranch
from engine.kernels.moe.experts import group, tiles_of
from engine.kernels.moe.grouped_gemm import DenseParts, Rows, add_up, expert_product
from engine.kernels.moe.routing import route_and_group

_MOST_PARTS = 8


def joins(dense: DenseBranch, w2: torch.Tensor, scale2: torch.Tensor | None) -> bool:
    """Whether the dense branch can run as further experts: the same format, and their width or a multiple of it."""
    inner, width = w2.shape[2], dense.down.shape[1]
    same = dense.gate_up.dtype == dense.down.dtype == w2.dtype
    scaled = dense.gate_up_scale is not None, dense.down_scale is not None
    return same and scaled == (scale2 is not None,) * 2 and width % inner == 0 and width // inner <= _MOST_PARTS


def sparse_block(
    x: Rows,
    router: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    scale13: torch.Tensor | None = None,
    scale2: torch.Tensor | None = None,
    *,
    for_router: torch.Tensor,
    top_k: int,
    renormalize: bool = True,
    expert_scale: torch.Tensor | None = None,
    gate: str = "silu",
    dense: DenseBranch | None = None,
    for_dense: Rows | None = None,
    residual: torch.Tensor | None = None,
    chosen: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T, H] -> Σ_j weight_j · expert_j(x) [T, H], and the result of the branch `dense` if it has no factor.

    As moe.decode.sparse_block, except that x and `for_dense` (None: x) may be in fp8 already. `for_router` [T, H] has
    the dtype of the result. routing.supports and `joins` hold; or the caller gives the experts and their weights,
    `chosen` as moe.experts.choose_experts does, and the dense branch has no factor.
    """
    tokens, hidden, dtype = *for_router.shape, for_router.dtype
    tiles = tiles_of(w2, scale2, top_k, tokens)
    factor = None if dense is None else dense.factor
    if chosen is None:
        weights, _, groups = route_and_group(
            for_router, router, top_k, tiles.rows, renormalize=renormalize, expert_scale=expert_scale, factor=factor
        )
    else:
        assert factor is None
        weights, groups = chosen[0], group(chosen[1], w2.shape[0], tiles.rows)
    of_gate_up = of_down = apart = None
    parts = 0
    if dense is not None:
        assert joins(dense, w2, scale2)
        parts = dense.down.shape[1] // w2.shape[2]
        for_dense = x if for_dense is None else for_dense
        of_gate_up = DenseParts(for_dense, dense.gate_up, dense.gate_up_scale, parts, tokens)
        of_down = DenseParts(None, dense.down, dense.down_scale, parts, tokens)
        apart = torch.empty(tokens, hidden, dtype=dtype, device=w2.device) if factor is None else None
    out = torch.empty(tokens, hidden, dtype=dtype, device=w2.device) if residual is None else residual
    assert out.is_contiguous()
    h = expert_product(x, w13, scale13, groups, top_k, tiles.gate_up, gate=gate, dtype=dtype, dense=of_gate_up)
    y = expert_product(h, w2, scale2, groups, 1, tiles.down, gate=None, dtype=dtype, dense=of_down)
    add_up(y, weights, out, top_k, add=residual is not None, parts=parts, dense_out=apart)
    return out, apart
