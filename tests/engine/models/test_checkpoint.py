"""Damaged model directories are named before anything is allocated."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.models.config.model import ModelConfig
from engine.models.loading.checkpoint import check_checkpoint
from engine.worker.startup.build import build_engine


@pytest.fixture
def model(tiny_llama_dir, tmp_path):
    return shutil.copytree(tiny_llama_dir("gqa"), tmp_path / "model")


def build(model):
    return build_engine(EngineConfig(model, device="cpu", kv_cache_memory_bytes=4 << 20))


def rewrite(model, change):
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")


def test_a_sound_model_passes(model):
    assert "model.norm.weight" in check_checkpoint(model)
    build(model)


def truncate(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def pad(model):
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"extra")


def huge_header(model):
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")


def wild_offsets(model):
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**50]}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 16)


def index_names_missing_shard(model):
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model-00002.safetensors"}}))


def index_escapes(model):
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../evil.safetensors"}}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda m: (m / "config.json").unlink(), "config.json does not exist"),
        (lambda m: (m / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda m: (m / "config.json").write_text("[]"), "JSON object"),
        (lambda m: (m / "model.safetensors").unlink(), "no \\*.safetensors"),
        (lambda m: (m / "model.safetensors").write_bytes(b""), "cut short"),
        (truncate, "truncated"),
        (pad, "truncated or padded"),
        (huge_header, "not a safetensors file"),
        (wild_offsets, "corrupt"),
        (index_names_missing_shard, "model-00002.safetensors is missing"),
        (index_escapes, "outside the model directory"),
    ],
)
def test_damage_is_named(model, damage, words):
    damage(model)
    with pytest.raises(ModelError, match=words):
        check_checkpoint(model)


def set_norm(tensors, value):
    tensors["model.norm.weight"] = value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks tensor model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update(surprise=torch.zeros(2)), "holds tensor surprise"),
        (lambda t: set_norm(t, torch.zeros(63)), r"model.norm.weight has shape \[63\]"),
    ],
)
def test_tensors_must_match_the_architecture(model, change, words):
    rewrite(model, change)
    with pytest.raises(ModelError, match=words):
        build(model)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("architectures", ["EvilForCausalLM"], "EvilForCausalLM"),
        ("architectures", [], "architectures"),
        ("auto_map", {"AutoModel": "code.py"}, "auto_map"),
        ("hidden_size", "64", "hidden_size"),
        ("hidden_size", -1, "hidden_size"),
        ("num_key_value_heads", 3, "num_key_value_heads"),
        ("hidden_act", "relu", "hidden_act"),
        ("rope_parameters", {"rope_type": "warp", "rope_theta": 1e4}, "warp"),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4}, "factor"),
        ("dtype", "int3", "int3"),
        ("quantization_config", "four bits", "quantization_config"),
        ("eos_token_id", "two", "eos_token_id"),
    ],
)
def test_config_fields_are_refused_by_name(model, field, value, words):
    config = json.loads((model / "config.json").read_text())
    config[field] = value
    with pytest.raises(ModelError, match=words):
        build_engine_or_parse(config)


def build_engine_or_parse(config):
    from engine.models.registry import model_class

    return model_class(ModelConfig.parse(config))
