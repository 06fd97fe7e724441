"""Two products of the same few rows in one launch, in the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from torch import nn

from engine.kernels import reference, triton_gemv
from engine.layers.linear import Linear, UnnormedRows


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("rows, wide_offset", [(1, None), (3, 1.0), (4, None)])
def test_two_products(rows, wide_offset, fp8):
    torch.manual_seed(0)
    x = torch.randn(rows, 96 + 16)[:, :96]
    weight, second, scale = torch.randn(50, 96), torch.randn(7, 96), None
    if fp8:
        weight, scale = reference.quantize_rows(weight)
    norm = torch.randn(96), 1e-6
    ours = triton_gemv.two_gemv(x, weight, scale, second, norm=norm, wide_offset=wide_offset)
    for found, arguments in zip(ours, ((weight, scale), (second, None)), strict=True):
        expected = reference.gemv(x, *arguments, norm=norm, wide_offset=wide_offset)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [2, 5])
def test_a_layer_takes_them_together_where_rows_are_few(rows, monkeypatch):
    torch.manual_seed(0)
    first, small = Linear(64, 40), Linear(64, 6)
    for linear in (first, small):
        linear.weight = nn.Parameter(torch.randn(linear.weight.shape), requires_grad=False)
        linear._product = Linear._on_gpu
    x, norm = torch.randn(rows, 64), torch.rand(64)
    calls = []
    both = triton_gemv.two_gemv
    monkeypatch.setattr(triton_gemv, "two_gemv", lambda *args, **options: calls.append(1) or both(*args, **options))
    for given, plain in ((x, x), (UnnormedRows(x, norm, 1e-6), reference.rms_norm(x, norm, 1e-6))):
        if rows > 4 and isinstance(given, UnnormedRows):
            continue  # many rows never come so
        for found, linear in zip(first.with_small(small, given), (first, small), strict=True):
            torch.testing.assert_close(found, plain @ linear.weight.t(), rtol=1e-4, atol=1e-4)
    assert len(calls) == (2 if rows <= 4 else 0)
