"""Checkpoints that are quantised as they are published: exactly the numbers that they stand for."""

import json

import oracle
import pytest
import quantized_files as files
import torch
from safetensors.torch import load_file, save_file
from test_oracle import run

from engine.config import EngineConfig
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest
from engine.errors import ConfigError, ModelError
from engine.layers.linear import Linear
from engine.models.config.model import ModelConfig
from engine.models.loading.checkpoint import check_checkpoint
from engine.models.loading.loader import load_weights
from engine.models.loading.quantized import use_stored_formats
from engine.models.registry import empty_model
from engine.worker.startup.build import build_engine

WIDE = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 32, "initializer_range": 0.1, "num_hidden_layers": 1}  # ragged blocks of 128; groups of 32 and 64


def loaded(model_dir, dtype=torch.float32):
    model = empty_model(model_dir, dtype)
    use_stored_formats(model, ModelConfig.load(model_dir), model_dir, check_checkpoint(model_dir))
    with torch.inference_mode():
        load_weights(model, model_dir)
    return model


def linears(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear)}


@pytest.fixture(scope="module")
def written(tiny_llama_dir, tmp_path_factory):
    made = {}

    def make(name, **changes):
        if (name, *changes) not in made:
            config, writer = files.FORMATS[name]
            source = tiny_llama_dir("gqa", **WIDE, **changes)
            made[name, *changes] = files.save(source, tmp_path_factory.mktemp("q"), config, files.of_layers(writer))
        return made[name, *changes]

    return make


@pytest.mark.parametrize("name", sorted(files.FORMATS))
def test_weights_are_those_that_were_written(written, name):
    packed = written(name)
    ours, plain = loaded(packed), loaded(packed.parent / "plain")
    assert torch.equal(ours.embed_tokens.weight, plain.embed_tokens.weight)
    for module, linear in linears(ours).items():
        assert torch.equal(linear.weight, linears(plain)[module].weight), module


@pytest.mark.parametrize("name", ["block fp8", "ct w4a16 asymmetric", "gptq desc_act", "awq", "nvfp4"])
def test_products_in_bfloat16_are_those_of_the_rounded_weight(written, name):
    packed = written(name)
    ours, plain = loaded(packed, torch.bfloat16), loaded(packed.parent / "plain", torch.bfloat16)
    for module, linear in linears(ours).items():
        for rows in (1, 5):
            x = torch.randn(rows, linear.in_features, dtype=torch.bfloat16)
            assert torch.equal(linear(x), linears(plain)[module](x)), module


