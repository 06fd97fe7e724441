"""Mixture of experts against its reference, in the interpreter: choice, grouping, and both forms of the GEMMs."""

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.moe import experts as moe_experts
from engine.kernels.moe import int4 as moe_int4
from engine.kernels.moe import reference as moe_reference
from engine.kernels.moe import tiles as moe_tiles
from engine.kernels.moe.tiles import MatrixTiles, Shape, StreamTiles, Tiles
from engine.kernels.pointwise import reference as pointwise_reference

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(ours, reference, tol):
    torch.testing.assert_close(ours, reference, rtol=tol, atol=tol)


@pytest.mark.parametrize("options", [{}, {"renormalize": False}, {"expert_scale": True}])
@pytest.mark.parametrize("tokens, num_experts, top_k", [(1, 8, 2), (5, 128, 8), (3, 60, 10), (2, 4, 1), (2, 4, 4)])
def test_choice(tokens, num_experts, top_k, options):
    logits = torch.randn(tokens, num_experts + 5)[:, :num_experts] * 3  # strided rows
    if "expert_scale" in options:
        options = {"expert_scale": torch.rand(num_experts) + 0.5}
    weights, experts = moe_experts.choose_experts(logits, top_k, **options)
    reference_weights, reference_experts = moe_reference.choose_experts(logits, top_k, **options)
    assert torch.equal(experts, reference_experts)
    close(weights, reference_weights, 1e-6)


