"""Gated DeltaNet's norm to fp8 against the CPU's, in the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.pointwise import reference as pointwise_reference
from engine.kernels.pointwise.norm import gated_rms_norm_to_fp8
from engine.kernels.recurrent.reference import gated_rms_norm


@pytest.mark.parametrize("heads, value_dim", [(11, 128), (4, 32), (3, 16)])
def test_like_the_norm_and_then_quantised(heads, value_dim):
    torch.manual_seed(0)
    size = heads * value_dim
    x, weight = torch.randn(5, heads, value_dim), torch.randn(value_dim)
    z = torch.randn(5, size + 24)[:, 24:]
    values, scale = gated_rms_norm_to_fp8(x, z, weight, 1e-3)
    reference = gated_rms_norm(x, z.unflatten(1, (heads, value_dim)), weight, 1e-3).flatten(1)
    reference_values, reference_scale = pointwise_reference.quantize_rows(reference)
    torch.testing.assert_close(scale, reference_scale, rtol=1e-5, atol=0)
    assert (values.float() == reference_values.float()).float().mean() > 0.98
    torch.testing.assert_close(values.float(), reference_values.float(), rtol=0.126, atol=2**-9)
