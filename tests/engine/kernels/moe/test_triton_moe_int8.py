"""Experts in int8 in the interpreter: activations as they are (W8A16), and rounded to int8 (W8A8)."""

import pytest
import quantized_files as files
import torch
from packed_layers import filled
from torch import nn

pytest.importorskip("triton")

from engine.capabilities import ONLINE_INTEGERS
from engine.kernels.gemm import reference as gemm_reference
from engine.kernels.moe import decode as moe_decode
from engine.kernels.moe import experts as moe_experts
from engine.kernels.moe import reference as moe_reference
from engine.kernels.moe import tiles as moe_tiles
from engine.kernels.moe.tiles import Shape
from engine.kernels.pointwise import reference as pointwise_reference
from engine.kernels.pointwise.quantize import quantize_rows_to_int8
from engine.kernels.runtime.gpu_target import H100
from engine.layers.moe import RoutedExperts, Routing
from engine.layers.quant import FORMATS
from engine.layers.quant.gptq import Gptq
from engine.layers.quant.integers import Int8, PackQuantized
from engine.layers.quant.online_integers import group_of, packed, quantized
from engine.layers.quant.packed_experts import stack
from engine.layers.quant.rounded_inputs import round_rows


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def in_int8(num_experts, rows, columns):
    codes = torch.randint(-128, 128, (num_experts, rows, columns)).to(torch.int8)
    return codes, (0.5 + torch.rand(num_experts, rows)) / columns**0.5 / 64


def arguments(tokens, num_experts, top_k, hidden, inner):
    x = (torch.randn(tokens, hidden + 16) / 2).half()[:, :hidden]
    routing = moe_reference.choose_experts(torch.randn(tokens, num_experts), top_k)
    (w13, scale13), (w2, scale2) = in_int8(num_experts, 2 * inner, hidden), in_int8(num_experts, hidden, inner)
    return x, *routing, w13, w2, scale13, scale2


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("tokens, hidden, inner", [(1, 96, 48), (4, 256, 128), (9, 96, 48), (70, 128, 80)])
def test_products(tokens, hidden, inner, rounded, gate):
    given = arguments(tokens, 4, 2, hidden, inner)
    ours = moe_experts.routed_experts(*given, gate=gate, int8_activations=rounded)
    reference = moe_reference.routed_experts(*given, gate=gate, int8_activations=rounded)
    assert reference.abs().mean() > 0.05
    torch.testing.assert_close(ours, reference, rtol=4e-3, atol=8e-3 if rounded else 4e-3)


def test_rounded_activations_meet_codes_and_the_sum_is_exact():
    """One expert and no gate: integers, summed without error, times both scales."""
    x, (codes, scale) = torch.randn(20, 160).half(), in_int8(1, 48, 160)
    groups = moe_experts.group(torch.zeros(20, 1, dtype=torch.int32), 1, 16)
    tiles = moe_tiles.tiles_for(Shape(1, 1, 160, 48, 1), 20, H100.shared_memory).down
    ours = moe_experts.expert_product(
        x, codes, scale, groups, 1, tiles, gate=None, dtype=torch.float32, int8_activations=True
    )
    values, x_scale = pointwise_reference.quantize_rows_to_int8(x)
    sums = values.double() @ codes[0].double().t()
    assert torch.equal(ours, sums.float() * scale[0] * x_scale[:, None])


