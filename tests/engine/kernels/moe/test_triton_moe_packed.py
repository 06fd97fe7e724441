"""Experts in fp4, and in int8 with groups or zero points: layers as a GPU has them after loading, interpreted."""

import pytest
import quantized_files as files
import torch
from packed_layers import filled

pytest.importorskip("triton")

from engine.kernels.moe import experts as moe_experts
from engine.kernels.moe import reference as moe_reference
from engine.kernels.moe import tiles as moe_tiles
from engine.kernels.moe.tiles import MatrixTiles, Shape, Tiles
from engine.kernels.runtime.gpu_target import H100
from engine.layers.moe import RoutedExperts, Routing
from engine.layers.quant.float4 import Mxfp4, Nvfp4
from engine.layers.quant.gptq import Gptq
from engine.layers.quant.integers import Int8, PackQuantized
from engine.layers.quant.stored import StoredExperts

MODELOPT = Nvfp4("weight", "weight_scale_2", "input_scale")
FP4 = {
    "nvfp4": (Nvfp4(), files.float4("nvfp4")), "modelopt": (MODELOPT, files.float4("modelopt")),
    "mxfp4": (Mxfp4(), files.float4("mxfp4")),
}  # fmt: skip
INT8 = {
    "groups of 32": (PackQuantized(8, 32, True), files.pack_quantized(8, 32)),
    "gptq": (Gptq(8, 64, True, 1), files.gptq(8, 64)),
    "zeros of groups": (PackQuantized(8, 64, False), files.pack_quantized(8, 64, symmetric=False)),
    "zeros of outputs": (Int8(0, False), files.int8(symmetric=False)),
    "w8a8 with zeros": (Int8(0, False, inputs="int8"), files.int8(symmetric=False)),
}
KINDS = FP4 | INT8
HIDDEN, WIDTH, EXPERTS = 320, 192, 4


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def layer(kind, hidden=HIDDEN, width=WIDTH, gate="silu"):
    experts = RoutedExperts(hidden, width, EXPERTS, gate=gate)
    return experts, (filled(experts.gate_up_proj, *kind, 2), filled(experts.down_proj, *kind, 1))


def compare(experts, plain, tokens, dtype=torch.float16, near=(1e-2, 6e-3)):
    x = (torch.randn(tokens, experts.gate_up_proj.in_features + 24) / 2).to(dtype)[:, 16:-8]  # rows not aligned
    routing = moe_reference.choose_experts(torch.randn(tokens, EXPERTS), 2)
    ours = experts._on_gpu(x, Routing(*routing), None)
    rounded = experts.gate_up_proj.method.inputs == "int8"
    expected = moe_reference.routed_experts(x, *routing, *plain, gate=experts.gate, int8_activations=rounded)
    assert expected.abs().mean() > 0.02
    torch.testing.assert_close(ours, expected, rtol=near[0], atol=near[1])


@pytest.mark.parametrize("tokens", [1, 4, 9])
@pytest.mark.parametrize("name", KINDS)
def test_products(name, tokens):
    """A pair's weights for itself, or blocks of pairs; tiles that end beyond the weight."""
    experts, plain = layer(KINDS[name])
    assert experts.form == ("fp4" if name in FP4 else "int8")
    assert experts.gate_up_proj.weight.dtype == (torch.uint8 if name in FP4 else torch.int8)
    assert not experts.fused
    assert not experts.wants_fp8(tokens)
    compare(experts, plain, tokens)


@pytest.mark.parametrize("name", FP4)
@pytest.mark.parametrize("tokens", [2, 7])
def test_fp4_is_exact(name, tokens):
    """With activations in float32 nothing is rounded but sums."""
    compare(*layer(FP4[name]), tokens, torch.float32, near=(1e-5, 1e-5))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "zeros of groups"])
def test_many_tokens_in_full_tiles(name):
    compare(*layer(KINDS[name], 128, 128, "gelu_tanh"), 80)


@pytest.mark.parametrize("name", ["nvfp4", "zeros of groups"])
def test_rows_longer_than_a_program_reads_at_a_time(name):
    compare(*layer(KINDS[name], 1088, 64), 2)


