"""A plan without a GPU and without weights."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import engine
from engine.bench.floor import bytes_per_token as floor_bytes
from engine.config import EngineConfig
from engine.errors import ConfigError, OutOfMemoryPlanError
from engine.models.config.model import ModelConfig
from engine.models.loading.loader import quantize
from engine.models.registry import model_class
from engine.plan import PlannedGpu, bytes_per_token, plan_engine, weight_bytes
from engine.worker.startup.build import build_engine
from engine.worker.startup.memory import host_bytes, loaded_bytes

CONFIGS = sorted((Path(engine.__file__).parent / "bench" / "configs").iterdir())
H200 = PlannedGpu("H200", 139 << 30, (9, 0))
L4 = PlannedGpu("L4", 22 << 30, (8, 9))


@pytest.mark.parametrize("model", CONFIGS, ids=lambda path: path.name)
def test_every_bench_model_has_a_plan_whose_parts_stay_within_the_budget(model):
    plan = plan_engine(EngineConfig(model, max_model_len="auto"), H200)
    numbers = json.loads(json.dumps(plan.numbers()))
    taken = sum(numbers["parts"].values()) + numbers["request_table"] + numbers["kv_cache"]
    assert numbers["usable"] - plan.spec.slab_bytes < taken <= numbers["usable"]
    assert numbers["full_length_requests"] >= 1
    assert plan.table().count(f"{numbers['full_length_requests']:,} requests of that length") == 1


# model, quantization, KV cache, longest context -> MiB that the engine measured on an H100 80GB with torch 2.11 for
# everything but weights and pages (activations, overhead, graphs, buffers).
MEASURED = {
    ("qwen3-8b", None, "auto", 8193): 2352,
    ("qwen3-8b", "fp8", "fp8", 8193): 2306,
    ("qwen3.6-27b", "fp8", "auto", 8193): 2674,
    ("qwen3.6-35b-a3b", "fp8", "auto", 8193): 2559,
    ("gemma4-31b", "fp8", "auto", 1536): 3435,
    ("gemma4-26b-a4b", "fp8", "auto", 1536): 3057,
    ("qwen3-0.6b", None, "auto", 2048): 1736,
    ("gemma4-e2b", None, "auto", 1536): 3980,
}


@pytest.mark.parametrize("flags", MEASURED, ids=lambda flags: "-".join(map(str, flags[:2])))
def test_the_room_for_pages_is_within_three_percent_of_a_real_gpus(flags):
    name, quantization, kv_dtype, context = flags
    model = next(path for path in CONFIGS if path.name == name)
    config = EngineConfig(model, quantization=quantization, kv_cache_dtype=kv_dtype, max_model_len=context,
                          gpu_memory_utilization=0.9)  # fmt: skip
    planned = plan_engine(config, PlannedGpu("NVIDIA H100 80GB HBM3", 85017493504, (9, 0))).numbers()
    found = planned["usable"] - planned["parts"]["weights"] - (MEASURED[flags] << 20) - planned["request_table"]
    assert planned["kv_cache"] == pytest.approx(found, rel=0.03)


def test_numbers_follow_from_the_architecture():
    """Qwen3-8B: 36 layers of 8 KV heads of 128 in bf16; 8.19 billion parameters."""
    model = next(path for path in CONFIGS if path.name == "qwen3-8b")
    numbers = plan_engine(EngineConfig(model), H200).numbers()
    assert numbers["kv_groups"] == [{"window": None, "layers": 36, "bytes_per_token": 36 * 8 * 128 * 2 * 2}]
    assert numbers["parts"]["weights"] == pytest.approx(2 * 8.19e9, rel=0.01)
    half = plan_engine(EngineConfig(model, kv_cache_dtype="fp8"), H200).numbers()
    assert half["kv_groups"][0]["bytes_per_token"] * 2 == numbers["kv_groups"][0]["bytes_per_token"]


def test_what_does_not_fit_is_refused_and_what_would_fit_is_named():
    model = next(path for path in CONFIGS if path.name == "qwen3-8b")
    with pytest.raises(OutOfMemoryPlanError, match="needs"):
        plan_engine(EngineConfig(model, max_model_len=40960, max_num_seqs=8), L4)
    assert plan_engine(EngineConfig(model, max_model_len="auto", max_num_seqs=8), L4).max_model_len < 40960
    with pytest.raises(OutOfMemoryPlanError, match="does not fit"):
        plan_engine(EngineConfig(next(p for p in CONFIGS if p.name == "gemma4-31b")), L4)


def test_a_card_that_is_too_old_is_refused():
    with pytest.raises(ConfigError, match=r"7\.5"):
        plan_engine(EngineConfig(CONFIGS[0]), PlannedGpu("T4", 15 << 30, (7, 5)))


def test_a_started_engine_logs_the_pages_that_were_planned(tmp_path, caplog):
    raw = json.loads((next(p for p in CONFIGS if p.name == "qwen3-0.6b") / "config.json").read_text())
    raw |= {"num_hidden_layers": 2, "vocab_size": 512, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    flags = {"load_format": "dummy", "block_size": 16, "max_model_len": 256, "max_num_batched_tokens": 64}
    with caplog.at_level(logging.INFO, "engine.worker.startup.build"):
        build_engine(EngineConfig(tmp_path, device="cpu", kv_cache_memory_bytes=8 << 20, **flags))
    [line] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Planned memory in numbers: ")]
    started = json.loads(line.partition(": ")[2])
    planned = plan_engine(EngineConfig(tmp_path, **flags), H200).numbers()
    for name in ("page_size", "kv_groups", "state_bytes_per_sequence", "max_model_len", "max_num_batched_tokens"):
        assert started[name] == planned[name], name


@pytest.mark.parametrize("model", CONFIGS, ids=lambda path: path.name)
@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("context", [64, 8192, 32768])
def test_weights_are_those_of_the_model_that_an_engine_builds(model, quantization, context):
    """The plan builds a model once, for its longest context; the engine builds it for the context that is asked for."""
    config = ModelConfig.load(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        built = model_class(config)(config, context).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    if quantization:
        quantize(built, quantization)
    for table in built.lookup_tables():
        table.on_host = True
    planned = weight_bytes(EngineConfig(model, max_model_len=context, quantization=quantization))
    assert planned == (loaded_bytes(built), host_bytes(built))


def test_the_floor_of_a_stream_is_what_the_benchmark_computes():
    for model in CONFIGS:
        floor = floor_bytes(model, device="cuda")
        assert bytes_per_token(EngineConfig(model)) == pytest.approx(floor, rel=0.12), model.name


@pytest.mark.parametrize(("name", "outputs", "inner"), [("gemma4-26b-a4b", 262144, 2816), ("qwen3-8b", 151936, 4096)])
def test_a_copy_of_the_head_counts_beside_fp8(name, outputs, inner):
    config = EngineConfig(next(c for c in CONFIGS if c.name == name), quantization="fp8")
    planned, (weights, _) = plan_engine(config, H200).budget.weights, weight_bytes(config)
    assert planned - weights == outputs * (inner + 4)
    assert bytes_per_token(config) < bytes_per_token(replace(config, quantization=None)) - outputs * (inner - 4)
    assert plan_engine(replace(config, batch_invariant=True), H200).budget.weights == weights
    small = PlannedGpu("a GPU with too little left", int((weights + 31 * outputs * inner) / 0.9), (9, 0))
    assert plan_engine(replace(config, max_model_len="auto"), small).budget.weights == weights


def test_a_head_that_is_a_small_part_of_the_model_has_no_copy():
    config = EngineConfig(next(c for c in CONFIGS if c.name == "qwen3.6-27b"), quantization="fp8")
    assert plan_engine(config, H200).budget.weights == weight_bytes(config)[0]


def test_copies_of_int4_weights_count_where_a_gpu_keeps_them():
    config = EngineConfig(next(c for c in CONFIGS if c.name == "qwen3-8b"), quantization="int4")
    alone = plan_engine(replace(config, int4_copy="never"), H200).budget.weights
    copied = plan_engine(config, H200).budget.weights
    assert copied - alone == 36 * (4096 * (6144 + 4096 + 24576) + 12288 * 4096)
    assert plan_engine(replace(config, quantized_activations="none"), H200).budget.weights == alone
    assert plan_engine(config, L4).budget.weights == alone  # its library multiplies no blocks
    small = PlannedGpu("a third of its memory holds no copies", 24 << 30, (9, 0))
    assert plan_engine(config, small).budget.weights == alone
