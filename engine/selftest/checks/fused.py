"""Fused kernels for few tokens, compared with their parts run one by one.

    sparse block    norm, router, experts and the dense branch, which has a factor or is a separate result: one to four
                    tokens
    sparse block of few tokens    the same without the norm: 5 to 64

Every token goes to every expert, because with a top-k choice rounding could select different experts on the two sides.
Another check tests the choice.
"""

from functools import partial

import torch

from engine.kernels.gemm import reference as gemm_reference
from engine.kernels.moe import reference as moe_reference
from engine.kernels.pointwise import reference as pointwise_reference
from engine.selftest.checks.check import Check, Side
from engine.selftest.compare import Result, numbers


def sparse_block(side: Side, *, tokens: int, is_fp8: bool, with_factor: bool) -> list[Result]:
    num_experts, hidden, inner, width = 4, 512, 256, 256
    x, residual = side.strided(tokens, hidden), side.randn(tokens, hidden)
    router = side.randn(num_experts, hidden) * 0.05
    w13, scale13 = _weight(side, (num_experts, 2 * inner, hidden), is_fp8)
    w2, scale2 = _weight(side, (num_experts, hidden, inner), is_fp8)
    gate_up, gate_up_scale = _weight(side, (2 * width, hidden), is_fp8)
    down, down_scale = _weight(side, (hidden, width), is_fp8)
    factor = side.randn(1, hidden) * 0.05 if with_factor else None
    norm = 1 + side.randn(hidden) * 0.1, 1e-6
    with side.clock():
        if side.is_reference:
            normed = pointwise_reference.rms_norm(x, *norm)
            assert isinstance(normed, torch.Tensor)
            routing = moe_reference.choose_experts(gemm_reference.gemv(normed, router), num_experts)
            y = moe_reference.routed_experts(normed, *routing, w13, w2, scale13, scale2)
            inner_rows = gemm_reference.gemv(normed, gate_up, gate_up_scale, gate="silu")
            apart = gemm_reference.gemv(inner_rows, down, down_scale)
            if factor is not None:
                y, apart = y + gemm_reference.gemv(normed, factor).sigmoid() * apart, None
            residual.add_(y)
        else:
            from engine.kernels.moe.decode import DenseBranch, Norm, sparse_block

            dense = DenseBranch(gate_up, gate_up_scale, down, down_scale, factor)
            _, apart = sparse_block(
                x, router, w13, w2, scale13, scale2, top_k=num_experts, norm=Norm(*norm, None), dense=dense,
                residual=residual,
            )  # fmt: skip
    return [numbers(residual, 6), *([] if apart is None else [numbers(apart, 6)])]


def block_of_few_tokens(side: Side, *, is_fp8: bool, with_factor: bool) -> list[Result]:
    tokens, num_experts, hidden, inner, parts = 19, 4, 512, 256, 1 if with_factor else 3
    dtype = side.dtype if side.dtype.itemsize == 2 else torch.float16  # the router is read in 16 bits only
    x, residual = side.strided(tokens, hidden).to(dtype), side.randn(tokens, hidden).to(dtype)
    router = (side.randn(num_experts, hidden) * 0.05).to(dtype)
    w13, scale13 = _weight(side, (num_experts, 2 * inner, hidden), is_fp8)
    w2, scale2 = _weight(side, (num_experts, hidden, inner), is_fp8)
    gate_up, gate_up_scale = _weight(side, (2 * parts * inner, hidden), is_fp8)
    down, down_scale = _weight(side, (hidden, parts * inner), is_fp8)
    if not is_fp8:
        w13, w2, gate_up, down = (weight.to(dtype) for weight in (w13, w2, gate_up, down))
    factor = (side.randn(1, hidden) * 0.05).to(dtype) if with_factor else None
    with side.clock():
        if side.is_reference:
            routing = moe_reference.choose_experts(gemm_reference.gemv(x, router), num_experts)
            y = moe_reference.routed_experts(x, *routing, w13, w2, scale13, scale2)
            apart = _dense(x, parts, gate_up, gate_up_scale, down, down_scale)
            if factor is not None:
                y, apart = y + gemm_reference.gemv(x, factor).sigmoid() * apart, None
            residual.add_(y)
        else:
            from engine.kernels.moe.decode import DenseBranch
            from engine.kernels.moe.few_tokens import sparse_block

            _, apart = sparse_block(
                x, router, w13, w2, scale13, scale2, for_router=x, top_k=num_experts, residual=residual,
                dense=DenseBranch(gate_up, gate_up_scale, down, down_scale, factor),
            )  # fmt: skip
    return [numbers(residual, 6), *([] if apart is None else [numbers(apart, 6)])]


def _dense(
    x: torch.Tensor,
    parts: int,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    down: torch.Tensor,
    down_scale: torch.Tensor | None,
) -> torch.Tensor:
    """A dense branch, as so many experts that all tokens go to with a weight of one."""
    hidden, width = down.shape
    inner = width // parts
    w13 = gate_up.view(2, parts, inner, hidden).transpose(0, 1).reshape(parts, 2 * inner, hidden)
    w2 = down.view(hidden, parts, inner).permute(1, 0, 2).contiguous()
    scale13 = scale2 = None
    if gate_up_scale is not None and down_scale is not None:
        scale13 = gate_up_scale.view(2, parts, inner).transpose(0, 1).reshape(parts, 2 * inner)
        scale2 = down_scale.expand(parts, hidden)
    experts = torch.arange(parts, dtype=torch.int32, device=x.device).expand(x.shape[0], parts).contiguous()
    weights = torch.ones_like(experts, dtype=torch.float32)
    return moe_reference.routed_experts(x, weights, experts, w13, w2, scale13, scale2)


def _weight(side: Side, shape: tuple[int, ...], is_fp8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    values = side.randn(*shape) * 0.05
    if not is_fp8:
        return values, None
    quantized, scale = pointwise_reference.quantize_rows(values.flatten(0, -2))
    return quantized.view(shape), scale.view(shape[:-1])


CHECKS = [
    Check("sparse block", partial(sparse_block, tokens=2, is_fp8=False, with_factor=True)),
    Check("sparse block fp8", partial(sparse_block, tokens=1, is_fp8=True, with_factor=False), True),
    Check("sparse block of few tokens", partial(block_of_few_tokens, is_fp8=False, with_factor=True)),
    Check("sparse block of few tokens fp8", partial(block_of_few_tokens, is_fp8=True, with_factor=False), True),
]
