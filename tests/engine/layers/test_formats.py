"""The format of a published quantised checkpoint is one more object: here int8 weights with a scale per output."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from engine.errors import ModelError
from engine.layers.linear import Linear
from engine.layers.quant.base import Gemm, LinearMethod, Tensors
from engine.layers.weight_memory import empty_parameter
from engine.models.config.model import ModelConfig
from engine.models.loading.loader import load_weights
from engine.models.registry import model_class


def multiply(layer, x):
    return F.linear(x, layer.weight * layer.scale, layer.bias)


class Int8(LinearMethod):
    def create(self, layer) -> None:
        layer.weight = empty_parameter(layer.out_features, layer.in_features, dtype=torch.int8)
        layer.scale = empty_parameter(layer.out_features, 1)

    def tensors(self, layer, outputs: slice) -> Tensors:
        found = {"weight_packed": layer.weight[outputs], "weight_scale": layer.scale[outputs]}
        return found if layer.bias is None else {**found, "bias": layer.bias[outputs]}

    def reorder(self, layer, index: torch.Tensor) -> None:
        layer.weight = nn.Parameter(layer.weight[index], requires_grad=False)
        layer.scale = nn.Parameter(layer.scale[index], requires_grad=False)

    def finalize(self, layer, *, keep_weight: bool) -> None:
        layer.gemm = Gemm(multiply)


def empty(model_dir, *, int8: bool):
    config = ModelConfig.load(model_dir)
    model = model_class(config)(config, 64)
    if int8:
        for module in model.modules():
            if isinstance(module, Linear) and module.quantizable:
                module.use(Int8())
    return model


@pytest.fixture(params=["gqa", "biased"])
def checkpoints(request, tiny_llama_dir, tmp_path):
    """The same weights twice: in int8, and as the numbers that int8 and scale stand for."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for directory in (plain, packed):
        shutil.copytree(tiny_llama_dir(request.param), directory)
    files: dict[str, dict[str, torch.Tensor]] = {"plain": {}, "packed": {}}
    for name, weight in load_file(plain / "model.safetensors").items():
        files["plain"][name] = files["packed"][name] = weight
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            stored = (weight / scale).round().to(torch.int8)
            del files["packed"][name]
            stem = name.removesuffix("weight")
            files["packed"] |= {f"{stem}weight_packed": stored, f"{stem}weight_scale": scale}
            files["plain"][name] = stored * scale
    save_file(files["plain"], plain / "model.safetensors")
    save_file(files["packed"], packed / "model.safetensors")
    return plain, packed, files["packed"]


def test_a_model_asks_each_layers_format_for_the_names_shapes_and_dtypes_of_its_tensors(checkpoints):
    _, packed, files = checkpoints
    wanted = empty(packed, int8=True).weights()
    assert {n: tuple(t.shape) for n, t in wanted.items()} == {n: tuple(t.shape) for n, t in files.items()}
    assert {n for n, t in wanted.items() if t.dtype == torch.int8} == {n for n in files if n.endswith("_packed")}


def test_a_quantised_checkpoint_loads_into_fused_layers_and_multiplies_by_its_own_method(checkpoints):
    plain, packed, _ = checkpoints
    exact, model = empty(plain, int8=False), empty(packed, int8=True)
    with torch.inference_mode():
        load_weights(exact, plain)
        load_weights(model, packed)
    linears = [name for name, module in model.named_modules() if isinstance(module, Linear) and name != "lm_head"]
    assert len(linears) == 2 * 4, "qkv, o, gate_up, down"
    for name in linears:
        layer, reference = model.get_submodule(name), exact.get_submodule(name)
        assert layer.weight.dtype == torch.int8
        x = torch.randn(3, layer.in_features)
        torch.testing.assert_close(layer(x), reference(x))


def test_quantised_bits_are_never_converted(checkpoints):
    """Copied into int8, 0.7 would silently become 0."""
    _, packed, files = checkpoints
    name = "model.layers.0.mlp.down_proj.weight_packed"
    save_file({**files, name: files[name].float()}, packed / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name} is F32 in the checkpoint; its quantisation format stores I8"):
        load_weights(empty(packed, int8=True), packed)


def test_a_scale_that_is_missing_is_named(checkpoints):
    _, packed, files = checkpoints
    name = "model.layers.1.self_attn.k_proj.weight_scale"
    save_file({n: t for n, t in files.items() if n != name}, packed / "model.safetensors")
    with pytest.raises(ModelError, match=name):
        load_weights(empty(packed, int8=True), packed)