@pytest.mark.parametrize("name", ["block fp8", "ct w4a16 g32", "gptq", "awq", "nvfp4", "ct fp8 weights by tensor"])
def test_greedy_tokens_are_those_of_the_dequantised_model(written, name):
    packed = written(name)
    core = build_engine(EngineConfig(packed, device="cpu", dtype="float32", max_model_len=128))
    prompts = [tuple(range(5, 5 + n)) for n in (3, 17, 40)]
    requests = [EngineRequest(str(i), list(p), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
                for i, p in enumerate(prompts)]  # fmt: skip
    tokens, _ = run(core, requests)
    for i, prompt in enumerate(prompts):
        assert tokens[str(i)] == oracle.greedy(packed.parent / "plain", prompt, 16)


# -- schemes that differ within a model --------------------------------------------------------------------------------


def equal_models(packed):
    ours, plain = loaded(packed), loaded(packed.parent / "plain")
    for module, linear in linears(ours).items():
        assert torch.equal(linear.weight, linears(plain)[module].weight), module


def test_parts_of_a_fused_layer_may_differ(tiny_llama_dir, tmp_path):
    """q in int4, k as it was, v in int8, gate in fp8 and up in int4: rules by name, expression and class."""
    q4, v8, gate8 = files.pack_quantized(4, 32), files.pack_quantized(8, 32), files.float8("channel")
    config = files.compressed_tensors("mixed-precision", files.ints(4, 32))
    groups = config["config_groups"]
    groups["group_0"]["format"] = "pack-quantized"
    groups["v"] = {"targets": ["re:.*v_proj$"], "weights": files.ints(8, 32), "format": "pack-quantized"}
    gate = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    groups["gate"] = {"targets": ["model.layers.0.mlp.gate_proj"], "weights": gate, "format": "float-quantized"}
    config["ignore"] = ["lm_head", "re:.*self_attn\\.k_proj"]
    special = {"k_proj": None, "v_proj": v8, "gate_proj": gate8}

    def writer_of(module):
        return special.get(module.rpartition(".")[2], q4) if module.endswith("_proj") else None

    equal_models(files.save(tiny_llama_dir("gqa", **WIDE), tmp_path / "m", config, writer_of))


def test_dynamic_rules_of_gptq(tiny_llama_dir, tmp_path):
    rules = {"lm_head": {}, "-:.*attn.*": {}, "+:.*\\.down_proj": {"bits": 8, "group_size": 64}}
    config = files.gptq_config(4, 32, dynamic=rules)

    def writer_of(module):
        if "attn" in module or not module.endswith("_proj"):
            return None
        return files.gptq(8, 64) if "down" in module else files.gptq(4, 32)

    equal_models(files.save(tiny_llama_dir("gqa", **WIDE), tmp_path / "m", config, writer_of))


def test_a_module_that_is_plain_on_disk_is_plain_though_no_list_excepts_it(tiny_llama_dir, tmp_path):
    config, writer = files.FORMATS["block fp8"]
    equal_models(files.save(tiny_llama_dir("gqa", **WIDE), tmp_path / "m", config, files.of_layers(writer, but="down")))


def test_a_quantised_output_head(tiny_llama_dir, tmp_path):
    config, writer = files.gptq_config(4, 32, lm_head=True), files.gptq(4, 32)
    packed = files.save(tiny_llama_dir("gqa", **WIDE), tmp_path / "m", config,
                        lambda module: writer if module.endswith(("_proj", "lm_head")) else None)
    equal_models(packed)


def test_scales_of_a_quantised_cache_are_left_out(written, tmp_path, caplog):
    packed = changed(written("ct w4a16 g32"), tmp_path, lambda t: t | {
        "model.layers.0.self_attn.k_scale": torch.ones(1), "model.layers.0.self_attn.v_scale": torch.ones(1)})
    with caplog.at_level("INFO"):
        loaded(packed)
    assert "k_scale" in caplog.text


def with_biases(bias):
    """AutoGPTQ and AutoAWQ give layers without a bias one of zeros."""
    return lambda tensors: tensors | {f"{DOWN}.bias": bias}


@pytest.mark.parametrize("name", ["gptq", "gptq 8 bits", "awq"])
def test_biases_of_zeros_that_writers_add_are_left_out(written, tmp_path, name):
    packed = changed(written(name), tmp_path, with_biases(torch.zeros(192, dtype=torch.float16)))
    ours, before = loaded(packed), loaded(written(name))
    assert linears(ours)["layers.0.mlp.down_proj"].bias is None
    assert torch.equal(linears(ours)["layers.0.mlp.down_proj"].weight, linears(before)["layers.0.mlp.down_proj"].weight)


@pytest.mark.parametrize("name", sorted(name for name in files.FORMATS if name.startswith(("gptq", "awq"))))
def test_random_weights_are_some_that_the_format_allows(written, tmp_path, name):
    packed = changed(written(name), tmp_path)
    (packed / "model.safetensors").unlink()
    fixed = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "load_format": "dummy"}
    core = build_engine(EngineConfig(packed, **fixed))
    request = EngineRequest("0", [5, 6, 7], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(run(core, [request])[0]["0"]) == 4


# -- refusals ----------------------------------------------------------------------------------------------------------


def changed(packed, target, change=dict, **config):
    """A copy with other tensors or another configuration."""
    target = target / "changed"
    target.mkdir()
    for file in packed.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    save_file({k: v.contiguous() for k, v in change(load_file(packed / "model.safetensors")).items()},
              target / "model.safetensors")
    raw = json.loads((packed / "config.json").read_text())
    raw["quantization_config"] |= config
    (target / "config.json").write_text(json.dumps(raw))
    return target


DOWN = "model.layers.0.mlp.down_proj"


def without(name):
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


def also(**found):
    return lambda tensors: tensors | {f"{DOWN}.{k}": v for k, v in found.items()}


def nan_in(name):
    def change(tensors):
        tensors[name].view(-1)[3] = float("nan")
        return tensors

    return change


@pytest.mark.parametrize(("name", "change", "words"), [
    ("block fp8", without(f"{DOWN}.weight_scale_inv"), f"{DOWN}.weight_scale_inv"),
    ("block fp8", also(weight_scale=torch.ones(1)), f"{DOWN}.weight_scale"),
    ("block fp8", nan_in(f"{DOWN}.weight_scale_inv"), f"{DOWN}.weight_scale_inv is wrong.*NaN"),
    ("ct w4a16 g32", without(f"{DOWN}.weight_scale"), f"{DOWN}.weight_scale"),
    ("ct w4a16 g32", also(weight_zero_point=torch.ones(1, dtype=torch.int32)), f"{DOWN}.weight_zero_point"),
    ("ct w4a16 g32", also(weight_shape=torch.tensor([320, 192])), f"{DOWN}.weight_shape is wrong"),
    ("ct w4a16 g32", also(weight_packed=torch.ones(192, 40)), f"{DOWN}.weight_packed is F32.*I32"),
    ("ct w4a16 g_idx", also(weight_g_idx=torch.ones(320, dtype=torch.int32)), f"{DOWN}.weight_g_idx is wrong"),
    ("gptq", without(f"{DOWN}.qzeros"), f"{DOWN}.qzeros"),
    ("gptq", also(qzeros=torch.full((10, 24), 0x11111111, dtype=torch.int32)), f"{DOWN}.qzeros is wrong.*symmetric"),
    ("gptq", nan_in(f"{DOWN}.scales"), f"{DOWN}.scales is wrong"),
    ("gptq", with_biases(torch.zeros(320, dtype=torch.float16)), f"{DOWN}.bias has shape .320.*implies .192"),
    ("gptq", with_biases(torch.ones(192, dtype=torch.float16)), f"{DOWN}.bias is wrong.*no bias here"),
    ("ct w4a16 g32", with_biases(torch.zeros(192)), f"{DOWN}.bias"),
    ("awq", without(f"{DOWN}.qzeros"), f"{DOWN}.qzeros"),
    ("nvfp4", without(f"{DOWN}.weight_global_scale"), f"{DOWN}.weight_global_scale"),
    ("nvfp4", also(weight_global_scale=torch.zeros(1)), f"{DOWN}.weight_global_scale is wrong"),
    ("mxfp4", also(weight_scale=torch.full((192, 10), 255, dtype=torch.uint8)), f"{DOWN}.weight_scale is wrong"),
])  # fmt: skip
def test_wrong_tensors_are_refused_by_name(written, tmp_path, name, change, words):
    with pytest.raises(ModelError, match=words):
        loaded(changed(written(name), tmp_path, change))


def group(**weights):
    base = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": base | weights}}}


@pytest.mark.parametrize(("name", "config", "words"), [
    ("block fp8", {"weight_block_size": [64, 64]}, "weight_scale_inv has shape"),
    ("block fp8", {"weight_block_size": [128]}, "weight_block_size"),
    ("block fp8", {"weight_block_size": None}, "weight_scale"),
    ("block fp8", {"fmt": "e5m2"}, "e5m2"),
    ("block fp8", {"quant_method": "bitsandbytes"}, "bitsandbytes"),
    ("ct w4a16 g32", group(group_size=64), "weight_scale has shape"),
    ("ct w4a16 g32", group(group_size=24), "down_proj.*groups of 24|q_proj.*groups of 24"),
    ("ct w4a16 g32", group(group_size=0), "group_size 0"),
    ("ct w4a16 g32", group(num_bits=3), "config_groups.group_0.*num_bits 3"),
    ("ct w4a16 g32", group(num_bits=8), "weight_packed has shape"),
    ("ct w4a16 g32", group(type="float"), "config_groups.group_0.*type float"),
    ("ct w4a16 g32", group(strategy="tensor"), "strategy tensor"),
    ("ct w4a16 g32", group(dynamic=True), "config_groups.group_0"),
    ("ct w4a16 g32", {"format": "marlin-24"}, "marlin-24"),
    ("ct w4a16 g32", {"ignore": ["re:("]}, "regular expression"),
    ("ct w4a16 g32", {"ignore": "lm_head"}, "ignore"),
    ("ct w4a16 g32", {"config_groups": {}}, f"{DOWN}.weight is expected: this tensor is quantised"),
    ("gptq", {"group_size": 64}, "has shape"),
    ("gptq", {"bits": 3}, "3 bits"),
    ("gptq", {"bits": 8}, "has shape"),
    ("gptq", {"checkpoint_format": "marlin"}, "marlin"),
    ("gptq", {"quant_method": "awq", "version": "gemm"}, "down_proj.g_idx"),
    ("gptq", {"dynamic": {".*down_proj": {"bits": 5}}}, f"{DOWN}.*5 bits"),
    ("awq", {"quant_method": "gptq"}, "qweight has shape"),
    ("awq", {"version": "gemv"}, "gemv"),
    ("awq", {"bits": 8}, "8 bits"),
    ("awq", {"group_size": 128}, "groups of 128"),
    ("awq", {"modules_to_not_convert": ["down_proj"]}, f"{DOWN}.weight"),
    ("modelopt nvfp4", {"quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
])  # fmt: skip
def test_wrong_configurations_are_refused_by_name(written, tmp_path, name, config, words):
    with pytest.raises(ModelError, match=words):
        loaded(changed(written(name), tmp_path, **config))


def test_the_flag_may_repeat_what_the_checkpoint_says(written):
    packed, fixed = written("gptq"), {"device": "cpu", "dtype": "float32", "max_model_len": 64}
    build_engine(EngineConfig(packed, quantization="gptq", **fixed))
    with pytest.raises(ConfigError, match=r"quantised already .gptq"):
        build_engine(EngineConfig(packed, quantization="awq", **fixed))
    with pytest.raises(ConfigError, match="not quantised so"):
        build_engine(EngineConfig(packed.parent / "plain", quantization="gptq", **fixed))
