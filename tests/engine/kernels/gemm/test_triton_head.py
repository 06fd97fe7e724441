"""The output head beside int4 as a GPU multiplies it, in the interpreter."""

import pytest
import torch
from torch import nn

from engine.layers.embed import Embedding, LMHead
from engine.layers.quant import head
from engine.layers.quant.head import BESIDE_INT4


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_fp8(tied, rows):
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(96, 64), requires_grad=False)
    exact = table.clone()
    embedding, layer = Embedding(96, 64), LMHead(64, 96)
    embedding.weight = table
    if tied:
        layer.tie(embedding)
    else:
        layer.weight = table
    layer.use(BESIDE_INT4)
    layer.weight = table  # as the loader leaves it
    head.convert(layer)
    assert torch.equal(embedding.weight, exact)  # lookups keep every bit
    assert layer.weight.dtype == torch.float8_e4m3fn
    numbers = layer.weight.float() * layer.scale[:, None]
    assert (numbers - exact).norm() < 0.03 * exact.norm()
    x = torch.randn(rows, 64)
    torch.testing.assert_close(layer(x), x @ numbers.T, rtol=1e-4, atol=1e-3)
    assert not layer.wants_fp8(rows)
    converted = layer.weight
    head.convert(layer)  # a second time changes nothing
    assert layer.weight is converted
