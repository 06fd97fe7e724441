"""Layers of quantised checkpoints as a GPU multiplies them, in Triton's interpreter: the weight that a CPU has."""

import pytest
import quantized_files as files
import torch
from packed_layers import filled, load, part
from torch import nn

from engine.kernels.moe import experts as moe_experts
from engine.kernels.moe import reference as moe_reference
from engine.layers.linear import Linear
from engine.layers.moe import RoutedExperts
from engine.layers.quant import stored
from engine.layers.quant.awq import Awq
from engine.layers.quant.float8 import Float8
from engine.layers.quant.gptq import Gptq
from engine.layers.quant.integers import PackQuantized
from engine.layers.quant.stored import StoredLinear

OUT, INNER = 32, 64


def made(kinds, *, order=None, bias=False):
    """A fused layer with a matrix of each kind, and the matrix that it stands for."""
    torch.manual_seed(0)
    layer, parts, tensors, numbers = Linear(INNER, OUT * len(kinds), bias=bias), [], [], []
    for i, (form, writer) in enumerate(kinds):
        weight = torch.randn(OUT, INNER)
        found, plain = ({"weight": weight}, weight.numpy()) if form is None else writer(weight.numpy())
        parts.append(part(i, OUT, form, found))
        tensors.append(found)
        numbers.append(torch.tensor(plain.copy()))
    method = StoredLinear(parts, INNER, torch.float32)
    load(layer, method, tensors)
    if bias:
        layer.bias = nn.Parameter(torch.randn(layer.out_features), requires_grad=False)
    layer.order = order
    stored.use_packed(layer, method._parts.take(layer), method._parts.inputs)
    whole = torch.cat(numbers)
    return layer, whole if order is None else whole[order]


INT4 = PackQuantized(4, 32, True), files.pack_quantized(4, 32)
ZERO = PackQuantized(4, 32, False), files.pack_quantized(4, 32, symmetric=False)
INT8 = PackQuantized(8, 32, True), files.pack_quantized(8, 32)
SORTED = Gptq(4, 32, True, 1), files.gptq(4, 32, desc_act=True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kinds", "pieces"), [
    ([INT4], 1), ([INT4, INT4, ZERO], 1), ([INT4, (None, None), INT8], 3), ([INT8, INT4], 2), ([SORTED, INT4], 2),
])  # fmt: skip
@pytest.mark.parametrize("rows", [1, 70])
def test_fused_layers(kinds, pieces, rows, bias):
    layer, weight = made(kinds, bias=bias)
    assert len(layer.packed.parts) == pieces
    assert not [name for name in layer._parameters if name.startswith("part")]
    x = torch.randn(rows, INNER)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, layer.bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kinds", [[INT4, INT4], [INT4, INT8]])
def test_outputs_in_another_order(kinds):
    layer, weight = made(kinds, order=torch.randperm(2 * OUT))
    x = torch.randn(3, INNER)
    torch.testing.assert_close(layer(x), x @ weight.t(), rtol=1e-4, atol=1e-4)


# -- experts -----------------------------------------------------------------------------------------------------------

NUM_EXPERTS, HIDDEN, WIDTH = 4, 320, 192
BLOCKS = Float8("block", (128, 128), "weight_scale_inv"), files.float8("block", "weight_scale_inv")


@pytest.mark.parametrize("kind", [
    BLOCKS, (PackQuantized(4, 32, True), files.pack_quantized(4, 32)), (Gptq(4, 64, True, 1), files.gptq(4, 64)),
    (PackQuantized(4, 32, False), files.pack_quantized(4, 32, symmetric=False)),
    (Gptq(4, 64, False, 1), files.gptq(4, 64, symmetric=False)), (Awq(64), files.awq(64)),
], ids=["blocks", "int4", "gptq", "int4-zeros", "gptq-zeros", "awq"])  # fmt: skip
@pytest.mark.parametrize("tokens", [2, 9])
def test_experts_stay_packed(kind, tokens):
    torch.manual_seed(0)
    experts = RoutedExperts(HIDDEN, WIDTH, NUM_EXPERTS)
    plain = filled(experts.gate_up_proj, *kind, 2), filled(experts.down_proj, *kind, 1)
    x, routing = torch.randn(tokens, HIDDEN).half(), moe_reference.choose_experts(torch.randn(tokens, NUM_EXPERTS), 2)
    has_zeros = experts.zeros != (None, None)  # they keep activations in 16 bits, whatever the caller allows
    ours = moe_experts.routed_experts(x, *routing, *experts.stacks, zeros=experts.zeros, fp8_activations=has_zeros)
    torch.testing.assert_close(ours, moe_reference.routed_experts(x, *routing, *plain), rtol=1e-2, atol=5e-3)
