"""What the benchmark of products with one row multiplies; in the interpreter."""

import math

import pytest
import torch

pytest.importorskip("triton")

from engine.bench.author import gemv
from engine.kernels.gemm import reference as gemm_reference
from engine.kernels.gemm import small_batch
from engine.kernels.gemm import tiles as gemm_tiles
from engine.kernels.gemm.tiles import GemmShape, VectorTiles
from engine.kernels.moe import decode as moe_decode
from engine.kernels.moe import tiles as moe_tiles
from engine.kernels.moe.tiles import Shape, StreamTiles
from engine.kernels.runtime import compile_pool
from engine.kernels.runtime.driver import KernelError
from engine.kernels.tuning import decode_step, gemm_operands, step_search
from engine.kernels.tuning.step_gemms import Subject
from engine.kernels.tuning.step_search import Block, Stage

CPU = torch.device("cpu")


@pytest.mark.parametrize("subject", [
    Subject(GemmShape(96, 80, 2), (), residual=True),
    Subject(GemmShape(96, 80, 1, normed=True), (), bias=True),
    Subject(GemmShape(96, 80, 1, gated=True), (), "gelu_tanh"),
    Subject(GemmShape(96, 80, 2, gated=True, normed=True), (), "silu"),
    Subject(GemmShape(128, 96, 1, block=32), ()),
], ids=str)  # fmt: skip
def test_copies_take_turns_with_what_is_around_them(monkeypatch, subject):
    torch.manual_seed(0)
    monkeypatch.setattr(gemm_operands, "_TURNS_BYTES", 3 * subject.num_bytes)
    operands = gemm_operands.Operands(subject, CPU, torch.float32)
    tiles = gemm_tiles.by_rule(subject.gemm)
    assert [weight.element_size() == 1 for weight in operands.weights] == [subject.gemm.itemsize == 1] * 3
    around = {"norm": operands.norm, "gate": subject.gate}
    outputs = subject.gemm.outputs // (2 if subject.gate else 1)
    scale = operands.scale
    if subject.gemm.block:
        assert scale.unique().numel() == 1  # all blocks have the same, so rows do too
        scale = scale[:1, 0].expand(subject.gemm.outputs)
    sum_of_all = torch.zeros(1, outputs)
    for step, weight in zip(operands.steps(tiles), operands.weights, strict=True):
        ours, expected = step(), gemm_reference.gemv(operands.x, weight, scale, operands.bias, **around)
        assert 0.2 < expected.std() < 5
        sum_of_all += expected
        torch.testing.assert_close(ours, sum_of_all if subject.residual else expected, rtol=1e-3, atol=1e-3)
    first = gemm_reference.gemv(operands.x, operands.weights[0], scale, operands.bias, **around)
    for _ in range(2):  # the residual is zero again
        torch.testing.assert_close(operands.result(tiles), first, rtol=1e-3, atol=1e-3)


def test_a_row_of_a_product(monkeypatch):
    subject = Subject(GemmShape(512, 256, 2), ("one", "other"))
    monkeypatch.setattr(gemm_operands, "_TURNS_BYTES", 0)
    row = {**gemv.facts(subject), **gemv.measure(subject, CPU, 0.001)}
    assert row["product"] == "512x256 bf16"
    assert row["models"] == "one other"
    assert row["mb"] == 0.3
    assert row["tiles"] == list(gemm_tiles.by_rule(subject.gemm))
    assert row["of_floor"] == pytest.approx(512 * 256 * 2 / 1e6 / (row["us"] / 1e6), abs=1e-3)


class Pool:
    """A compile pool that knows one kernel which cannot be compiled."""

    def __init__(self, missing):
        self.missing, self.submitted, self.is_closed = missing, [], False

    def submit(self, jobs):
        self.submitted = jobs

    def wait(self, jobs):
        return {job: "no" for job in jobs if job == self.missing}

    def close(self):
        self.is_closed = True


class Layer:
    """A step of two products, which the interpreter really multiplies; the second is the head's."""

    def __init__(self):
        self.x, self.weight = torch.randn(1, 512), torch.randn(256, 512) / 20
        self.head_weight = torch.randn(320, 256) / 20

    def step(self):
        return decode_step.DecodeStep(
            lambda: small_batch.gemv(self.x, self.weight), lambda hidden: small_batch.gemv(hidden, self.head_weight)
        )


