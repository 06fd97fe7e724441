"""The norms between Gemma's products as one kernel, against the layers' own path on a CPU, in the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.pointwise import norm as pointwise_norm
from engine.kernels.pointwise import reference as pointwise_reference
from engine.layers.norm import WideRMSNorm

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make_norm(size, dtype, offset=0.0):
    norm = WideRMSNorm(size, 1e-4, offset=offset)
    norm.weight = torch.nn.Parameter(torch.randn(size).to(dtype), requires_grad=False)
    return norm


def run(kernels, norm, x, residual, following, branch=None, **options):
    if branch is not None:
        branch = branch[0].weight, branch[1], branch[2].weight
    weights = [each.weight for each in following]
    return kernels.post_norm(x, norm.weight, residual, weights, norm.eps, norm.offset, branch=branch, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("following, with_branch, with_scalar, offset", [
    (1, False, False, 1.0), (1, False, True, 0.0), (3, False, False, 0.0), (0, False, False, 1.0), (1, True, True, 0.0),
    (2, True, False, 1.0),
])  # fmt: skip
def test_like_separate_norms(following, with_branch, with_scalar, offset, dtype):
    size = 1408  # two blocks, the second one not full
    norm = make_norm(size, dtype, offset)
    norms = [make_norm(size, torch.float32 if i == 2 else dtype, offset) for i in range(following)]
    x, residual = torch.randn(5, size + 8).to(dtype)[:, :size] * 3, torch.randn(5, size).to(dtype)
    scalar = torch.tensor([0.3]).to(dtype) if with_scalar else None
    branch = None
    if with_branch:
        y = torch.randn(5, size + 16).to(dtype)[:, :size]
        branch = make_norm(size, dtype, offset), y, make_norm(size, dtype, offset)
    kept, reference_residual = residual.clone(), residual.clone()
    found = run(pointwise_norm, norm, x, residual, norms, branch, scalar=scalar)
    expected = norm.onto(kept, x, norms, None, branch=branch, scalar=scalar)
    reference = run(pointwise_reference, norm, x, reference_residual, norms, branch, scalar=scalar)
    assert len(found) == len(reference) == following
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(residual, kept, **close)
    torch.testing.assert_close(reference_residual, kept, **close)
    torch.testing.assert_close(found or [residual], expected, **close)
    torch.testing.assert_close(reference or [reference_residual], expected, **close)


@pytest.mark.parametrize("following", [0, 1, 3])
def test_quantised(following):
    norm, norms = make_norm(640, torch.float32), [make_norm(640, torch.float32)] * following
    x, residual = torch.randn(5, 640), torch.randn(5, 640)
    kept = residual.clone()
    found = run(pointwise_norm, norm, x, residual, norms, quantize=[True, True])
    expected = norm.onto(kept, x, norms)
    torch.testing.assert_close(residual, kept, rtol=1e-5, atol=1e-5)
    assert [isinstance(each, tuple) for each in found] == [True, True, False][: max(1, following)]
    for each, plain in zip(found, expected, strict=True):
        if not isinstance(each, tuple):
            torch.testing.assert_close(each, plain, rtol=1e-5, atol=1e-5)
            continue
        values, scale = each
        reference_values, reference_scale = pointwise_reference.quantize_rows(plain)
        torch.testing.assert_close(scale, reference_scale, rtol=1e-5, atol=0)
        assert (values.float() == reference_values.float()).float().mean() > 0.98
        torch.testing.assert_close(values.float(), reference_values.float(), rtol=0.126, atol=2**-9)