@pytest.mark.parametrize("tiles", [
    Tiles(16, MatrixTiles(32, 64, 4, 2), MatrixTiles(64, 64, 4, 2)),
    Tiles(32, MatrixTiles(64, 128, 4, 3), MatrixTiles(128, 64, 4, 2)),
])  # fmt: skip
@pytest.mark.parametrize("name", ["modelopt", "mxfp4", "groups of 32", "zeros of outputs"])
def test_tiles(name, tiles):
    experts, plain = layer(KINDS[name])
    x, routing = torch.randn(6, HIDDEN).half() / 2, moe_reference.choose_experts(torch.randn(6, EXPERTS), 2)
    ours = moe_experts.routed_experts(
        x, *routing, *experts.stacks, zeros=experts.zeros, factors=experts.factors, tiles=tiles
    )
    expected = moe_reference.routed_experts(x, *routing, *plain)
    torch.testing.assert_close(ours, expected, rtol=1e-2, atol=6e-3)


def test_a_pair_does_not_depend_on_others():
    experts, _ = layer(FP4["nvfp4"])
    x, routing = torch.randn(4, HIDDEN).half(), moe_reference.choose_experts(torch.randn(4, EXPERTS), 2)
    whole = experts._on_gpu(x, Routing(*routing), None)
    alone = experts._on_gpu(x[2:3], Routing(*(each[2:3].contiguous() for each in routing)), None)
    assert torch.equal(alone[0], whole[2])


@pytest.mark.parametrize(("kind", "in_group"), [("nvfp4", 16), ("mxfp4", 32), ("groups of 32", 32)])
def test_what_memory_holds(kind, in_group):
    experts, _ = layer(KINDS[kind])
    for linear in (experts.gate_up_proj, experts.down_proj):
        numbers, outputs = EXPERTS * linear.out_features * linear.in_features, EXPERTS * linear.out_features
        size = numbers / 2 if kind in FP4 else numbers
        of_groups = numbers // in_group * (1 if kind in FP4 else 2)
        assert linear.loaded_bytes == size + of_groups + (4 * outputs if kind == "nvfp4" else 0)


def test_shapes_and_what_the_warm_up_runs():
    experts, _ = layer(FP4["nvfp4"])
    shape = experts.shape(2, H100)
    assert shape == Shape(EXPERTS, 2, HIDDEN, WIDTH, 1, True, "fp4")
    assert moe_tiles.all_kinds(shape, 16, H100.shared_memory, H100)[:2] == [1, 5]
    assert layer(INT8["gptq"])[0].shape(2, H100) == Shape(EXPERTS, 2, HIDDEN, WIDTH, 1, True, "int8")


@pytest.mark.parametrize(("form", "out", "inner", "stays"), [
    (Nvfp4(), 64, 128, True), (Nvfp4(), 64, 96, False), (Nvfp4(), 40, 128, False), (Mxfp4(), 64, 64, True),
    (Mxfp4(), 64, 32, False), (PackQuantized(8, 48, True), 64, 192, False),
    (PackQuantized(8, 128, False), 64, 384, True),
    (PackQuantized(8, 32, True, inputs="int8"), 64, 64, True), (PackQuantized(2, 32, True), 64, 64, False),
    (Gptq(8, 64, True, 1, in_order=False), 64, 128, False),
])  # fmt: skip
def test_what_does_not_fit_is_dequantised(form, out, inner, stays):
    assert (form.stacks_as(out, inner, {}) is not None) is stays


def test_both_products_have_one_form():
    """Else both are dequantised: here rows in int8 and groups in int8."""
    from engine.models.loading.quantized import _agree

    experts, _ = layer(INT8["groups of 32"])
    rows = RoutedExperts(HIDDEN, WIDTH, EXPERTS)
    filled(rows.down_proj, Int8(0, True), files.int8(), 1)
    methods = experts.gate_up_proj.method, rows.down_proj.method
    assert all(isinstance(method, StoredExperts) for method in methods)
    _agree(*methods)
    assert [method.form for method in methods] == [None, None]
