"""The benchmark of GEMMs with one row: which ones models and their decode steps have."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.bench import __main__ as bench
from engine.bench.author import gemv
from engine.kernels.gemm.tiles import GemmShape
from engine.kernels.tuning import decode_step, step_gemms
from engine.kernels.tuning.step_gemms import Subject
from engine.plan import SHAPES

ROOT = Path(__file__).parents[4]

# In processes of their own: the tests of kernels, which may run in this one, have Triton's interpreter run all of them.
SCRIPT = """
import json, sys
from engine.bench import floor
from engine.kernels.tuning.step_gemms import find_subjects

forms = json.loads(sys.argv[1])
found = {}
for name, form in forms:
    subjects = find_subjects([floor.CONFIGS / name], form)
    found[f"{name} {form}"] = [[str(s), s.gate, s.bias, s.residual] for s in subjects]
subjects = find_subjects([floor.CONFIGS / name for name, _ in forms], None)
print(json.dumps({
    "found": found, "models": {str(s): s.models for s in subjects}, "bytes": [s.num_bytes for s in subjects],
}))
"""
# The models of a few layers, without memory: what a search would time.
STEPS = """
import json, sys
import torch
from engine.bench import floor
from engine.kernels.tuning import step_gemms, decode_step
from engine.kernels.tuning.step_search import Block
from engine.models.registry import empty_model

found = {}
for name, form in json.loads(sys.argv[1]):
    whole = step_gemms.of_step(empty_model(floor.CONFIGS / name), form, name)
    with decode_step.few_layers(floor.CONFIGS / name) as directory:
        model = empty_model(directory)
    cut = step_gemms.of_step(model, form, name)
    step = decode_step.DecodeStep(lambda: step_gemms._hidden(model), model.logits)
    with torch.inference_mode(), step_gemms._AsOnGpu():
        plan = decode_step.plan(step, name, {})
        lines = decode_step.lines_of(step, plan, (9, 0))
    stages = []
    for at, stage in enumerate(plan.stages):
        of_changes = [{line for line in lines[at, number]} for number in range(len(stage.changes))]
        same = set.intersection(*of_changes)
        own = [[json.loads(line) for line in sorted(each - same)] for each in of_changes]
        stages.append({"name": stage.name, "head": stage.head, "changes": stage.changes, "own": own,
                       "block": isinstance(stage.part, Block)})
    found[name] = {"whole": sorted(map(str, whole)), "cut": sorted(map(str, cut)), "stages": stages,
                   "layers": model.config.num_layers, "blocks": [p for p in plan.start if isinstance(p, Block)]}