@pytest.mark.parametrize("size", [40, 1024, 2560])
def test_rows_are_rounded_as_the_linear_layers_round_them(size):
    x = torch.randn(5, size + 8).half()[:, :size]
    x[1] = 0
    x[2, 3] = 1000
    codes, scale = quantize_rows_to_int8(x)
    expected = pointwise_reference.quantize_rows_to_int8(x)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scale, expected[1])
    assert torch.equal((codes.float() * scale[:, None]).half(), round_rows(x, "int8"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(bad):
    x = torch.randn(3, 64)
    x[1, 7] = bad
    scale = quantize_rows_to_int8(x)[1]
    assert scale.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_kernels_of_a_whole_block_read_them(tokens):
    """With a shared expert in 16 bits, as GPTQ checkpoints have it."""
    x, _, _, w13, w2, scale13, scale2 = arguments(tokens, 5, 2, 64, 48)
    x, router, factor = x.float(), torch.randn(5, 64), torch.randn(1, 64)
    gate_up, down = torch.randn(192, 64) / 8, torch.randn(64, 96) / 10
    dense = moe_decode.DenseBranch(gate_up, None, down, None, factor)
    ours, _ = moe_decode.sparse_block(x, router, w13, w2, scale13, scale2, top_k=2, dense=dense)
    routing = moe_reference.choose_experts(gemm_reference.gemv(x, router), 2)
    expected = moe_reference.routed_experts(x, *routing, w13, w2, scale13, scale2)
    apart = gemm_reference.gemv(gemm_reference.gemv(x, gate_up, gate="silu"), down)
    expected += gemm_reference.gemv(x, factor).sigmoid() * apart
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_tiles_are_those_of_weights_in_8_bits():
    w2, scale2 = in_int8(4, 64, 32)
    for rounded in (True, False):
        widened = moe_tiles.widens(w2, H100, fp8_activations=True, int8_activations=rounded)
        assert widened is not rounded
        assert moe_tiles.shape_of(w2, scale2, 2, widened=widened) == Shape(4, 2, 64, 32, 1, not rounded, "rows")


# -- layers ------------------------------------------------------------------------------------------------------------

HIDDEN, WIDTH = 128, 96


@pytest.mark.parametrize("kind", [
    (Int8(0, True), files.int8()), (PackQuantized(8, 0, True), files.pack_quantized(8, 0)),
    (Gptq(8, 0, True, 1), files.gptq(8, 0)), (Int8(0, True, inputs="int8"), files.int8()),
], ids=["int8", "w8a16", "gptq", "w8a8"])  # fmt: skip
@pytest.mark.parametrize("tokens", [2, 9])
def test_experts_of_a_checkpoint_stay_in_int8(kind, tokens):
    experts = RoutedExperts(HIDDEN, WIDTH, 4)
    plain = filled(experts.gate_up_proj, *kind, 2), filled(experts.down_proj, *kind, 1)
    assert experts.gate_up_proj.weight.dtype == experts.down_proj.weight.dtype == torch.int8
    assert experts.form == "rows"
    assert not experts.gate_up_proj.method.stays_fp8
    assert not experts.wants_fp8(tokens)
    rounded = kind[0].inputs == "int8"
    assert experts.fused is not rounded  # kernels of whole blocks round nothing
    x, routing = torch.randn(tokens, HIDDEN).half(), moe_reference.choose_experts(torch.randn(tokens, 4), 2)
    ours = experts._on_gpu(x, Routing(*routing), None)
    expected = moe_reference.routed_experts(x, *routing, *plain, int8_activations=rounded)
    torch.testing.assert_close(ours, expected, rtol=1e-2, atol=5e-3)


def test_weights_that_are_dequantised_meet_rounded_activations_too():
    """W8A8 with zero points, as on a CPU."""
    experts = RoutedExperts(HIDDEN, WIDTH, 4)
    for linear in (experts.gate_up_proj, experts.down_proj):
        linear.weight = nn.Parameter(torch.randn(linear.weight.shape).half() / 10, requires_grad=False)
        linear.method = type("Rounding", (type(linear.method),), {"inputs": "int8", "fused": False})()
    x, routing = torch.randn(3, HIDDEN).half(), moe_reference.choose_experts(torch.randn(3, 4), 2)
    ours = experts._on_gpu(x, Routing(*routing), None)
    weights = experts.gate_up_proj.weight, experts.down_proj.weight
    expected = moe_reference.routed_experts(x, *routing, *weights, int8_activations=True)
    torch.testing.assert_close(ours, expected, rtol=1e-2, atol=8e-3)


@pytest.mark.parametrize("name", sorted(ONLINE_INTEGERS))
@pytest.mark.parametrize("tokens", [2, 9])
def test_experts_become_integers_while_they_load(name, tokens):
    experts, method, plain = RoutedExperts(HIDDEN, 64, 4), FORMATS[name].experts, []
    for linear in (experts.gate_up_proj, experts.down_proj):
        assert method.supports(linear)
        linear.method, inner = method, linear.in_features
        weight, group = torch.randn(linear.weight.shape) / inner**0.5, group_of(method.group, inner)
        codes, scale = quantized(weight.flatten(0, 1), method.bits, group)
        numbers = (codes.float() - (1 << (method.bits - 1))) * scale.float().repeat_interleave(group, 1)
        plain.append(numbers.view(weight.shape))
        stack(linear, [packed(weight.flatten(0, 1), method.bits, group)], "rows" if method.bits == 8 else "int4")
        assert linear.loaded_bytes == sum(p.nbytes for p in linear.parameters())
        assert linear.loaded_bytes < weight.numel() * (1.1 if method.bits == 8 else 0.6)
    x, routing = torch.randn(tokens, HIDDEN).half(), moe_reference.choose_experts(torch.randn(tokens, 4), 2)
    experts.fp8_activations = False
    ours = experts._on_gpu(x, Routing(*routing), None)
    torch.testing.assert_close(ours, moe_reference.routed_experts(x, *routing, *plain), rtol=1e-2, atol=5e-3)
