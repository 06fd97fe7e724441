"""A sparse block for few tokens, in three kernels, against its parts one by one: in the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.gemm import reference as gemm_reference
from engine.kernels.moe import decode as moe_decode
from engine.kernels.moe import reference as moe_reference
from engine.kernels.moe.decode import DenseBranch, Norm, sparse_block
from engine.kernels.moe.tiles import DecodeTiles, StreamTiles
from engine.kernels.pointwise import reference as pointwise_reference

FP8 = torch.float8_e4m3fn
SMALL = DecodeTiles(
    StreamTiles(2, 32, 0, 4), StreamTiles(4, 32, 2, 4), StreamTiles(4, 32, 2, 1), StreamTiles(8, 32, 2, 4),
    StreamTiles(16, 16, 2, 4),
)  # fmt: skip


OF_BLOCKS = DecodeTiles(  # several steps in a block of scales, and a last tile that is not full
    StreamTiles(2, 64, 0, 4), StreamTiles(16, 64, 2, 4), StreamTiles(16, 64, 2, 1), StreamTiles(32, 64, 2, 4),
    StreamTiles(32, 64, 2, 4),
)  # fmt: skip


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def weight(*shape, dtype, halves=1):
    """[.., N, K] in a dtype; of fp8 ones with their scales. "blocks": fp8 with a scale for each 128 x 128 numbers."""
    values = torch.randn(*shape) / shape[-1] ** 0.5
    if dtype == "blocks":
        *first, rows, columns = shape
        scale = 0.5 + torch.rand(*first, halves * -(-rows // halves // 128), -(-columns // 128))
        return (values * 100).to(FP8), scale / 100
    if dtype != FP8:
        return values.to(dtype), None
    quantized, scale = pointwise_reference.quantize_rows(values.flatten(0, -2))
    return quantized.view(shape), scale.view(shape[:-1])


def block(num_experts, hidden, inner, width, dtype, *, factor):
    """Weights, as sparse_block takes them."""
    plain = torch.float32 if dtype in (FP8, "blocks") else dtype
    w13, scale13 = weight(num_experts, 2 * inner, hidden, dtype=dtype, halves=2)
    w2, scale2 = weight(num_experts, hidden, inner, dtype=dtype)
    dense = None
    if width:
        first, second = weight(2 * width, hidden, dtype=dtype), weight(hidden, width, dtype=dtype)
        dense = DenseBranch(*first, *second, weight(1, hidden, dtype=plain)[0] if factor else None)
    router, _ = weight(num_experts, hidden, dtype=plain)
    router *= 3
    return {"router": router, "w13": w13, "w2": w2, "scale13": scale13, "scale2": scale2, "dense": dense}


def reference(
    x, router, w13, w2, scale13=None, scale2=None, *, top_k, renormalize=True, expert_scale=None, gate="silu",
    norm=None, for_router=None, dense=None, for_dense=None, residual=None,
):  # fmt: skip
    if norm is not None:
        x = pointwise_reference.rms_norm(x, norm.weight, norm.eps, wide_offset=norm.offset)
    of_router, of_dense = (x if other is None else other for other in (for_router, for_dense))
    routing = moe_reference.choose_experts(
        gemm_reference.gemv(of_router, router), top_k, renormalize=renormalize, expert_scale=expert_scale
    )
    y = moe_reference.routed_experts(x, *routing, w13, w2, scale13, scale2, gate=gate)
    apart = None
    if dense is not None:
        block = 128 if dense.down_scale is not None and dense.down_scale.dim() == 2 else 0
        h = gemm_reference.gemv(of_dense, dense.gate_up, dense.gate_up_scale, gate=gate, block=block)
        apart = gemm_reference.gemv(h, dense.down, dense.down_scale, block=block)
        if dense.factor is not None:
            y = y + gemm_reference.gemv(of_router, dense.factor).sigmoid() * apart
            apart = None
    return y if residual is None else residual.add_(y), apart


def compare(x, tol, **options):
    residual = options.pop("residual", None)
    reference_x, kept = x.clone(), None if residual is None else residual.clone()
    tiles = options.pop("tiles", None)
    ours, apart = sparse_block(x, **options, residual=residual, tiles=tiles)
    theirs, reference_apart = reference(reference_x, **options, residual=kept)
    assert theirs.abs().mean() > 0.05
    torch.testing.assert_close(ours, theirs, rtol=tol, atol=tol)
    assert (apart is None) == (reference_apart is None)
    if reference_apart is not None:
        torch.testing.assert_close(apart, reference_apart, rtol=tol, atol=tol)
    if residual is not None:
        assert ours is residual
    assert moe_decode.arrivals(x.device).sum() == 0, "the next launch finds no arrivals"


DTYPES = [(torch.float32, 1e-5), (torch.float16, 5e-3), (FP8, 1e-4)]


@pytest.mark.parametrize("dtype, tol", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_experts_alone(tokens, dtype, tol):
    x = torch.randn(tokens, 96 + 16).to(torch.float32 if dtype == FP8 else dtype)[:, :96]
    compare(x, tol, **block(6, 96, 40, 0, dtype, factor=False), top_k=3, tiles=SMALL)


@pytest.mark.parametrize("dtype, tol", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_shared_expert_onto_the_residual(tokens, dtype, tol):
    """Qwen3.5: the residual stream passes its norm on the way in, and takes the result."""
    plain = torch.float32 if dtype == FP8 else dtype
    residual = torch.randn(tokens, 80).to(plain) * 2
    norm = Norm(torch.rand(80).to(plain) - 0.5, 1e-6, 1.0)
    weights = block(10, 80, 48, 56, dtype, factor=True)
    compare(residual.clone(), tol, **weights, top_k=4, norm=norm, residual=residual, tiles=SMALL)
    compare(residual, tol, **weights, top_k=4, norm=norm, residual=residual, tiles=SMALL)  # one and the same


@pytest.mark.parametrize("dtype, tol", DTYPES)
@pytest.mark.parametrize("tokens", [1, 4])
def test_dense_branch(tokens, dtype, tol):
    """Gemma 4: three inputs, two results, a factor for each expert."""
    plain = torch.float32 if dtype == FP8 else dtype
    x, for_router, for_dense = torch.randn(3, tokens, 88).to(plain)
    compare(
        x, tol, **block(8, 88, 36, 100, dtype, factor=False), top_k=2, gate="gelu_tanh", for_router=for_router,
        for_dense=for_dense, expert_scale=torch.rand(8) + 0.5, tiles=SMALL,
    )


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dense", ["blocks", FP8, torch.float32])
def test_scales_of_blocks(tokens, dense):
    """Qwen3.6 in block fp8, and layers whose shared expert has another format; by rule and in small tiles."""
    weights = block(7, 272, 136, 0, "blocks", factor=True)  # the last block of scales is for 16 or 8 numbers
    weights["dense"] = block(1, 272, 8, 256, dense, factor=True)["dense"]
    residual, norm = torch.randn(tokens, 272), Norm(torch.rand(272) - 0.5, 1e-6, 1.0)
    for tiles in (None, OF_BLOCKS):
        compare(residual.clone(), 1e-4, **weights, top_k=2, norm=norm, residual=residual.clone(), tiles=tiles)


def test_scales_of_blocks_and_a_dense_branch_of_its_own():
    x, for_router, for_dense = torch.randn(3, 2, 256)
    compare(x, 1e-4, **block(5, 256, 128, 384, "blocks", factor=False), top_k=2, gate="gelu_tanh",
            for_router=for_router, for_dense=for_dense)  # fmt: skip


@pytest.mark.parametrize("wide_offset", [None, 0.0, 1.0])
def test_norms_and_weights_as_they_are(wide_offset):
    x, norm = torch.randn(2, 64) * 3, Norm(torch.randn(64), 1e-5, wide_offset)
    compare(x, 1e-5, **block(5, 64, 32, 0, torch.float32, factor=False), top_k=5, norm=norm, renormalize=False)


def test_tiles_of_the_rule():
    x = torch.randn(2, 320)
    compare(x, 1e-5, **block(4, 320, 144, 72, FP8, factor=True), top_k=3)
    compare(x[:, :272], 1e-5, **block(4, 272, 80, 600, FP8, factor=False), top_k=2)


def test_each_token_as_if_it_were_alone():
    x = torch.randn(4, 96)
    weights = block(12, 96, 40, 56, torch.float32, factor=True)
    together, _ = sparse_block(x, **weights, top_k=3)
    for i in range(4):
        alone, _ = sparse_block(x[i : i + 1], **weights, top_k=3)
        assert torch.equal(alone[0], together[i])


def test_a_broken_token_spoils_no_other():
    x = torch.randn(3, 64)
    weights = block(8, 64, 32, 48, torch.float32, factor=True)
    before, _ = sparse_block(x, **weights, top_k=2)
    x[1] = float("nan")
    after, _ = sparse_block(x, **weights, top_k=2)
    assert after[1].isnan().all()
    assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_equal_experts_are_chosen_in_order():
    """All scores the same: the first experts, each with the same weight."""
    weights = block(6, 64, 32, 0, torch.float32, factor=False)
    weights["router"].zero_()
    x = torch.randn(1, 64)
    ours, _ = sparse_block(x, **weights, top_k=2)
    routing = torch.full((1, 2), 0.5), torch.tensor([[0, 1]], dtype=torch.int32)
    expected = moe_reference.routed_experts(x, *routing, weights["w13"], weights["w2"])
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