print(json.dumps(found))
"""


def run_apart(script, *arguments):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", script, *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def of_models():
    forms = [("qwen3-8b", "none"), ("qwen3-0.6b", "fp8"), ("gemma4-31b", "fp8"), ("qwen3.6-35b-a3b", "fp8"),
             ("qwen3-30b-a3b", "fp8")]  # fmt: skip
    return run_apart(SCRIPT, json.dumps(forms))


STEP_MODELS = [("qwen3-8b", "none"), ("gemma4-e2b", "none"), ("gemma4-26b-a4b", "fp8"), ("qwen3.6-35b-a3b", "fp8")]


@pytest.fixture(scope="module")
def steps():
    return run_apart(STEPS, json.dumps(STEP_MODELS))


@pytest.mark.parametrize("name, has_copy", [("qwen3.6-35b-a3b", True), ("qwen3.6-27b", False), ("gemma4-31b", False)])
def test_the_whole_model_decides_whether_its_head_has_a_copy(name, has_copy):
    """A few of its layers read so little that every head would."""
    assert step_gemms.head_has_copy(SHAPES / name, "fp8") is has_copy
    assert not step_gemms.head_has_copy(SHAPES / name, "none")


@pytest.mark.parametrize("model, expected", [
    # The shapes are those of config.json: hidden size 4096, MLP 12288, 32 + 2 * 8 heads of 128, and the head.
    ("qwen3-8b none", {
        "151936x4096 bf16": [None, False, False],
        "24576x4096 bf16 gated normed": ["silu", False, False],
        "4096x12288 bf16": [None, False, True],
        "4096x4096 bf16": [None, False, True],
        "6144x4096 bf16 normed": [None, False, False],
    }),
    ("qwen3-0.6b fp8", {  # the copy of the head has eight bits, too
        "151936x1024 fp8": [None, False, False],
        "6144x1024 fp8 gated normed": ["silu", False, False],
        "1024x3072 fp8": [None, False, True],
        "1024x2048 fp8": [None, False, True],
        "4096x1024 fp8 normed": [None, False, False],
    }),
    # Norms behind the products: nothing is added to the residual in passing. Global layers have heads of 512.
    ("gemma4-31b fp8", {
        "262144x5376 bf16": [None, False, False],
        "43008x5376 fp8 gated": ["gelu_tanh", False, False],
        "5376x21504 fp8": [None, False, False],
        "16384x5376 fp8": [None, False, False],
        "5376x8192 fp8": [None, False, False],
        "18432x5376 fp8": [None, False, False],
        "5376x16384 fp8": [None, False, False],
    }),
    # The experts have kernels of their own, and what decides over a state (64 outputs) is too small to matter.
    ("qwen3.6-35b-a3b fp8", {
        "248320x2048 fp8": [None, False, False],
        "12288x2048 fp8 normed": [None, False, False],
        "9216x2048 fp8 normed": [None, False, False],
        "2048x4096 fp8": [None, False, True],
    }),
])  # fmt: skip
def test_products_are_those_of_the_models_own_decode_step(of_models, model, expected):
    found = {name: around for name, *around in of_models["found"][model]}
    assert found == expected


def test_a_product_of_several_models_is_measured_once_and_the_largest_first(of_models):
    assert of_models["models"]["2048x4096 fp8"] == ["qwen3.6-35b-a3b", "qwen3-30b-a3b"]
    assert of_models["bytes"] == sorted(of_models["bytes"], reverse=True)


def test_large_models_are_measured_in_fp8_and_small_ones_in_both_forms(of_models):
    names = of_models["models"]
    for form in ("bf16", "fp8"):
        assert f"6144x4096 {form} normed" in names
    assert "43008x5376 bf16 gated" not in names


@pytest.mark.parametrize("model, layers", [
    ("qwen3-8b", 8), ("gemma4-e2b", 10), ("gemma4-26b-a4b", 12), ("qwen3.6-35b-a3b", 8),
])  # fmt: skip
def test_a_few_layers_have_all_products_of_the_model(steps, model, layers):
    assert steps[model]["layers"] == layers
    few, whole = set(steps[model]["cut"]), set(steps[model]["whole"])
    # The product that makes the inputs of all layers is the larger the more there are.
    assert whole - few == ({f"{35 * 256}x1536 bf16"} if model == "gemma4-e2b" else set())
    assert few <= whole


def test_lists_with_an_entry_for_each_layer_are_cut_to_two_periods():
    kinds = ["a", "a", "b"] * 7
    cut = decode_step.cut({"text_config": {"num_hidden_layers": 22, "layer_types": [*kinds, "b"], "other": [1, 2]}})
    assert cut["text_config"] == {"num_hidden_layers": 9, "layer_types": kinds[:9], "other": [1, 2]}


def test_what_has_no_period_stays_whole():
    raw = {"num_hidden_layers": 12, "layer_types": ["a"] * 3 + ["b"] * 9}
    assert decode_step.cut(raw) == raw


@pytest.mark.parametrize("model", [name for name, _ in STEP_MODELS])
def test_each_product_of_the_step_is_a_stage_and_the_largest_comes_first(steps, model):
    names = [stage["name"] for stage in steps[model]["stages"] if not stage["block"]]
    assert set(names) <= set(steps[model]["whole"])
    assert [stage["name"] for stage in steps[model]["stages"] if stage["head"]] == names[:1]
    sizes = [math.prod(map(int, name.split()[0].split("x"))) * (1 if "fp8" in name else 2) for name in names]
    assert sizes == sorted(sizes, reverse=True)
    left_out = set(steps[model]["cut"]) & set(steps[model]["whole"]) - set(names)
    assert all(math.prod(map(int, name.split()[0].split("x"))) < 100_000 for name in left_out)


@pytest.mark.parametrize("model", [name for name, _ in STEP_MODELS])
def test_each_candidate_of_a_product_is_one_kernel_of_the_step(steps, model):
    for stage in steps[model]["stages"]:
        if stage["block"]:
            continue
        assert len(stage["own"]) == len(stage["changes"]) > 1
        for kernels, change in zip(stage["own"], stage["changes"], strict=True):
            assert kernels
            for kernel in kernels:
                assert kernel["capability"] == [9, 0]
                assert kernel["name"] == "_vector_kernel"
                constants = kernel["constants"]
                ours = {"block_n": constants["BLOCK_N"], "block_k": constants["BLOCK_K"], "warps": kernel["num_warps"]}
                assert ours == change


def test_sparse_blocks_of_a_step_come_last(steps):
    assert steps["qwen3-8b"]["blocks"] == steps["gemma4-e2b"]["blocks"] == []
    assert steps["gemma4-26b-a4b"]["blocks"] == [[[128, 8, 2816, 704, 1, False, "rows"], 2112]]
    assert steps["qwen3.6-35b-a3b"]["blocks"] == [[[256, 8, 2048, 512, 1, False, "rows"], 512]]
    *products, first, second, router = steps["qwen3.6-35b-a3b"]["stages"]
    assert not any(stage["block"] for stage in products)
    for stage, names in (first, {"gate_up"}), (second, {"down", "dense_down"}):
        assert {name for change in stage["changes"] for name in change} == names
        kernels = [{kernel["name"] for kernel in kernels} for kernels in stage["own"]]
        assert all(len(each) == 1 for each in kernels)
    assert {kernel["name"] for kernels in router["own"] for kernel in kernels} == {"route_kernel"}


def test_speed_is_of_the_weights_bytes():
    half = gemv.speed(Subject(GemmShape(4096, 4096, 1), ()), 4096 * 4096 / 500e9, 1000.0)
    assert half == {"tb_s": 0.5, "of_floor": 0.5}


def test_it_needs_a_gpu(capsys):
    assert bench.main(["gemv", "--device", "cpu"]) == 1
    assert "error: These products are a GPU's" in capsys.readouterr().err
