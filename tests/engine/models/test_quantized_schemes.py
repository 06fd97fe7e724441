"""Groups of 128, activations that are rounded too, numbers packed another way round, and quantised embeddings."""

import json

import pytest
import quantized_files as files
import torch
from test_quantized_checkpoints import DOWN, changed, linears, loaded

from engine.errors import ModelError
from engine.kernels.gemm import cpu_int8
from engine.kernels.gemm.cpu_int8 import RoundedInt8Weight, SplitInt8Weight
from engine.layers.quant.stored import round_rows

WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 32, "initializer_range": 0.1, "num_hidden_layers": 1}  # fmt: skip


def with_inputs(writer, **more):
    """A writer that adds what published checkpoints with fixed scales of activations have beside each weight."""

    def write(weight):
        stored, numbers = writer(weight)
        return stored | {name: tensor.clone() for name, tensor in more.items()}, numbers

    return write


STATIC_FP8 = files.FP8_INPUTS | {"strategy": "tensor", "dynamic": False}
STATIC_INT8 = files.INT8_INPUTS | {"strategy": "tensor", "dynamic": False}
FP8 = {"num_bits": 8, "type": "float"}
G128 = {
    "ct w4a16": (files.compressed_tensors("pack-quantized", files.ints(4, 128)), files.pack_quantized(4, 128)),
    "ct w4a16 asymmetric": (files.compressed_tensors("pack-quantized", files.ints(4, 128, symmetric=False)),
                            files.pack_quantized(4, 128, symmetric=False)),
    "ct w8a16": (files.compressed_tensors("pack-quantized", files.ints(8, 128)), files.pack_quantized(8, 128)),
    "gptq v1": (files.gptq_config(4, 128), files.gptq(4, 128)),
    "gptq v2 asymmetric": (files.gptq_config(4, 128, sym=False, checkpoint_format="gptq_v2"),
                           files.gptq(4, 128, symmetric=False, v2=True)),
    "gptq desc_act": (files.gptq_config(4, 128, desc_act=True), files.gptq(4, 128, desc_act=True)),
    "gptq 8 bits": (files.gptq_config(8, 128), files.gptq(8, 128)),
    "awq": (files.awq_config(128), files.awq(128)),
}  # fmt: skip
# name -> (configuration, writer, what activations are rounded to)
ROUNDED = {
    "ct fp8 dynamic": (files.compressed_tensors("float-quantized", FP8 | {"strategy": "channel"}, files.FP8_INPUTS),
                       files.float8("channel"), "fp8"),
    "ct fp8 static": (files.compressed_tensors("float-quantized", FP8 | {"strategy": "tensor"}, STATIC_FP8),
                      with_inputs(files.float8("tensor"), input_scale=torch.tensor([0.03])), "fp8"),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
                     with_inputs(files.float8("tensor"), input_scale=torch.tensor(0.03)), "fp8"),
    "ct w8a8": (files.compressed_tensors("int-quantized", files.ints(8, 0), files.INT8_INPUTS), files.int8(), "int8"),
    "ct w8a8 static": (files.compressed_tensors("int-quantized", files.ints(8, 0), STATIC_INT8),
                       with_inputs(files.int8(), input_scale=torch.tensor([0.03])), "int8"),
}  # fmt: skip


BY_CHANNEL = {
    "ct w8a16 by channel": (files.compressed_tensors("pack-quantized", files.ints(8, 0)), files.pack_quantized(8, 0)),
    "gptq 8 bits by channel": (files.gptq_config(8, -1), files.gptq(8, 0)),
}


