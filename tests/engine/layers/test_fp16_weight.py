"""Weights in 16 bits that multiply in float32: nothing of a bf16 weight is lost, and rows do not see each other."""

import pytest
import torch

from engine.kernels.gemm.fp16_weight import Fp16Weight, is_available
from engine.kernels.runtime.cpu_threads import num_threads
from engine.layers.linear import Linear
from engine.layers.moe import ExpertLinear

pytestmark = pytest.mark.skipif(not is_available(), reason="PyTorch has no FBGEMM here")


def bf16(*shape: int, factor: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * factor).bfloat16()


@pytest.mark.parametrize("shape", [(960, 576), (33, 70), (16, 1537)])
@pytest.mark.parametrize("factor", [1.0, 1e-6, 1e6, 1e-20])
def test_bf16_comes_back_bit_for_bit(shape, factor):
    weight = bf16(*shape, factor=factor)
    weight[0, :3] = torch.tensor([0.0, 2.0**-31, -(2.0**-31)]) * weight.abs().max()  # the smallest that it promises
    packed = Fp16Weight.pack(weight)
    assert packed is not None
    assert torch.equal(packed(torch.eye(shape[1])), weight.float().t())


def test_numbers_too_small_to_matter_do_not_forbid_it():
    weight = bf16(32, 64)
    weight[3, 5] = 1e-30
    packed = Fp16Weight.pack(weight)
    assert packed is not None
    assert (packed(torch.eye(64)) - weight.float().t()).abs().max() <= 2.0**-38 * weight.abs().max().float()


@pytest.mark.parametrize("spoil", ["float32", "nan", "inf"])
def test_what_fp16_cannot_hold_is_declined(spoil):
    weight = bf16(32, 64).float()
    if spoil == "float32":
        weight[7, 7] = 1 + 2.0**-20
    else:
        weight[7, 7] = float(spoil)
    assert Fp16Weight.pack(weight) is None


@pytest.mark.parametrize("shape", [(960, 576), (577, 1536), (4096, 1024)])
def test_a_row_is_the_same_alone_and_in_any_batch(shape):
    packed = Fp16Weight.pack(bf16(*shape, factor=0.03), torch.randn(shape[0]))
    assert packed is not None
    x = torch.randn(600, shape[1])
    whole = packed(x)
    for count in (*range(1, 31), 63, 64, 65, 120, 128, 255, 256, 257, 512):
        for start in (0, 13, 88):
            assert torch.equal(packed(x[start : start + count]), whole[start : start + count]), (count, start)
    with num_threads(1):
        assert torch.equal(packed(x), whole)


def filled(linear: Linear, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
    return linear


@pytest.mark.parametrize("factor", [1.0, 1e-6])
def test_a_linear_layer_computes_in_float32_and_drops_its_weight(factor):
    weight, bias, x = bf16(48, 64, factor=factor), bf16(48, factor=factor), torch.randn(5, 64)
    linear = filled(Linear(64, 48, bias=True), weight, bias)
    linear.compute_dtype = torch.float32
    linear.finalize()
    linear.finalize()
    expected = x.double() @ weight.double().t() + bias.double()
    assert (linear(x) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert linear.weight.numel() == 0
    assert 2 * weight.numel() <= linear.packed_bytes


def test_float32_weights_with_more_bits_stay_as_they_are():
    weight, x = torch.randn(48, 64), torch.randn(5, 64)
    linear = filled(Linear(64, 48), weight)
    linear.compute_dtype = torch.float32
    linear.finalize()
    assert linear.packed_bytes == 0
    assert torch.equal(linear(x), torch.nn.functional.linear(x, weight))


def test_experts_are_packed_one_by_one():
    experts, weight, x = ExpertLinear(3, 64, 48), bf16(3, 48, 64), torch.randn(5, 64)
    experts.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    experts.compute_dtype = torch.float32
    experts.finalize()
    experts.finalize()
    assert experts.packed_bytes >= 2 * weight.numel()
    assert experts.weight.numel() == 0
    for i in range(3):
        torch.testing.assert_close(experts.apply_on_cpu(x, i, quantize=False), x @ weight[i].float().t())