def test_equal_experts_are_chosen_in_order():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 0.0]])
    for kernels in (moe_experts, moe_reference):
        assert kernels.choose_experts(logits, 5)[1].tolist() == [[1, 2, 3, 0, 4]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_broken_scores_choose_experts_that_exist(bad):
    logits = torch.randn(2, 12)
    logits[0] = bad
    weights, experts = moe_experts.choose_experts(logits, 4)
    assert weights[0].isnan().all()
    assert sorted(set(experts[0].tolist())) == sorted(experts[0].tolist())
    assert experts.min() >= 0
    assert experts.max() < 12
    assert torch.equal(experts[1:], moe_reference.choose_experts(logits[1:], 4)[1])


@pytest.mark.parametrize("tokens, num_experts, top_k, rows", [
    (1, 8, 2, 16), (7, 128, 8, 16), (16, 128, 8, 16), (40, 5, 3, 16), (100, 60, 4, 16), (200, 3, 2, 64),
])
@pytest.mark.parametrize("chosen", ["random", "one expert"])
def test_grouping(tokens, num_experts, top_k, rows, chosen):
    experts = torch.rand(tokens, num_experts).argsort(1)[:, :top_k].int()
    if chosen == "one expert":
        experts[:, 0] = num_experts - 1  # may be in a row twice: the kernels do not mind
    order, blocks, _ = moe_experts.group(experts, num_experts, rows)
    reference_order, reference_blocks = moe_reference.group(experts, num_experts, rows)
    assert torch.equal(order, reference_order)
    assert blocks.shape == reference_blocks.shape
    used = reference_blocks[:, 2] > 0
    assert torch.equal(blocks[used], reference_blocks[used])
    assert (blocks[~used, 2] == 0).all()


def test_grouping_in_large_chunks():
    experts = torch.randint(0, 9, (1100, 8), dtype=torch.int32)  # more than 8192 pairs
    order, blocks, _ = moe_experts.group(experts, 9, 128)
    reference_order, reference_blocks = moe_reference.group(experts, 9, 128)
    assert torch.equal(order, reference_order)
    assert torch.equal(blocks[:, 2], reference_blocks[:, 2])


def test_no_routing_makes_more_blocks_than_the_list_holds():
    for tokens, num_experts, top_k in ((1, 1, 1), (3, 2, 1), (5, 8, 3), (9, 4, 2), (64, 6, 5)):
        for rows in (16, 32):
            worst = 0
            for _ in range(200):
                experts = torch.rand(tokens, num_experts).argsort(1)[:, :top_k]
                counts = torch.bincount(experts.flatten())
                worst = max(worst, int(((counts + rows - 1) // rows).sum()))
            assert worst <= moe_tiles.max_blocks(tokens * top_k, num_experts, rows)


def in_blocks(weights, halves):
    """Random e4m3 numbers [E, N, K], and a scale for each 128 x 128 of them; each half has blocks of its own."""
    num_experts, rows, columns = weights.shape
    values = (weights * 100).to(FP8)
    shape = num_experts, halves * -(-rows // halves // 128), -(-columns // 128)
    return values, (0.5 + torch.rand(shape)) / 100


def layer(num_experts, hidden, inner, dtype):
    w13 = torch.randn(num_experts, 2 * inner, hidden) / hidden**0.5
    w2 = torch.randn(num_experts, hidden, inner) / inner**0.5
    if dtype == "blocks":
        (w13, scale13), (w2, scale2) = in_blocks(w13, 2), in_blocks(w2, 1)
        return {"w13": w13, "w2": w2, "scale13": scale13, "scale2": scale2}
    if dtype != FP8:
        return {"w13": w13.to(dtype), "w2": w2.to(dtype)}
    found = {}
    for name, scale_name, w in (("w13", "scale13", w13), ("w2", "scale2", w2)):
        values, scale = pointwise_reference.quantize_rows(w.flatten(0, 1))
        found |= {name: values.view(w.shape), scale_name: scale.view(w.shape[:2])}
    return found


@pytest.mark.parametrize("tokens", [2, 7])
def test_onto_the_residual(tokens):
    x, residual = torch.randn(tokens, 64).half(), torch.randn(tokens, 64).half() * 8
    routing = moe_reference.choose_experts(torch.randn(tokens, 6), 3)
    arguments = layer(6, 64, 32, torch.float16)
    kept, reference = residual.clone(), residual.clone()
    ours = moe_experts.routed_experts(x, *routing, **arguments, residual=residual)
    assert ours is residual
    close(ours, moe_reference.routed_experts(x, *routing, **arguments, residual=reference), 4e-3)
    close(ours, kept + moe_experts.routed_experts(x, *routing, **arguments), 0)


def compare(tokens, num_experts, top_k, hidden, inner, dtype, tol, gate="silu", tiles=None, **options):
    x = torch.randn(tokens, hidden + 16).to(torch.float32 if dtype in (FP8, "blocks") else dtype)[:, :hidden]
    weights, experts = moe_reference.choose_experts(torch.randn(tokens, num_experts), top_k)
    arguments = {"x": x, "weights": weights, "experts": experts, **layer(num_experts, hidden, inner, dtype)}
    ours = moe_experts.routed_experts(**arguments, gate=gate, tiles=tiles, **options)
    reference = moe_reference.routed_experts(**arguments, gate=gate, **options)
    assert reference.abs().mean() > 0.05
    close(ours, reference, tol)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-5), (torch.float16, 4e-3), (FP8, 1e-4)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_vector_form(tokens, dtype, tol, gate):
    compare(tokens, 6, 3, 96, 40, dtype, tol, gate)


def test_vector_form_in_several_steps():
    """Rows longer than a step, the last step in part, and outputs that do not fill a program."""
    tiles = moe_tiles.decode_tiles(Shape(5, 2, 88, 42, 4), 2)
    tiles = tiles._replace(gate_up=StreamTiles(4, 32, 2, 1), down=StreamTiles(4, 16, 1, 4))
    compare(2, 5, 2, 88, 42, torch.float32, 1e-5, tiles=tiles)
    compare(2, 5, 2, 64, 64, torch.float32, 1e-5, tiles=tiles)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-5), (torch.float16, 4e-3), (FP8, 2e-2)])
@pytest.mark.parametrize("tokens, num_experts, top_k", [(5, 6, 3), (70, 4, 2)])
def test_grouped_form(tokens, num_experts, top_k, dtype, tol, gate):
    compare(tokens, num_experts, top_k, 96, 48, dtype, tol, gate)


def test_grouped_form_of_odd_sizes():
    """Neither side a multiple of the tile, and blocks that are never full."""
    tiles = Tiles(16, MatrixTiles(32, 32, 4, 2), MatrixTiles(32, 32, 4, 2))
    compare(9, 7, 2, 72, 40, torch.float32, 1e-5, tiles=tiles)
    compare(9, 7, 2, 64, 64, torch.float32, 1e-5, tiles=tiles)


@pytest.mark.parametrize("hidden, inner", [(256, 128), (352, 200), (384, 320)])
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_scales_of_blocks(tokens, hidden, inner):
    """Sides that fill their blocks, and sides that do not."""
    compare(tokens, 5, 2, hidden, inner, "blocks", 1e-4 if tokens <= 4 else 2e-2)


def test_scales_of_blocks_in_full_tiles():
    compare(150, 2, 2, 256, 256, "blocks", 2e-2, gate="gelu_tanh")


def in_int4(num_experts, rows, columns, group):
    values = torch.randint(0, 256, (num_experts, rows, columns // 2), dtype=torch.uint8)
    return values, ((0.5 + torch.rand(num_experts, rows, columns // group)) / columns**0.5 / 4).half()


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("group, hidden, inner", [(32, 384, 192), (128, 256, 128), (128, 384, 256), (0, 128, 192)])
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 70])
def test_int4(tokens, group, hidden, inner, fp8, monkeypatch):
    """Groups of some numbers, or one for each output; steps of 128 columns and of 64, and outputs that fill no tile."""
    if tokens > 1:  # fewer programs, which the interpreter's time depends on
        monkeypatch.setattr(moe_int4, "_ROWS_EACH", 128)
    x = (torch.randn(tokens, hidden + 16) / 2).half()[:, :hidden]
    weights, experts = moe_reference.choose_experts(torch.randn(tokens, 4), 2)
    w13, scale13 = in_int4(4, 2 * inner, hidden, group or hidden)
    w2, scale2 = in_int4(4, hidden, inner, group or inner)
    arguments = x, weights, experts, w13, w2, scale13, scale2
    ours = moe_experts.routed_experts(*arguments, fp8_activations=fp8)
    reference = moe_reference.routed_experts(*arguments, fp8_activations=fp8)
    assert reference.abs().mean() > 0.05
    close(ours, reference, 2e-2 if fp8 and tokens > 8 else 8e-3)


def test_the_warm_up_runs_int4_by_pairs_and_in_blocks():
    kinds = moe_tiles.all_kinds(Shape(128, 8, 2816, 704, 1, True, "int4"), 16, 227 << 10)
    assert kinds[:2] == [1, 9]


@pytest.mark.parametrize("hidden, inner", [(256, 128), (352, 200)])
def test_scales_of_blocks_and_activations_as_they_are(hidden, inner):
    compare(9, 5, 2, hidden, inner, "blocks", 1e-4, fp8_activations=False)


def test_a_broken_token_spoils_no_other():
    for tokens in (3, 20):
        x, scores = torch.randn(tokens, 64), torch.randn(tokens, 8)
        arguments = layer(8, 64, 32, torch.float32)
        before = moe_experts.routed_experts(x, *moe_experts.choose_experts(scores, 2), **arguments)
        x[1], scores[1] = float("nan"), float("nan")
        after = moe_experts.routed_experts(x, *moe_experts.choose_experts(scores, 2), **arguments)
        assert after[1].isnan().all()
        others = [t for t in range(tokens) if t != 1]
        close(after[others], before[others], 1e-6)


REAL = [Shape(128, 8, 2048, 768, 2), Shape(128, 8, 2816, 704, 2), Shape(256, 8, 2048, 512, 1),
        Shape(512, 10, 4096, 1024, 1), Shape(8, 2, 4096, 14336, 2)]


@pytest.mark.parametrize("shape", REAL)
def test_tiles_fit_each_card_and_suit_each_number_of_tokens(shape):
    for shared in (99 << 10, 163 << 10, 227 << 10):
        seen = []
        for tokens in (5, 16, 64, 256, 1024, 4096, 16384):
            tiles = moe_tiles.tiles_for(shape, tokens, shared)
            assert moe_tiles.shared_bytes(tiles, shape) <= shared
            seen.append(tiles.rows)
        assert seen == sorted(seen)
        assert seen[-1] == 128


def test_what_was_measured_counts(tmp_path, monkeypatch):
    """And is read as it was written; a later measurement replaces an earlier one, and other shapes go by rule."""
    shape, shared = REAL[0], 227 << 10
    few = moe_tiles.decode_tiles(shape, 1)._replace(gate_up=StreamTiles(16, 128, 1, 2))
    many = Tiles(32, MatrixTiles(32, 64, 4, 3), MatrixTiles(32, 64, 4, 3))
    found = [moe_tiles.Measured(shape, 0, 1, few), moe_tiles.Measured(shape, None, 64, many),
             moe_tiles.Measured(shape, None, 16, many._replace(rows=16))]
    path = tmp_path / "tuned.json"
    moe_tiles.write_measured(path, [found[0]._replace(tiles=moe_tiles.decode_tiles(shape, 1))])
    moe_tiles.write_measured(path, found)
    assert sorted(moe_tiles._read(path), key=str) == sorted(found, key=str)
    rule = moe_tiles.decode_tiles(shape, 2), moe_tiles.tiles_for(shape, 65, shared)
    monkeypatch.setattr(moe_tiles, "_TUNED", path)
    moe_tiles._measured.cache_clear()
    try:
        assert moe_tiles.decode_tiles(shape, 1) == few
        assert [moe_tiles.tiles_for(shape, n, shared).rows for n in (5, 16, 17, 64)] == [16, 16, 32, 32]
        assert (moe_tiles.decode_tiles(shape, 2), moe_tiles.tiles_for(shape, 65, shared)) == rule
        assert moe_tiles.tiles_for(shape, 64, 8 << 10) != many, "too large for a small card"
    finally:
        moe_tiles._measured.cache_clear()


def test_the_shipped_table_is_sound():
    for entry in moe_tiles._read(moe_tiles._TUNED):
        assert (entry.dense_width is None) == (entry.tokens > moe_tiles.VECTOR_TOKENS)
        if isinstance(entry.tiles, Tiles):
            assert moe_tiles.shared_bytes(entry.tiles, entry.shape) <= 227 << 10
        else:
            assert entry.tiles.router.warps == entry.tiles.dense_gate_up.warps
            assert entry.tiles.down.warps == entry.tiles.dense_down.warps