@pytest.fixture(scope="module")
def written(tiny_llama_dir, tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            config, writer = (G128 | ROUNDED | BY_CHANNEL)[name][:2]
            source = tiny_llama_dir("gqa", **WIDE)
            made[name] = files.save(source, tmp_path_factory.mktemp("q"), config, files.of_layers(writer))
        return made[name]

    return make


@pytest.mark.parametrize("name", G128 | ROUNDED | BY_CHANNEL)
def test_weights_are_those_that_were_written(written, name):
    packed = written(name)
    plain = linears(loaded(packed.parent / "plain"))
    for module, linear in linears(loaded(packed)).items():
        assert torch.equal(linear.weight, plain[module].weight), module


@pytest.mark.parametrize("name", ROUNDED)
def test_products_are_those_of_the_rounded_activations(written, name):
    """With a scale for each token, whether the checkpoint has a fixed one or not."""
    packed = written(name)
    plain = linears(loaded(packed.parent / "plain"))
    for module, linear in linears(loaded(packed)).items():
        x = torch.randn(5, linear.in_features)
        if module == "lm_head":
            assert torch.equal(linear(x), plain[module](x))
            continue
        assert torch.equal(linear(x), plain[module](round_rows(x, ROUNDED[name][2]))), module
        assert not torch.equal(linear(x), plain[module](x)), module


@pytest.mark.skipif(not cpu_int8.is_exact(), reason="this CPU does not multiply bytes exactly")
@pytest.mark.parametrize(("name", "kind"), [
    ("ct w8a8", RoundedInt8Weight), ("ct w8a8 static", RoundedInt8Weight), ("ct w8a16 by channel", SplitInt8Weight),
    ("gptq 8 bits by channel", SplitInt8Weight),
])  # fmt: skip
def test_a_cpu_that_multiplies_bytes_keeps_int8(written, name, kind):
    """In a 16-bit model. Sums are exact; what differs is what float32 rounds and, of W8A16, half a low."""
    packed = written(name)
    plain = linears(loaded(packed.parent / "plain"))
    for module, linear in linears(loaded(packed, torch.bfloat16)).items():
        if module == "lm_head":
            continue
        assert type(linear.packed) is kind
        assert linear.weight.numel() == 0
        assert linear.packed_bytes < 1.1 * plain[module].in_features * plain[module].out_features
        x = torch.randn(5, linear.in_features)
        rounded = round_rows(x, "int8" if kind is RoundedInt8Weight else None)
        expected = rounded.double() @ plain[module].weight.double().T
        slack = 3e-6 if kind is RoundedInt8Weight else 6e-5
        assert ((linear(x) - expected).norm(dim=1) < slack * expected.norm(dim=1)).all(), module
        assert torch.equal(linear(x.bfloat16())[:2], linear(x[:2].bfloat16()))


@pytest.mark.parametrize("name", ["ct fp8 static", "ct w8a8 static"])
def test_a_scale_of_activations_that_is_no_single_number_is_refused(written, tmp_path, name):
    packed = changed(written(name), tmp_path, lambda t: t | {f"{DOWN}.input_scale": torch.ones(5)})
    with pytest.raises(ModelError, match=rf"{DOWN}\.input_scale has shape"):
        loaded(packed)


# -- ModelOpt ----------------------------------------------------------------------------------------------------------


def in_a_file_of_its_own(packed, quantization):
    """As older exports of ModelOpt: config.json says nothing, hf_quant_config.json does."""
    raw = json.loads((packed / "config.json").read_text())
    del raw["quantization_config"]
    (packed / "config.json").write_text(json.dumps(raw))
    whole = {"producer": {"name": "modelopt", "version": "0.39"}, "quantization": quantization}
    (packed / "hf_quant_config.json").write_text(json.dumps(whole))


def modelopt_writer(module):
    if module.endswith(("q_proj", "k_proj", "v_proj")):
        return ROUNDED["modelopt fp8"][1]
    return files.float4("modelopt") if module.endswith(("gate_proj", "up_proj", "down_proj")) else None


MIXED = {
    f"model.layers.0.{module}": {"quant_algo": "FP8"} if "attn" in module else {"quant_algo": "NVFP4", "group_size": 16}
    for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj",
                   "mlp.down_proj")
}  # fmt: skip


@pytest.mark.parametrize("layers", [MIXED, {**MIXED, DOWN: {"quant_algo": "W4A8_AWQ"}}], ids=["known", "unknown"])
def test_attention_in_fp8_and_the_rest_in_nvfp4(tiny_llama_dir, tmp_path, layers):
    packed = files.save(tiny_llama_dir("gqa", **WIDE), tmp_path / "m", {}, modelopt_writer)
    in_a_file_of_its_own(packed, {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None,
                                  "quantized_layers": layers})  # fmt: skip
    if layers is not MIXED:
        with pytest.raises(ModelError, match=rf"{DOWN}.*W4A8_AWQ"):
            loaded(packed)
        return
    plain = linears(loaded(packed.parent / "plain"))
    for module, linear in linears(loaded(packed)).items():
        assert torch.equal(linear.weight, plain[module].weight), module


