"""The benchmark of products with one row: which ones models have, and the search for their tiles with made-up times."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.bench import __main__ as bench
from engine.bench import gemv, gemv_search, gemv_step
from engine.bench.gemv_products import Subject
from engine.bench.gemv_search import Block, Stage
from engine.bench.moe_search import few_stages
from engine.kernels import gemv_tiles, moe_tiles
from engine.kernels.gemv_tiles import Product, VectorTiles
from engine.kernels.moe_tiles import Shape

ROOT = Path(__file__).parents[2]
PRODUCTS = [Product(4096, 4096, 1), Product(24576, 4096, 2, True, True), Product(1536, 256, 2, False, True)]


def subject(product=PRODUCTS[0]):
    return Subject(product, ("model",), "silu" if product.gated else None)


# In processes of their own: the tests of kernels, which may run in this one, have Triton's interpreter run all of them.
SCRIPT = """
import json, sys
from engine.bench import floor
from engine.bench.gemv_products import find_subjects

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
from engine.bench import floor, gemv_products, gemv_step
from engine.bench.gemv_search import Block
from engine.bench.random_checkpoint import empty_model

found = {}
for name, form in json.loads(sys.argv[1]):
    whole = gemv_products.of_step(empty_model(floor.CONFIGS / name), form, name)
    with gemv_step.few_layers(floor.CONFIGS / name) as directory:
        model = empty_model(directory)
    cut = gemv_products.of_step(model, form, name)
    step = gemv_step.DecodeStep(lambda: gemv_products._hidden(model), model.logits)
    with torch.inference_mode(), gemv_products._AsOnGpu():
        plan = gemv_step.plan(step, name)
        lines = gemv_step.lines_of(step, plan, (9, 0))
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


def run_apart(script, forms):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", script, json.dumps(forms)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def of_models():
    forms = [("qwen3-8b", "none"), ("qwen3-0.6b", "fp8"), ("gemma4-31b", "fp8"), ("qwen3.6-35b-a3b", "fp8"),
             ("qwen3-30b-a3b", "fp8")]  # fmt: skip
    return run_apart(SCRIPT, forms)


STEP_MODELS = [("qwen3-8b", "none"), ("gemma4-e2b", "none"), ("gemma4-26b-a4b", "fp8"), ("qwen3.6-35b-a3b", "fp8")]


@pytest.fixture(scope="module")
def steps():
    return run_apart(STEPS, STEP_MODELS)


