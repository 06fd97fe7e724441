"""What the benchmark of products with one row multiplies; in the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from engine.bench import gemv
from engine.bench.gemv_products import Subject
from engine.kernels import gemv_tiles, reference
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
    subject = Subject(Product(4096, 512, 2), ("one", "other"))
    monkeypatch.setattr(gemv, "_TURNS_BYTES", 0)
    row = {**gemv.facts(subject), **gemv.measure(subject, CPU, 1.0)}
    assert row["product"] == "4096x512 bf16"
    assert row["models"] == "one other"
    assert row["mb"] == 4.2
    assert row["tiles"] == list(gemv_tiles.by_rule(subject.product))
    assert row["of_floor"] == pytest.approx(4096 * 512 * 2 / 1e9 / (row["us"] / 1e6), abs=1e-3)