def test_modules_that_a_pattern_excludes(tiny_llama_dir, tmp_path):
    def writer(module):
        return files.float4("modelopt") if "mlp" in module else None

    packed = files.save(tiny_llama_dir("gqa", **WIDE), tmp_path / "m", {}, writer)
    in_a_file_of_its_own(packed, {"quant_algo": "NVFP4", "group_size": 16,
                                  "exclude_modules": ["lm_head", "model.layers.*.self_attn*"]})  # fmt: skip
    plain = linears(loaded(packed.parent / "plain"))
    for module, linear in linears(loaded(packed)).items():
        assert torch.equal(linear.weight, plain[module].weight), module


# -- packed another way round ------------------------------------------------------------------------------------------


def turned(name):
    """The tensor transposed: packed along the other side."""
    return lambda tensors: tensors | {f"{DOWN}.{name}": tensors[f"{DOWN}.{name}"].T.contiguous()}


def repacked(name, bits=4):
    """A matrix of packed words, with the same numbers packed along the other side."""

    def change(tensors):
        words = tensors[f"{DOWN}.{name}"].numpy().view("uint32")
        each = 32 // bits
        codes = torch.tensor([[(int(word) >> (bits * at)) & (2**bits - 1) for word in row for at in range(each)]
                              for row in words])  # fmt: skip
        packed = files.words(codes.T.numpy(), bits).T.copy()
        return tensors | {f"{DOWN}.{name}": torch.tensor(packed)}

    return change


@pytest.mark.parametrize(("name", "change", "words"), [
    ("ct w4a16", turned("weight_packed"), "weight_packed has shape"),
    ("ct w4a16", repacked("weight_packed"), "weight_packed has shape"),
    ("ct w4a16", turned("weight_scale"), "weight_scale has shape"),
    ("ct w4a16 asymmetric", turned("weight_zero_point"), "weight_zero_point has shape"),
    ("ct w8a16", repacked("weight_packed", 8), "weight_packed has shape"),
    ("gptq v1", turned("qweight"), "qweight has shape"),
    ("gptq v1", repacked("qweight"), "qweight has shape"),
    ("gptq v2 asymmetric", turned("qzeros"), "qzeros has shape"),
    ("gptq v2 asymmetric", turned("scales"), "scales has shape"),
    ("awq", turned("qweight"), "qweight has shape"),
    ("awq", repacked("qweight"), "qweight has shape"),
    ("awq", turned("qzeros"), "qzeros has shape"),
    ("ct fp8 dynamic", turned("weight"), "weight has shape"),
    ("ct w8a8", turned("weight"), "weight has shape"),
])  # fmt: skip
def test_weights_that_are_packed_the_other_way_round_are_refused(written, tmp_path, name, change, words):
    with pytest.raises(ModelError, match=rf"{DOWN}\.{words}"):
        loaded(changed(written(name), tmp_path, change))


@pytest.mark.parametrize(("name", "as_another", "words"), [
    ("gptq v1", files.awq_config(128), "g_idx"),
    ("awq", files.gptq_config(4, 128), "qweight has shape"),
    ("ct w4a16", files.gptq_config(4, 128), "weight_packed|qweight"),
    ("ct w4a16 asymmetric", files.compressed_tensors("pack-quantized", files.ints(4, 128)), "weight_zero_point"),
    ("ct fp8 dynamic", files.fp8_config(), "weight_scale"),
    ("ct w8a8", files.compressed_tensors("float-quantized", FP8 | {"strategy": "channel"}), "I8"),
    ("ct fp8 dynamic", files.compressed_tensors("int-quantized", files.ints(8, 0)), "F8_E4M3"),
])  # fmt: skip
def test_a_format_under_another_ones_name_is_refused(written, tmp_path, name, as_another, words):
    config = {"quant_method": "", "format": None, "config_groups": {}} | as_another
    with pytest.raises(ModelError, match=words):
        loaded(changed(written(name), tmp_path, **config))


# -- embeddings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ct w4a16", "gptq v1"])
def test_a_quantised_embedding_is_refused_by_name(tiny_llama_dir, tmp_path, name):
    """As Gemma 4's checkpoints for phones have."""
    config, writer = G128[name]
    packed = files.save(
        tiny_llama_dir("gqa", **WIDE), tmp_path / "m", config,
        lambda module: writer if module.endswith(("_proj", "embed_tokens")) else None,
        change=lambda tensors: {name: tensor + 0.01 for name, tensor in tensors.items()},  # a row of zeros has no scale
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"holds model\.embed_tokens\.\w+, but model\.embed_tokens\.weight is exp"):
        loaded(packed)
