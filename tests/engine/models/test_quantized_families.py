"""Quantised experts, recurrent layers and Gemma's layers: every number as it was written; names as published."""

import json
from pathlib import Path

import pytest
import quantized_files as files
import torch
from test_gemma import SHAPES as GEMMAS
from test_gemma import save_tiny_gemma
from test_quantized_checkpoints import loaded
from test_qwen3_5 import qwen_dir  # noqa: F401 - a fixture

from engine.config import EngineConfig
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest
from engine.errors import ModelError
from engine.layers.linear import Linear
from engine.layers.moe import ExpertLinear
from engine.models.config.model import ModelConfig
from engine.models.loading.quantized import use_stored_formats
from engine.models.registry import empty_model
from engine.plan import PlannedGpu, plan_engine, weight_bytes
from engine.worker.startup.build import build_engine

_CARD = PlannedGpu("H200", 150 << 30, (9, 0))
BENCH = Path(__file__).parents[3] / "engine/bench/configs"
FORMATS = {
    "block fp8": files.FORMATS["block fp8"],
    "ct w4a16": (files.compressed_tensors("pack-quantized", files.ints(4, 0)), files.pack_quantized(4, 0)),
    "gptq": (files.gptq_config(4, 16), files.gptq(4, 16)),
    "awq": (files.awq_config(16), files.awq(16)),
    "nvfp4": files.FORMATS["nvfp4"],
    "mxfp4": files.FORMATS["mxfp4"],
    "ct w8a16": (files.compressed_tensors("pack-quantized", files.ints(8, 16)), files.pack_quantized(8, 16)),
    "ct w4a16 g16 asymmetric": (files.compressed_tensors("pack-quantized", files.ints(4, 16, symmetric=False)),
                                files.pack_quantized(4, 16, symmetric=False)),
    "ct fp8 by channel": files.FORMATS["ct fp8 weights by channel"],
    "ct int8": files.FORMATS["ct int8"],
    "gptq desc_act": (files.gptq_config(4, 16, desc_act=True), files.gptq(4, 16, desc_act=True)),
}


def each_expert_alone(tensors):
    """As quantisers write experts: a matrix for each."""
    found = {}
    for name, tensor in tensors.items():
        place, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj") or not place.endswith("experts"):
            found[name] = tensor
            continue
        for i, expert in enumerate(tensor):
            parts = {"down_proj": expert}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            found |= {f"{place}.{i}.{part}.weight": matrix.contiguous() for part, matrix in parts.items()}
    return found


QUANTIZED = ("_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz", "w1", "w2", "w3")


def save(source, directory, name):
    config, writer = FORMATS[name]
    config = config | {"ignore": ["re:.*(router|in_proj_b|in_proj_a|lm_head|per_layer).*"]}

    def writer_of(module):
        kept = any(part in module for part in ("router", "per_layer", "in_proj_b", "in_proj_a"))
        return writer if module.endswith(QUANTIZED) and not kept else None

    return files.save(source, directory, config, writer_of, change=each_expert_alone)


def check(packed):
    ours, plain = loaded(packed), loaded(packed.parent / "plain")
    others, quantized = dict(plain.named_modules()), 0
    for name, module in ours.named_modules():
        if isinstance(module, Linear | ExpertLinear):
            quantized += module.method is not others[name].method
            assert torch.equal(module.weight, others[name].weight), name
    assert quantized > 4
    prompt = [5, 9, 7, 11, 80, 41]
    tokens = []
    for directory in (packed, packed.parent / "plain"):
        core = build_engine(EngineConfig(directory, device="cpu", dtype="float32", max_model_len=64))
        core.add_request(EngineRequest("r", prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)))
        tokens.append([token for _ in range(30) for out in core.step() for token in out.new_token_ids])
    assert len(tokens[0]) == 8
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "mxfp4"])  # no groups of 32 fit these matrices
def test_qwen3_5_with_experts(qwen_dir, tmp_path, name):  # noqa: F811
    check(save(qwen_dir("experts"), tmp_path / "m", name))


@pytest.mark.parametrize(("shape", "name"), [("multimodal", "block fp8"), ("next", "block fp8"), ("dense", "ct w4a16")])
def test_qwen3_5_layouts(qwen_dir, tmp_path, shape, name):  # noqa: F811
    check(save(qwen_dir(shape), tmp_path / "m", name))


@pytest.mark.parametrize(
    ("shape", "name"), [("gemma4_26b", "ct w4a16"), ("gemma4_26b", "block fp8"), ("gemma4_e2b", "ct w4a16"),
                        ("gemma4_26b", "mxfp4"), ("gemma4_26b", "gptq"), ("gemma4_26b", "awq")]
)
def test_gemma4(tmp_path, shape, name):
    (tmp_path / "source").mkdir()
    save_tiny_gemma(tmp_path / "source", GEMMAS[shape])
    check(save(tmp_path / "source", tmp_path / "m", name))


@pytest.mark.parametrize("shape", ["gemma4_e2b", "gemma4_e4b", "gemma4_12b", "gemma4_26b", "gemma4_31b"])
def test_gemma4_after_quantisation_aware_training(tmp_path, shape):
    """As `*-it-qat-w4a16-ct`: groups (of 32; here of 16), and everything but the decoder's layers in 16 bits."""
    (tmp_path / "source").mkdir()
    save_tiny_gemma(tmp_path / "source", GEMMAS[shape])
    config = files.compressed_tensors("pack-quantized", files.ints(4, 16), ignore=[
        "lm_head", "re:.*embed_tokens.*", "re:.*vision_tower.*", "re:.*audio_tower.*", "re:.*embed_(vision|audio).*",
        "re:.*per_layer.*", "re:.*router.*"])  # fmt: skip
    writer = files.pack_quantized(4, 16)
    check(files.save(tmp_path / "source", tmp_path / "m", config, lambda module: writer if module.endswith("_proj")
                     and not any(part in module for part in ("router", "per_layer")) else None,
                     change=each_expert_alone))  # fmt: skip


