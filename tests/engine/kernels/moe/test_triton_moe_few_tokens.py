"""A sparse block for 5 to 256 tokens, against its parts in plain torch: in the interpreter."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from engine.kernels.moe import reference as moe_reference
from engine.kernels.moe.decode import DenseBranch
from engine.kernels.moe.experts import choose_experts
from engine.kernels.moe.few_tokens import joins, sparse_block
from engine.kernels.pointwise.reference import quantize_rows

HIDDEN, INNER, EXPERTS, TOP_K = 96, 48, 6, 3
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def weight(*shape, fp8):
    """A weight and its scale."""
    w = torch.randn(*shape) / shape[-1] ** 0.5
    if not fp8:
        return w.half(), None
    scale = w.abs().amax(-1) / 448
    return (w / scale[..., None]).to(E4M3), scale


def close(ours, expected, tolerance):
    assert ((ours.float() - expected.float()).norm() / expected.float().norm()).item() < tolerance


def product(x, w, scale):
    if scale is None:
        return x.float() @ w.float().t()
    values, x_scale = quantize_rows(x)
    return (values.float() * x_scale[:, None]) @ (w.float() * scale[:, None]).t()


def dense_mlp(x, dense, gate):
    """The dense branch by itself: in fp8 its inner activations have a scale for each part as wide as an expert."""
    first, second = product(x, dense.gate_up, dense.gate_up_scale).chunk(2, -1)
    first = F.silu(first) if gate == "silu" else F.gelu(first, approximate="tanh")
    parts = zip((first * second).to(x.dtype).split(INNER, -1), dense.down.split(INNER, -1), strict=True)
    return sum(product(h, w.contiguous(), dense.down_scale) for h, w in parts)


@pytest.mark.parametrize("tokens", [5, 17, 64])
@pytest.mark.parametrize("parts, with_factor", [(0, False), (1, True), (3, False), (2, True)])
@pytest.mark.parametrize("fp8", [False, True])
def test_like_its_parts(tokens, parts, with_factor, fp8):
    gate = "silu" if with_factor else "gelu_tanh"
    x = torch.randn(tokens, HIDDEN).half()
    router = torch.randn(EXPERTS, HIDDEN).half()
    (w13, scale13), (w2, scale2) = weight(EXPERTS, 2 * INNER, HIDDEN, fp8=fp8), weight(EXPERTS, HIDDEN, INNER, fp8=fp8)
    dense = for_dense = None
    if parts:
        width = parts * INNER
        factor = torch.randn(1, HIDDEN).half() if with_factor else None
        dense = DenseBranch(*weight(2 * width, HIDDEN, fp8=fp8), *weight(HIDDEN, width, fp8=fp8), factor)
        assert joins(dense, w2, scale2)
        if not with_factor:
            for_dense = torch.randn(tokens, HIDDEN).half()
    residual = torch.randn(tokens, HIDDEN).half() if with_factor else None
    kept = None if residual is None else residual.clone()
    rows = quantize_rows(x) if fp8 else x  # as the norm before the block leaves them
    out, apart = sparse_block(
        rows, router, w13, w2, scale13, scale2, for_router=x, top_k=TOP_K, gate=gate, dense=dense,
        for_dense=for_dense, residual=residual,
    )  # fmt: skip

    routing = moe_reference.choose_experts((x.float() @ router.float().t()).half(), TOP_K)
    expected = moe_reference.routed_experts(x, *routing, w13, w2, scale13, scale2, gate=gate)
    tolerance = 2e-2 if fp8 else 2e-3
    if dense is not None:
        beside = dense_mlp(x if for_dense is None else for_dense, dense, gate)
        if dense.factor is None:
            close(apart, beside, tolerance)
        else:
            expected = expected.float() + torch.sigmoid(x.float() @ dense.factor.float().t()) * beside
    if kept is not None:
        expected = expected.float() + kept.float()
    close(out, expected, tolerance)
    assert (apart is None) == (dense is None or with_factor)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_dense_branch_joins_more_tokens_whose_experts_are_chosen(fp8):
    tokens = 70
    x, for_dense = torch.randn(tokens, HIDDEN).half(), torch.randn(tokens, HIDDEN).half()
    (w13, scale13), (w2, scale2) = weight(EXPERTS, 2 * INNER, HIDDEN, fp8=fp8), weight(EXPERTS, HIDDEN, INNER, fp8=fp8)
    dense = DenseBranch(*weight(6 * INNER, HIDDEN, fp8=fp8), *weight(HIDDEN, 3 * INNER, fp8=fp8))
    chosen = choose_experts(torch.randn(tokens, EXPERTS).half(), TOP_K)
    out, apart = sparse_block(
        quantize_rows(x) if fp8 else x, torch.zeros(EXPERTS, HIDDEN).half(), w13, w2, scale13, scale2, for_router=x,
        top_k=TOP_K, dense=dense, for_dense=for_dense, chosen=chosen,
    )  # fmt: skip
    tolerance = 2e-2 if fp8 else 2e-3
    close(out, moe_reference.routed_experts(x, *chosen, w13, w2, scale13, scale2, gate="silu"), tolerance)
    close(apart, dense_mlp(for_dense, dense, "silu"), tolerance)


@pytest.mark.parametrize("at", [0, 1])
def test_a_broken_token_spoils_no_other(at):
    """Not the router's input (at 0), nor the dense branch's (1)."""
    x, other = torch.randn(7, HIDDEN).half(), torch.randn(7, HIDDEN).half()
    router = torch.randn(EXPERTS, HIDDEN).half()
    (w13, _), (w2, _) = weight(EXPERTS, 2 * INNER, HIDDEN, fp8=False), weight(EXPERTS, HIDDEN, INNER, fp8=False)
    dense = DenseBranch(*weight(4 * INNER, HIDDEN, fp8=False), *weight(HIDDEN, 2 * INNER, fp8=False))

    def run():
        return sparse_block(x, router, w13, w2, for_router=x, top_k=TOP_K, dense=dense, for_dense=other)

    before = run()
    (x, other)[at][3] = float("nan")
    after = run()
    assert after[at][3].isnan().all(), "it must be seen"
    others = [t for t in range(7) if t != 3]
    for first, second in zip(before, after, strict=True):
        assert torch.equal(first[others], second[others])


def test_which_branches_it_takes():
    (w2, scale2), (narrow, _) = weight(EXPERTS, HIDDEN, INNER, fp8=True), weight(EXPERTS, HIDDEN, INNER, fp8=False)

    def branch(width, *, fp8=True):
        return DenseBranch(*weight(2 * width, HIDDEN, fp8=fp8), *weight(HIDDEN, width, fp8=fp8))

    assert joins(branch(INNER), w2, scale2)
    assert joins(branch(3 * INNER), w2, scale2)
    assert not joins(branch(INNER + 8), w2, scale2)
    assert not joins(branch(16 * INNER), w2, scale2)
    assert not joins(branch(INNER, fp8=False), w2, scale2)
    assert not joins(branch(INNER), narrow, None)
