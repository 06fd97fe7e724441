"""Output heads in int8 as a GPU multiplies them, in the interpreter."""

import pytest
import torch
from torch import nn

from engine.layers.embed import Embedding, LMHead
from engine.layers.linear import Linear
from engine.layers.quant import head
from engine.layers.quant.head import BESIDE_FP8, BESIDE_INT4, FEW_ROWS, Int8Rows
from engine.layers.quant.unquantized import ON_GPU

OUTPUTS, INNER = 96, 64


def head_of(method, *, tied: bool) -> tuple[LMHead, Embedding, torch.Tensor]:
    """A head, the embedding that it may be tied to, and its exact weight."""
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(OUTPUTS, INNER), requires_grad=False)
    embedding, layer = Embedding(OUTPUTS, INNER), LMHead(INNER, OUTPUTS)
    embedding.weight = table
    if tied:
        layer.tie(embedding)
    layer.use(method)
    layer.weight = table  # as the loader leaves it
    return layer, embedding, table.clone()


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_int8(tied, rows):
    layer, embedding, exact = head_of(BESIDE_INT4, tied=tied)
    head.convert(layer)
    assert torch.equal(embedding.weight, exact)  # lookups keep every bit
    assert layer.weight.dtype == torch.int8
    numbers = layer.weight.float() * layer.scale[:, None]
    assert (numbers - exact).norm() < 0.01 * exact.norm()
    x = torch.randn(rows, INNER)
    torch.testing.assert_close(layer(x), x @ numbers.T, rtol=1e-4, atol=1e-3)
    assert not layer.wants_fp8(rows)
    converted = layer.weight
    head.convert(layer)  # a second time changes nothing
    assert layer.weight is converted


def test_rows_are_rounded_to_nearest_and_zeros_stay_zero():
    weight = torch.randn(5, 7).bfloat16()
    weight[2] = 0
    rows = Int8Rows.of(weight)
    assert rows.nbytes == 5 * (7 + 4)
    off = (rows.values.float() * rows.scale[:, None] - weight.float()).abs()
    assert bool((off <= rows.scale[:, None] * 0.51).all())
    assert not rows.values[2].any()
    assert torch.equal(rows.values.abs().amax(1) >= 126, torch.tensor([True, True, False, True, True]))


def copied(share: int = 1, free: int = 1 << 30) -> tuple[LMHead, torch.Tensor]:
    """A head in 16 bits that is one part of `share` of what a token reads, after `keep_copy`."""
    layer, _, exact = head_of(BESIDE_FP8, tied=False)
    layer.weight = nn.Parameter(layer.weight.half(), requires_grad=False)
    head.keep_copy(nn.ModuleList([Linear(4, 4), layer]), layer.loaded_bytes * share, free)
    return layer, exact.half()


@pytest.mark.parametrize("rows", [1, 4, 5, 9, FEW_ROWS])
def test_few_rows_read_the_copy(rows):
    layer, exact = copied()
    copy = layer.few_rows
    assert torch.equal(layer.weight, exact)
    assert layer.packed_bytes == copy.nbytes == BESIDE_FP8.copy_bytes(layer)
    x = torch.randn(rows, INNER).half()
    numbers = copy.values.float() * copy.scale[:, None]
    torch.testing.assert_close(layer(x).float(), x.float() @ numbers.T, rtol=1e-2, atol=1e-2)


def test_more_rows_read_the_weight_itself(monkeypatch: pytest.MonkeyPatch):
    layer, exact = copied()
    layer.few_rows.values.zero_()
    x = torch.randn(FEW_ROWS + 1, INNER).half()
    torch.testing.assert_close(layer(x), x @ exact.T)


def test_a_dropped_copy_is_not_read():
    layer, _ = copied()
    head.drop_copy(nn.ModuleList([Linear(4, 4), layer]))
    assert layer.few_rows is None
    assert layer.gemm is ON_GPU


def test_no_copy_where_it_gains_little_or_memory_is_short():
    need = OUTPUTS * (INNER + 4)
    assert copied(share=8)[0].few_rows is not None
    assert copied(share=9)[0].few_rows is None
    assert copied(free=32 * need)[0].few_rows is not None
    assert copied(free=32 * need - 1)[0].few_rows is None


def test_no_copy_where_results_must_not_depend_on_the_batch():
    layer, _, _ = head_of(BESIDE_FP8, tied=False)
    layer.weight = nn.Parameter(layer.weight.half(), requires_grad=False)
    layer.batch_invariant = True
    head.keep_copy(layer, layer.loaded_bytes, 1 << 30)
    assert layer.few_rows is None