def test_stacked_quantised_experts_are_refused(qwen_dir, tmp_path):  # noqa: F811
    from safetensors.torch import load_file, save_file

    packed = save(qwen_dir("experts"), tmp_path / "m", "block fp8")
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.0.mlp.experts"
    for kind in ("gate_proj", "up_proj", "down_proj"):
        each = [tensors.pop(f"{name}.{i}.{kind}.weight") for i in range(6)]
        for i in range(6):
            tensors.pop(f"{name}.{i}.{kind}.weight_scale_inv")
        if kind == "down_proj":
            tensors[f"{name}.down_proj"] = torch.stack([e.view(torch.uint8) for e in each]).view(torch.float8_e4m3fn)
    tensors[f"{name}.gate_up_proj"] = torch.zeros(6, 64, 64, dtype=torch.float8_e4m3fn)
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(ModelError, match=r"experts\.gate_up_proj"):
        loaded(packed)


# -- published checkpoints ---------------------------------------------------------------------------------------------


def published(tmp_path, name, quantization, **changes):
    raw = json.loads((BENCH / name / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))
    model = empty_model(tmp_path)
    use_stored_formats(model, ModelConfig.load(tmp_path), tmp_path, None)
    return model


RULES = {"lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {}, "-:.*shared_expert.*": {},
         "-:.*mtp.*": {}, "-:.*visual.*": {}}  # fmt: skip


@pytest.mark.parametrize(("quantization", "tensors"), [
    # text of 64 196 and of 124 611 tensors: 40 layers, 10 with attention, 256 experts; neither vision nor drafter
    (files.fp8_config(), 693 - 40 * 2 + 40 * 256 * 3 * 2 + 10 * 4 + 30 * 3 + 40 * 3),
    (files.gptq_config(4, 128, dynamic=RULES), 693 - 40 * 2 + 40 * 256 * 3 * 4),
])  # fmt: skip
def test_the_names_of_qwen3_6_35b(tmp_path, quantization, tensors):
    names = published(tmp_path, "qwen3.6-35b-a3b", quantization).weights()
    assert len(names) == tensors
    main = "qweight" if quantization["quant_method"] == "gptq" else "weight_scale_inv"
    assert f"model.layers.3.mlp.experts.17.up_proj.{main}" in names


def test_a_quantised_model_is_planned_at_its_size(tmp_path):
    """Bits a weight: the numbers and their scales."""
    bf16 = weight_bytes(EngineConfig(BENCH / "qwen3-8b"))[0]
    model = published(tmp_path, "qwen3-8b", files.gptq_config(4, 128))
    linear = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, Linear) and m.quantizable)
    planned = weight_bytes(EngineConfig(tmp_path))[0]
    assert bf16 - planned == linear * 2 - linear * (4 + 16 / 128) / 8
    plan_engine(EngineConfig(tmp_path), _CARD)


def test_experts_in_blocks_of_fp8_are_planned_in_8_bits(tmp_path):
    published(tmp_path, "qwen3.6-35b-a3b", files.fp8_config())
    planned = weight_bytes(EngineConfig(tmp_path))[0]
    online = weight_bytes(EngineConfig(BENCH / "qwen3.6-35b-a3b", quantization="fp8"))[0]
    assert planned < online  # a scale for 128 x 128 numbers instead of one for each output
    assert planned > 0.98 * online
    plan_engine(EngineConfig(tmp_path), _CARD)


def test_experts_are_planned_as_a_gpu_keeps_them(tmp_path):
    """int4 stays packed, with a byte a group for a zero point; with columns in another order it is dequantised."""
    layers = {"num_hidden_layers": 4}
    published(tmp_path, "qwen3.6-35b-a3b", None, **layers)
    bf16 = weight_bytes(EngineConfig(tmp_path))[0]
    experts = 4 * 256 * 3 * 512 * 2048
    packed, zeros = experts * (4 + 16 / 128) / 8, experts / 128
    for options, saved in (
        ({}, experts * 2 - packed), ({"sym": False}, experts * 2 - packed - zeros), ({"desc_act": True}, 0)
    ):  # fmt: skip
        published(tmp_path, "qwen3.6-35b-a3b", files.gptq_config(4, 128, dynamic=RULES, **options), **layers)
        assert bf16 - weight_bytes(EngineConfig(tmp_path))[0] == saved


def test_a_packed_model_takes_random_weights(tmp_path):
    """Benchmarks without a checkpoint."""
    raw = json.loads((BENCH / "qwen3-0.6b" / "config.json").read_text())
    raw |= {"num_hidden_layers": 1, "vocab_size": 512, "eos_token_id": 2}
    for config in (files.gptq_config(4, 128), files.fp8_config(), files.FORMATS["nvfp4"][0]):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
        flags = {"load_format": "dummy", "max_model_len": 64, "kv_cache_memory_bytes": 8 << 20}
        core = build_engine(EngineConfig(tmp_path, device="cpu", **flags))
        core.add_request(EngineRequest("r", [3, 4, 5], SamplingParams(temperature=0, max_tokens=3)))
        assert [out for _ in range(6) for out in core.step()][-1].error is None