@pytest.mark.parametrize("model, expected", [
    # The shapes are those of config.json: hidden size 4096, MLP 12288, 32 + 2 * 8 heads of 128, and the head.
    ("qwen3-8b none", {
        "151936x4096 bf16": [None, False, False],
        "24576x4096 bf16 gated normed": ["silu", False, False],
        "4096x12288 bf16": [None, False, True],
        "4096x4096 bf16": [None, False, True],
        "6144x4096 bf16 normed": [None, False, False],
    }),
    ("qwen3-0.6b fp8", {  # the head keeps its precision
        "151936x1024 bf16": [None, False, False],
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
        "248320x2048 bf16": [None, False, False],
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
    cut = gemv_step.cut({"text_config": {"num_hidden_layers": 22, "layer_types": [*kinds, "b"], "other": [1, 2]}})
    assert cut["text_config"] == {"num_hidden_layers": 9, "layer_types": kinds[:9], "other": [1, 2]}


def test_what_has_no_period_stays_whole():
    raw = {"num_hidden_layers": 12, "layer_types": ["a"] * 3 + ["b"] * 9}
    assert gemv_step.cut(raw) == raw


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
    assert steps["gemma4-26b-a4b"]["blocks"] == [[[128, 8, 2816, 704, 1], 2112]]
    assert steps["qwen3.6-35b-a3b"]["blocks"] == [[[256, 8, 2048, 512, 1], 512]]
    *products, first, second, router = steps["qwen3.6-35b-a3b"]["stages"]
    assert not any(stage["block"] for stage in products)
    for stage, names in (first, {"gate_up"}), (second, {"down", "beside_down"}):
        assert {name for change in stage["changes"] for name in change} == names
        kernels = [{kernel["name"] for kernel in kernels} for kernels in stage["own"]]
        assert all(len(each) == 1 for each in kernels)
    assert {kernel["name"] for kernels in router["own"] for kernel in kernels} == {"route_kernel"}


@pytest.mark.parametrize("product", [*PRODUCTS, Product(64, 2048, 2)], ids=str)
def test_candidates_read_whole_vectors(product):
    found = gemv_search.candidates(product)
    assert len(set(found)) == len(found) >= 4
    for tiles in found:
        each = tiles.block_n * (2 if product.gated else 1) * tiles.block_k * product.itemsize / (32 * tiles.warps)
        assert each in ((16, 32, 64, 128) if product.outputs <= 256 else (64, 128))
        assert tiles.block_k < 2 * product.inner


# -- the search, with made-up times -----------------------------------------------------------------------------------

BLOCK = Block(Shape(128, 8, 2048, 768, 1), 0)
SOON = math.inf


def stage_of(product=PRODUCTS[0], head=False):
    changes = [tiles._asdict() for tiles in gemv_search.candidates(product)]
    return Stage(str(product), product, changes, head)


def start_of(*products):
    return {product: gemv_tiles.by_rule(product) for product in products}


def others(product=PRODUCTS[0]):
    """The candidates that are not there at the start."""
    return [tiles for tiles in gemv_search.candidates(product) if tiles != gemv_tiles.by_rule(product)]


def ready_with(ms, compiled=lambda *_: True, right=lambda *_: True):
    return gemv_search.Ready(ms, compiled, right)


def search_one(ms, deadline=SOON, **how):
    found = gemv_search.search([stage_of()], start_of(PRODUCTS[0]), ready_with(ms, **how), deadline)
    return list(found)


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_the_search_finds_the_fastest_candidate(product):
    best = others(product)[-2]
    ready = ready_with(lambda chosen, _: 1.0 if chosen[product] == best else 2.0)
    (found,) = gemv_search.search([stage_of(product)], start_of(product), ready, SOON)
    assert (found.tiles, found.is_new) == (best, True)
    assert (found.row["ms"], found.row["ms_before"], found.row["tiles"]) == (1.0, 2.0, list(best))
    assert found.row["tried"] == len(others(product))


def test_each_product_is_timed_in_the_step_with_the_tiles_chosen_before_it():
    """The second product's best tiles depend on the first's, as in a step what follows depends on what came."""
    one, two = PRODUCTS[:2]
    first, second, other = others(one)[3], others(two)[3], others(two)[5]

    def ms(chosen, _):
        return 4.0 - (chosen[one] == first) - (chosen[two] == (second if chosen[one] == first else other))

    stages, start = [stage_of(one), stage_of(two)], start_of(one, two)
    found = list(gemv_search.search(stages, start, ready_with(ms), SOON))
    assert [each.tiles for each in found] == [first, second]
    assert [(each.row["ms_before"], each.row["ms"]) for each in found] == [(4.0, 3.0), (3.0, 2.0)]
    assert start == start_of(one, two)
    found = list(gemv_search.search(stages[1:], start, ready_with(ms), SOON))
    assert [each.tiles for each in found] == [other]


def test_kernels_of_a_block_get_their_tiles_one_after_the_other():
    start = moe_tiles.few_tiles(*BLOCK[:1], 1)
    stages = [Stage(str(i), BLOCK, some) for i, some in enumerate(few_stages(start, *BLOCK))]
    gate_up, down = stages[0].changes[2]["gate_up"], stages[1].changes[3]["down"]

    def ms(chosen, _):
        return 4.0 - (chosen[BLOCK].gate_up == gate_up) - (chosen[BLOCK].down == down)

    found = list(gemv_search.search(stages, {BLOCK: start}, ready_with(ms), SOON))
    assert [each.is_new for each in found] == [True, True, False]
    assert (found[-1].tiles.gate_up, found[-1].tiles.down, found[-1].row["ms"]) == (gate_up, down, 2.0)


def test_only_products_of_the_head_are_timed_with_it():
    asked = set()
    products = PRODUCTS[:2]

    def ms(chosen, head):
        changed = [product for product in products if chosen[product] != start_of(product)[product]]
        asked.add((*changed, head))
        return 1.0

    stages = [stage_of(products[0], head=True), stage_of(products[1])]
    list(gemv_search.search(stages, start_of(*products), ready_with(ms), SOON))
    assert asked == {(True,), (products[0], True), (False,), (products[1], False)}


@pytest.mark.parametrize("better, is_kept", [(0.999, False), (0.997, True)])
def test_tiles_with_which_a_step_is_hardly_faster_are_not_kept(better, is_kept):
    other = others()[1]
    (found,) = search_one(lambda chosen, _: better if chosen[PRODUCTS[0]] == other else 1.0)
    assert (found.is_new, found.tiles == other) == (is_kept, is_kept)


def test_a_lucky_measurement_does_not_decide():
    """Tiles that were the fastest once, by chance, are measured again beside those that always are."""
    _, lucky, good, *_ = others()
    seen = []

    def ms(chosen, _):
        tiles = chosen[PRODUCTS[0]]
        seen.append(tiles)
        return {lucky: 0.5 if seen.count(tiles) == 1 else 2.0, good: 1.0}.get(tiles, 2.0)

    (found,) = search_one(ms)
    assert found.tiles == good


def test_a_slow_measurement_of_the_tiles_before_does_not_decide_either():
    rule, *_ = start_of(PRODUCTS[0]).values()
    seen = []

    def ms(chosen, _):
        seen.append(chosen[PRODUCTS[0]])
        return 2.0 if seen == [rule] else 1.0

    (found,) = search_one(ms)
    assert not found.is_new
    assert found.row["ms_before"] == found.row["ms"] == 1.0


def test_what_cannot_be_compiled_or_run_or_is_wrong_is_passed_over():
    missing, refused, wrong, good, *_ = others()

    def ms(chosen, _):
        tiles = chosen[PRODUCTS[0]]
        assert tiles != missing
        return {refused: math.inf, wrong: 0.5, good: 1.0}.get(tiles, 2.0)

    compiled = lambda _, change: change != missing._asdict()  # noqa: E731
    (found,) = search_one(ms, compiled=compiled, right=lambda part, tiles: (part, tiles) != (PRODUCTS[0], wrong))
    assert found.tiles == good
    assert found.row["tried"] == len(others()) - 1


def test_without_a_time_of_the_tiles_before_others_are_not_tried():
    asked = []

    def ms(chosen, _):
        asked.append(chosen[PRODUCTS[0]])
        return math.inf

    assert search_one(ms) == []
    assert asked == list(start_of(PRODUCTS[0]).values())


def test_a_search_ends_at_its_deadline():
    assert search_one(lambda *_: 1.0, deadline=0) == []


# -- what is written --------------------------------------------------------------------------------------------------


def found_of(part, tiles, is_new=True):
    return gemv_search.Found(Stage("", part, []), tiles, is_new, {})


def test_what_was_found_takes_its_place_among_the_others(tmp_path):
    path = tmp_path / "tuned.json"
    tiles = VectorTiles(8, 512, 2)
    for product in PRODUCTS:
        gemv_search.write(found_of(product, tiles), path, None)
    assert list(read(path)) == PRODUCTS
    gemv_search.write(found_of(PRODUCTS[1], tiles._replace(warps=4)), path, None)
    assert read(path) == dict.fromkeys(PRODUCTS, tiles) | {PRODUCTS[1]: tiles._replace(warps=4)}
    rule = gemv_tiles.by_rule(PRODUCTS[0])
    gemv_search.write(found_of(PRODUCTS[0], rule), path, None)
    assert list(read(path)) == PRODUCTS[1:]


def test_tiles_of_a_block_go_to_a_file_of_their_own_if_they_are_new(tmp_path):
    out, moe_out = tmp_path / "gemv.json", tmp_path / "moe.json"
    tiles = moe_tiles.few_tiles(BLOCK.shape, 1)
    gemv_search.write(found_of(BLOCK, tiles, is_new=False), out, moe_out)
    gemv_search.write(found_of(BLOCK, tiles), out, None)
    assert list(tmp_path.iterdir()) == []
    gemv_search.write(found_of(BLOCK, tiles), out, moe_out)
    gemv_search.write(found_of(PRODUCTS[0], VectorTiles(8, 512, 2)), None, moe_out)
    assert list(tmp_path.iterdir()) == [moe_out]
    assert moe_tiles._read(moe_out) == [moe_tiles.Measured(BLOCK.shape, 0, 1, tiles)]


def test_the_shipped_file_stays_as_it_is_but_for_one_product(tmp_path):
    shipped = gemv_tiles._TUNED.read_text("utf-8")
    path = tmp_path / "tuned.json"
    path.write_text(shipped, "utf-8")
    other = Product(12345, 4096, 1)
    gemv_search.write(found_of(other, VectorTiles(2, 512, 1)), path, None)
    before, after = shipped.splitlines(), path.read_text("utf-8").splitlines()
    assert after == [*before[:-2], before[-2] + ",", gemv_tiles.line_of(other, VectorTiles(2, 512, 1)), "]"]


def read(path):
    """As the engine does."""
    lines = path.read_text("utf-8").splitlines()
    return gemv_tiles.read(line.rstrip(",") for line in lines if line.startswith("{"))


def test_speed_is_of_the_weights_bytes():
    half = gemv.speed(subject(), 4096 * 4096 / 500e9, 1000.0)
    assert half == {"tb_s": 0.5, "of_floor": 0.5}


def test_it_needs_a_gpu(capsys):
    assert bench.main(["gemv", "--device", "cpu"]) == 1
    assert "error: These products are a GPU's" in capsys.readouterr().err


def test_a_search_needs_one_too_and_takes_several_models(capsys, tmp_path):
    assert bench.main(["gemv", "--search", "--model", str(tmp_path), str(tmp_path), "--device", "cpu"]) == 1
    assert "error: These products are a GPU's" in capsys.readouterr().err
