"""Mixture of experts: the choice, and the products of few and of many tokens."""

from functools import partial

import torch

from engine.kernels.moe import reference as moe_reference
from engine.kernels.moe.tiles import VECTOR_TOKENS
from engine.kernels.pointwise import reference as pointwise_reference
from engine.selftest.checks.check import Check, Side
from engine.selftest.compare import Result, exact, fp8_products, numbers


def choose_experts(side: Side) -> list[Result]:
    logits, factor = side.strided(9, 100), 1 + side.randn(100) * 0.1
    with side.clock():
        weights, experts = side.moe.choose_experts(logits, 6, expert_scale=factor)
    return [numbers(weights), exact(experts)]


def experts(side: Side, *, tokens: int, num_experts: int, is_fp8: bool = False, gate: str = "silu") -> list[Result]:
    """Experts, added to the residual stream. Both sides use the reference's routing."""
    hidden, inner = 512, 256
    x, residual = side.strided(tokens, hidden), side.randn(tokens, hidden)
    weights, chosen = moe_reference.choose_experts(side.randn(tokens, num_experts), 2)
    stacks, scales = [side.randn(num_experts, *size) * 0.05 for size in ((2 * inner, hidden), (hidden, inner))], []
    if is_fp8:
        pairs = [pointwise_reference.quantize_rows(stack.flatten(0, 1)) for stack in stacks]
        stacks = [values.view(stack.shape) for (values, _), stack in zip(pairs, stacks, strict=True)]
        scales = [scale.view(stack.shape[:2]) for (_, scale), stack in zip(pairs, stacks, strict=True)]
    with side.clock():
        side.moe.routed_experts(x, weights, chosen, *stacks, *scales, gate=gate, residual=residual)
    units = is_fp8 and tokens > VECTOR_TOKENS
    return [fp8_products(residual) if units else numbers(residual, 4)]


def experts_in_blocks(side: Side, *, tokens: int) -> list[Result]:
    """The same of weights with a scale for each 128 x 128 numbers, on sides that do not fill their blocks."""
    num_experts, hidden, inner = 4, 576, 192
    x, residual = side.strided(tokens, hidden), side.randn(tokens, hidden)
    weights, chosen = moe_reference.choose_experts(side.randn(tokens, num_experts), 2)
    stacks = [pointwise_reference.quantize_rows(side.randn(num_experts * rows, columns))[0].view(num_experts, rows, -1)
              for rows, columns in ((2 * inner, hidden), (hidden, inner))]  # fmt: skip
    scales = [0.0006 + side.randn(num_experts, *blocks).float().abs() * 0.0001 for blocks in ((4, 5), (5, 2))]
    with side.clock():
        side.moe.routed_experts(x, weights, chosen, *stacks, *scales, residual=residual)
    return [fp8_products(residual) if tokens > VECTOR_TOKENS else numbers(residual, 4)]


def experts_in_int4(side: Side, *, tokens: int, group: int) -> list[Result]:
    """The same of packed weights: integers for few tokens, 16-bit or fp8 activations for more."""
    num_experts, hidden, inner = 4, 512, 256
    dtype = side.dtype if side.dtype.itemsize == 2 else torch.float16  # few tokens are read in 16 bits only
    x, residual = side.strided(tokens, hidden).to(dtype), side.randn(tokens, hidden).to(dtype)
    weights, chosen = moe_reference.choose_experts(side.randn(tokens, num_experts), 2)
    stacks, scales = [], []
    for rows, columns in ((2 * inner, hidden), (hidden, inner)):
        stacks.append(side.randint(256, num_experts, rows, columns // 2).to(torch.uint8))
        scales.append((0.01 + side.randn(num_experts, rows, columns // group).abs() * 0.001).to(dtype))
    with side.clock():
        side.moe.routed_experts(x, weights, chosen, *stacks, *scales, residual=residual)
    return [fp8_products(residual) if tokens > VECTOR_TOKENS and group >= 128 else numbers(residual, 6)]


CHECKS = [
    Check("choice of experts", choose_experts),
    Check("experts, 3 tokens", partial(experts, tokens=3, num_experts=8)),
    Check("experts, 20 tokens", partial(experts, tokens=20, num_experts=8, gate="gelu_tanh")),
    Check("experts, 150 tokens", partial(experts, tokens=150, num_experts=3)),
    Check("experts, 3 tokens fp8", partial(experts, tokens=3, num_experts=8, is_fp8=True), True),
    Check("experts, 20 tokens fp8", partial(experts, tokens=20, num_experts=8, is_fp8=True), True),
    Check("experts, 150 tokens fp8", partial(experts, tokens=150, num_experts=3, is_fp8=True), True),
    Check("experts, 2 tokens fp8 blocks", partial(experts_in_blocks, tokens=2), True),
    Check("experts, 30 tokens fp8 blocks", partial(experts_in_blocks, tokens=30), True),
    Check("experts, 2 tokens int4", partial(experts_in_int4, tokens=2, group=32)),
    Check("experts, 20 tokens int4", partial(experts_in_int4, tokens=20, group=32)),
    Check("experts, 20 tokens int4, fp8 rows", partial(experts_in_int4, tokens=20, group=128), True),
]
