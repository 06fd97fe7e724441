"""Scales of an fp8 KV cache: from published checkpoints into attention layers."""

import json

import pytest
import quantized_files as files
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.layers.attention import Attention
from engine.models.config.model import ModelConfig
from engine.models.loading.checkpoint import check_checkpoint
from engine.models.loading.kv_scales import use_kv_scales
from engine.models.loading.loader import load_weights
from engine.models.loading.quantized import use_stored_formats
from engine.models.registry import empty_model

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
LAYERS = 2
SPELLINGS = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "older": ("k_proj.output_scale", "v_proj.output_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
}


@pytest.fixture
def write(tiny_llama_dir, tmp_path):
    """A checkpoint in int4 with these tensors beside its own, by name below a layer's attention."""

    def make(scales, scheme=None):
        config, writer = files.FORMATS["ct w4a16 g32"]
        packed = files.save(tiny_llama_dir("gqa"), tmp_path / "m", config, files.of_layers(writer))
        tensors = load_file(packed / "model.safetensors")
        for layer in range(LAYERS):
            for name, value in scales(layer).items():
                tensors[f"model.layers.{layer}.self_attn.{name}"] = value
        save_file(tensors, packed / "model.safetensors")
        raw = json.loads((packed / "config.json").read_text())
        raw["quantization_config"]["kv_cache_scheme"] = scheme
        (packed / "config.json").write_text(json.dumps(raw))
        return packed

    return make


def loaded(model_dir, *, is_fp8=True):
    model = empty_model(model_dir, torch.float32)
    tensors = check_checkpoint(model_dir)
    use_stored_formats(model, ModelConfig.load(model_dir), model_dir, tensors)
    use_kv_scales(model, tensors, is_fp8=is_fp8)
    with torch.inference_mode():
        load_weights(model, model_dir)
    return [(m.k_scale, m.v_scale) for m in model.modules() if isinstance(m, Attention)]


def numbers(names=SPELLINGS["compressed-tensors"], shape=(1,), dtype=torch.float32):
    def scales(layer):
        values = 0.25 + layer, 0.5 + layer
        return {name: torch.full(shape, value, dtype=dtype) for name, value in zip(names, values, strict=True)}

    return scales


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("scheme", [SCHEME, None])
def test_every_layer_gets_its_scales(write, spelling, scheme, caplog):
    packed = write(numbers(SPELLINGS[spelling]), scheme)
    with caplog.at_level("INFO"):
        assert loaded(packed) == [(0.25, 0.5), (1.25, 1.5)]
    assert "Not loaded" not in caplog.text


@pytest.mark.parametrize(("shape", "dtype"), [((), torch.bfloat16), ((1,), torch.float16)])
def test_scales_may_be_stored_in_16_bits(write, shape, dtype):
    assert loaded(write(numbers(shape=shape, dtype=dtype))) == [(0.25, 0.5), (1.25, 1.5)]


def test_a_cache_in_16_bits_is_not_scaled(write, caplog):
    packed = write(numbers(), SCHEME)
    with caplog.at_level("INFO"):
        assert loaded(packed, is_fp8=False) == [(1.0, 1.0)] * LAYERS
    assert "does not use them" in caplog.text
    assert "k_scale" in caplog.text


def test_without_scales_nothing_is_scaled(write):
    assert loaded(write(lambda layer: {})) == [(1.0, 1.0)] * LAYERS


def but(layer, **changes):
    """Scales of all layers, with changes in one; None leaves a scale out."""

    def scales(of):
        found = numbers()(of) | (changes if of == layer else {})
        return {name: value for name, value in found.items() if value is not None}

    return scales


@pytest.mark.parametrize(("scales", "scheme", "words"), [
    (lambda layer: {}, SCHEME, r"lacks model\.layers\.0\.self_attn\.k_scale"),
    (but(1, v_scale=None), None, r"lacks model\.layers\.1\.self_attn\.v_scale"),
    (but(1, k_scale=torch.ones(2)), SCHEME, r"layers\.1\.self_attn\.k_scale is wrong.*F32 of shape \[2\]"),
    (but(0, k_scale=torch.ones(1, dtype=torch.int32)), SCHEME, r"layers\.0\.self_attn\.k_scale is wrong.*I32"),
    (but(1, v_scale=torch.zeros(1)), None, r"layers\.1\.self_attn\.v_scale is wrong.*positive"),
    (but(1, v_scale=torch.full((1,), float("nan"))), None, r"v_scale is wrong.*positive"),
    (but(1, **{"k_proj.k_scale": torch.ones(1)}), None, r"twice"),
    (numbers(), SCHEME | {"type": "int"}, r"kv_cache_scheme"),
    (numbers(), SCHEME | {"dynamic": True}, r"kv_cache_scheme"),
    (numbers(), SCHEME | {"strategy": "attn_head"}, r"kv_cache_scheme"),
])  # fmt: skip
def test_wrong_scales_are_refused_by_name(write, scales, scheme, words):
    with pytest.raises(ModelError, match=words):
        loaded(write(scales, scheme))


def test_a_scale_of_a_layer_that_is_not_there_is_refused_by_name(write):
    packed = write(numbers())
    tensors = load_file(packed / "model.safetensors")
    save_file(tensors | {"model.layers.7.self_attn.k_scale": torch.ones(1)}, packed / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.7\.self_attn\.k_scale"):
        loaded(packed)
