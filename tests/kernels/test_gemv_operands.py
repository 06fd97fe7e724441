"""What the benchmark of products with one row multiplies; in the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from engine.bench import gemv, gemv_search
from engine.bench.gemv_products import Subject
from engine.kernels import compile_pool, gemv_tiles, reference, triton_gemv
from engine.kernels.gemv_tiles import Product

CPU = torch.device("cpu")


@pytest.mark.parametrize("subject", [
    Subject(Product(96, 80, 2), (), residual=True),
    Subject(Product(96, 80, 1, normed=True), (), bias=True),
    Subject(Product(96, 80, 1, gated=True), (), "gelu_tanh"),
    Subject(Product(96, 80, 2, gated=True, normed=True), (), "silu"),
], ids=str)  # fmt: skip
def test_copies_take_turns_with_what_is_around_them(monkeypatch, subject):
    torch.manual_seed(0)
    monkeypatch.setattr(gemv, "_TURNS_BYTES", 3 * subject.num_bytes)
    operands = gemv.Operands(subject, CPU, torch.float32)
    tiles = gemv_tiles.by_rule(subject.product)
    assert [weight.element_size() == 1 for weight in operands.weights] == [subject.product.itemsize == 1] * 3
    around = {"norm": operands.norm, "gate": subject.gate}
    outputs = 48 if subject.gate else 96
    sum_of_all = torch.zeros(1, outputs)
    for step, weight in zip(operands.steps(tiles), operands.weights, strict=True):
        ours, expected = step(), reference.gemv(operands.x, weight, operands.scale, operands.bias, **around)
        assert 0.2 < expected.std() < 5
        sum_of_all += expected
        torch.testing.assert_close(ours, sum_of_all if subject.residual else expected, rtol=1e-3, atol=1e-3)
    first = reference.gemv(operands.x, operands.weights[0], operands.scale, operands.bias, **around)
    for _ in range(2):  # the residual is zero again
        torch.testing.assert_close(operands.result(tiles), first, rtol=1e-3, atol=1e-3)


def test_a_row_of_a_product(monkeypatch):
    subject = Subject(Product(512, 256, 2), ("one", "other"))
    monkeypatch.setattr(gemv, "_TURNS_BYTES", 0)
    row = {**gemv.facts(subject), **gemv.measure(subject, CPU, 0.001)}
    assert row["product"] == "512x256 bf16"
    assert row["models"] == "one other"
    assert row["mb"] == 0.3
    assert row["tiles"] == list(gemv_tiles.by_rule(subject.product))
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


def test_a_search_with_real_products(monkeypatch):
    """Only what a GPU would tell is made up. Tiles with which a result is wrong are never taken, however fast."""
    subjects = [Subject(Product(96, 512, 2), (), residual=True), Subject(Product(64, 512, 1, gated=True), (), "silu")]
    lines = {(s, t): f"{s} {t}" for s in subjects for t in gemv_search.all_tiles(s.product)}
    first, wrong, missing, good, *_ = gemv_search.all_tiles(subjects[0].product)
    pool = Pool(lines[subjects[0], missing])
    monkeypatch.setattr(gemv, "_TURNS_BYTES", 0)
    monkeypatch.setattr(gemv_search, "lines_of", lambda *_: lines)
    monkeypatch.setattr(compile_pool, "take", lambda: pool)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    multiply = triton_gemv.gemv

    def spoiled(*args, tiles, **around):
        y = multiply(*args, tiles=tiles, **around)
        return y.mul_(1.1) if tiles == wrong else y

    def seconds(steps, _device, _repeats):
        tiles = steps[0].args[1]
        assert len(steps) == 2
        return {wrong: 1.0, good: 2.0}.get(tiles, 3.0)

    monkeypatch.setattr(triton_gemv, "gemv", spoiled)
    monkeypatch.setattr(gemv_search, "step_seconds", seconds)
    with gemv_search.OnGpu(subjects, CPU) as ready:
        found = list(gemv_search.search(subjects, ready, 1000))
    assert pool.submitted == list(lines.values())
    assert pool.is_closed
    assert [each.subject for each in found] == subjects
    assert (found[0].tiles, found[0].seconds) == (good, 2.0)
    assert found[0].row["tried"] == len(gemv_search.all_tiles(subjects[0].product)) - 1
    assert first == gemv_tiles.by_rule(subjects[0].product)
