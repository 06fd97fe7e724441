"""fp8 arithmetic, and models that are quantised while they load."""

import pytest
import torch
import torch.nn.functional as F

from engine.layers.linear import Linear
from engine.layers.quant.fp8 import FP8, FP8_PER_CHANNEL, dequantize, quantize_rows, quantize_weight
from engine.models.config.model import ModelConfig
from engine.models.loading.loader import fill_randomly, load_weights, quantize
from engine.models.registry import model_class


def test_rows_come_back_within_half_a_step():
    x = torch.randn(37, 80) * torch.logspace(-6, 4, 37).unsqueeze(1)
    stored, scale = quantize_rows(x)
    assert stored.dtype == FP8
    error = (dequantize(stored, scale, torch.float32) - x).abs()
    # e4m3 has 3 bits behind the point: half a step is 1/16 of a number, and of the smallest normal one below it
    assert (error <= x.abs() / 16 + scale.unsqueeze(1) * 2**-10).all()
    assert torch.equal(stored.float().abs().amax(1), torch.full((37,), 448.0))


def test_rows_of_zeros_stay_zeros():
    stored, scale = quantize_rows(torch.zeros(2, 16))
    assert torch.equal(dequantize(stored, scale, torch.float32), torch.zeros(2, 16))


def test_a_weight_in_chunks_equals_it_in_one(monkeypatch):
    weight = torch.randn(33, 48)
    monkeypatch.setattr("engine.layers.quant.fp8._CHUNK_ELEMENTS", 48 * 5)
    stored, scale = quantize_weight(weight)
    expected, expected_scale = quantize_rows(weight)
    assert torch.equal(stored.float(), expected.float())
    assert torch.equal(scale, expected_scale)


def filled(linear: Linear) -> Linear:
    linear.weight = torch.nn.Parameter(torch.randn(linear.weight.shape), requires_grad=False)
    if linear.bias is not None:
        linear.bias = torch.nn.Parameter(torch.randn(linear.bias.shape), requires_grad=False)
    linear.finalize()
    return linear


@pytest.mark.parametrize("rows", [1, 16, 17, 50])
def test_a_quantised_product_is_near_the_exact_one(rows):
    torch.manual_seed(0)
    linear = Linear(256, 96, bias=True)
    linear.use(FP8_PER_CHANNEL.linear)
    weight = torch.randn(96, 256)
    linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    linear.bias = torch.nn.Parameter(torch.randn(96), requires_grad=False)
    linear.finalize()
    linear.finalize()
    x = torch.randn(rows, 256)
    exact = F.linear(x, weight, linear.bias)
    error = (linear(x) - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.06
    assert linear.weight.dtype == FP8


def test_sides_the_fp8_units_do_not_take_keep_their_precision():
    linear = Linear(24, 32)
    quantize(linear, "fp8")
    assert filled(linear).weight.dtype == torch.float32
    assert linear(torch.ones(2, 24)).shape == (2, 32)


@pytest.mark.parametrize("shape", ["gqa", "tied"])
def test_a_model_quantises_while_it_loads(tiny_llama_dir, shape):
    model_dir = tiny_llama_dir(shape)
    config = ModelConfig.load(model_dir)
    exact, model = (model_class(config)(config, 64) for _ in range(2))
    assert all(p.is_meta for p in model.parameters())
    quantize(model, "fp8")
    with torch.inference_mode():
        load_weights(exact, model_dir)
        load_weights(model, model_dir)
    assert not any(p.is_meta for p in model.parameters())
    for block, original in zip(model.blocks, exact.blocks, strict=True):
        for pair in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            linear, reference = block.get_submodule(pair), original.get_submodule(pair)
            assert linear.weight.dtype == FP8
            back = dequantize(linear.weight, linear.scale, torch.float32)
            assert (back - reference.weight).norm() / reference.weight.norm() < 0.05
    assert torch.equal(model.lm_head.weight, exact.lm_head.weight)
    assert (model.lm_head.weight is model.embed_tokens.weight) == (shape == "tied")


def test_random_weights_reach_every_parameter(tiny_llama_dir):
    config = ModelConfig.load(tiny_llama_dir("tied"))
    models = [model_class(config)(config, 64) for _ in range(2)]
    for model in models:
        quantize(model, "fp8")
        with torch.inference_mode():
            fill_randomly(model, 3)
    for one, other in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(one.float(), other.float())
        assert one.float().abs().max() > 0
    assert models[0].norm.weight.eq(1).all()
    assert models[0].lm_head.weight.std() == pytest.approx(0.02, rel=0.1)