def test_a_step_takes_the_tiles_chosen_for_it_and_tells_which_it_took():
    torch.manual_seed(0)
    layer = Layer()
    inside, head = GemmShape(256, 512, 4), GemmShape(320, 256, 4)
    with decode_step.using({}) as taken:
        expected = layer.step().run(head=True)
    assert taken == {product: gemm_tiles.vector_tiles(product) for product in (inside, head)}
    torch.testing.assert_close(expected, layer.x @ layer.weight.t() @ layer.head_weight.t(), rtol=1e-3, atol=1e-3)
    tiles = VectorTiles(4, 128, 1)
    with decode_step.using({inside: tiles}) as taken:
        other = layer.step().run(head=False)
    assert taken == {inside: tiles}
    torch.testing.assert_close(other, layer.x @ layer.weight.t(), rtol=1e-3, atol=1e-3)
    with decode_step.using({}) as taken:  # afterwards all is as it was
        layer.step().run(head=False)
    assert taken == {inside: gemm_tiles.vector_tiles(inside)}
    assert small_batch.vector_tiles is gemm_tiles.vector_tiles


def test_a_sparse_block_takes_the_tiles_chosen_for_it():
    torch.manual_seed(0)
    shape = Shape(4, 2, 64, 32, 4)
    block = Block(shape, 0)
    x, router = torch.randn(1, 64), torch.randn(4, 64)
    stacks = torch.randn(4, 64, 64) / 8, torch.randn(4, 64, 32) / 6

    def forward():
        return moe_decode.sparse_block(x, router, *stacks, top_k=2)[0]

    rule = moe_tiles.decode_tiles(shape, 1)
    tiles = rule._replace(gate_up=StreamTiles(4, 32, 2, 1), down=StreamTiles(2, 16, 2, rule.down.warps))
    with decode_step.using({}) as taken:
        expected = forward()
    assert taken == {block: rule}
    with decode_step.using({block: tiles}) as taken:
        other = forward()
    assert taken == {block: tiles}
    torch.testing.assert_close(other, expected, rtol=1e-3, atol=1e-3)


def test_a_search_on_a_card(monkeypatch):
    """Only what a GPU would tell is made up. Tiles with which a result is wrong are never taken, however fast."""
    subject = Subject(GemmShape(96, 512, 2), ())
    product = subject.gemm
    rule = gemm_tiles.by_rule(product)
    wrong, missing, refused, good, *_ = found = [t for t in step_search.candidates(product) if t != rule]
    stage = Stage("a product", product, [tiles._asdict() for tiles in found])
    todo = decode_step.Plan([stage], {product: rule}, {product: subject})
    lines = {(0, number): {f"{number}", "what all have"} for number in range(len(found))}
    pool = Pool(str(found.index(missing)))
    monkeypatch.setattr(gemm_operands, "_TURNS_BYTES", 0)
    monkeypatch.setattr(decode_step, "lines_of", lambda *_: lines)
    monkeypatch.setattr(compile_pool, "take", lambda: pool)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    multiply = small_batch.gemv

    def spoiled(*args, tiles=None, **around):
        y = multiply(*args, tiles=tiles, **around)
        return y.mul_(1.1) if tiles == wrong else y

    def ms(decode):
        tiles = decode()
        if tiles == refused:
            raise KernelError("too much shared memory")
        return {wrong: 1.0, good: 2.0}.get(tiles, 3.0)

    monkeypatch.setattr(small_batch, "gemv", spoiled)
    monkeypatch.setattr(decode_step, "step_ms", ms)
    step = decode_step.DecodeStep(lambda: small_batch.vector_tiles(product), lambda tiles: tiles)
    with decode_step.OnGpu(step, todo, CPU) as ready:
        (best,) = step_search.search(todo.stages, todo.start, ready, math.inf)
    assert pool.submitted[:3] == ["0", "what all have", "1"]
    assert pool.is_closed
    assert (best.tiles, best.row["ms"], best.row["ms_before"]) == (good, 2.0, 3.0)
    assert best.row["tried"] == len(found) - 1
