"""A product on its way into the residual stream."""

import pytest
import torch

from engine.layers.linear import Linear


@pytest.mark.parametrize("rows", [100, 512, 700])
def test_of_many_rows_the_library_adds_it_in_place(rows: int) -> None:
    torch.manual_seed(rows)
    linear = Linear(48, 64)
    linear.weight = torch.nn.Parameter(torch.randn(64, 48), requires_grad=False)
    linear._product = Linear._on_gpu
    x, residual = torch.randn(rows, 48), torch.randn(rows, 64)
    expected = residual + x @ linear.weight.t()
    with torch.inference_mode():
        missing = linear.onto(residual, x)
    assert (missing is None) == (rows >= 512)
    torch.testing.assert_close(residual if missing is None else residual + missing, expected)
