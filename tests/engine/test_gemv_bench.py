"""The benchmark of products with one row: which ones models have, and the search for their tiles with made-up times."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.bench import __main__ as bench
from engine.bench import gemv, gemv_search
from engine.bench.gemv_products import Subject
from engine.kernels import gemv_tiles
from engine.kernels.gemv_tiles import Product, VectorTiles

ROOT = Path(__file__).parents[2]
PRODUCTS = [Product(4096, 4096, 1), Product(24576, 4096, 2, True, True), Product(1536, 256, 2, False, True)]
ALL_READY = lambda *_: True  # noqa: E731


def subject(product=PRODUCTS[0]):
    return Subject(product, ("model",), "silu" if product.gated else None)


# In a process of its own: the tests of kernels, which may run in this one, have Triton's interpreter run all of them.
SCRIPT = """
import json, sys
from engine.bench import floor, gemv_search
from engine.bench.gemv_products import find_subjects

forms = json.loads(sys.argv[1])
found = {}
for name, form in forms:
    subjects = find_subjects([floor.CONFIGS / name], form)
    found[f"{name} {form}"] = [[str(s), s.gate, s.bias, s.residual] for s in subjects]
subjects = find_subjects([floor.CONFIGS / name for name, _ in forms], None)
lines = gemv_search.lines_of(subjects, (9, 0))
print(json.dumps({
    "found": found, "models": {str(s): s.models for s in subjects}, "bytes": [s.num_bytes for s in subjects],
    "lines": len(lines), "kernels": len(set(lines.values())),
    "tiles": sum(len(gemv_search.all_tiles(s.product)) for s in subjects),
    "line": json.loads(next(iter(lines.values()))),
}))
"""


@pytest.fixture(scope="module")
def of_models():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    forms = [("qwen3-8b", "none"), ("qwen3-0.6b", "fp8"), ("gemma4-31b", "fp8"), ("qwen3.6-35b-a3b", "fp8"),
             ("qwen3-30b-a3b", "fp8")]  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, json.dumps(forms)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


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


def test_a_product_of_several_models_is_searched_once_and_the_largest_first(of_models):
    assert of_models["models"]["2048x4096 fp8"] == ["qwen3.6-35b-a3b", "qwen3-30b-a3b"]
    assert of_models["bytes"] == sorted(of_models["bytes"], reverse=True)


def test_large_models_are_searched_in_fp8_and_small_ones_in_both_forms(of_models):
    names = of_models["models"]
    for form in ("bf16", "fp8"):
        assert f"6144x4096 {form} normed" in names
    assert "43008x5376 bf16 gated" not in names


def test_each_candidate_is_a_kernel_to_compile(of_models):
    assert of_models["lines"] == of_models["tiles"]
    assert of_models["kernels"] == of_models["tiles"]
    line = of_models["line"]
    assert line["capability"] == [9, 0]
    assert line["constants"]["K"] == 5376
    assert line["types"][:2] == ["*bf16!", "*bf16!"]


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_candidates_read_whole_vectors(product):
    found = gemv_search.all_tiles(product)
    assert len(set(found)) == len(found) >= 5
    assert found[0] == gemv_tiles.by_rule(product)
    for tiles in found[1:]:
        each = tiles.block_n * tiles.block_k * product.itemsize / (32 * tiles.warps)
        assert each in ((32, 64) if product.gated else (64, 128))
        assert tiles.block_k < 2 * product.inner


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_the_search_finds_the_fastest_candidate(product):
    best = gemv_search.all_tiles(product)[-2]
    ready = gemv_search.Ready(lambda _, tiles: 1.0 if tiles == best else 2.0, ALL_READY)
    (found,) = gemv_search.search([subject(product)], ready, 1000)
    assert (found.tiles, found.seconds) == (best, 1.0)
    assert (found.row["us"], found.row["us_by_rule"]) == (1e6, 2e6)
    assert found.row["tried"] == len(gemv_search.all_tiles(product))


@pytest.mark.parametrize("better, is_kept", [(0.995, False), (0.985, True)])
def test_tiles_that_are_hardly_faster_than_those_by_rule_are_not_kept(better, is_kept):
    rule, other, *_ = gemv_search.all_tiles(PRODUCTS[0])
    times = {rule: 1.0, other: better}
    ready = gemv_search.Ready(lambda _, tiles: times.get(tiles, 3.0), ALL_READY)
    (found,) = gemv_search.search([subject()], ready, 1000)
    assert found.tiles == (other if is_kept else rule)


def test_a_lucky_measurement_does_not_decide():
    """Tiles that were the fastest once, by chance, are measured again beside those that always are."""
    _, lucky, good, *_ = gemv_search.all_tiles(PRODUCTS[0])
    seen = []

    def seconds(_, tiles):
        seen.append(tiles)
        return {lucky: 0.5 if seen.count(tiles) == 1 else 2.0, good: 1.0}.get(tiles, 2.0)

    (found,) = gemv_search.search([subject()], gemv_search.Ready(seconds, ALL_READY), 1000)
    assert found.tiles == good


def test_what_cannot_be_compiled_or_run_is_passed_over():
    rule, missing, refused, *_ = gemv_search.all_tiles(PRODUCTS[0])

    def seconds(_, tiles):
        assert tiles != missing
        return float("inf") if tiles == refused else float(tiles != rule) + 1

    ready = gemv_search.Ready(seconds, lambda _, tiles: tiles != missing)
    (found,) = gemv_search.search([subject()], ready, 1000)
    assert found.tiles == rule
    assert found.row["tried"] == len(gemv_search.all_tiles(PRODUCTS[0])) - 1


@pytest.mark.parametrize("is_there", [True, False])
def test_without_a_time_by_rule_the_others_are_not_tried(is_there):
    rule, *_ = gemv_search.all_tiles(PRODUCTS[0])
    asked = []

    def seconds(_, tiles):
        asked.append(tiles)
        return float("inf")

    ready = gemv_search.Ready(seconds, lambda _, tiles: is_there or tiles != rule)
    assert list(gemv_search.search([subject()], ready, 1000)) == []
    assert asked == [rule] * is_there


def test_a_search_ends_with_its_budget():
    assert list(gemv_search.search([subject()], gemv_search.Ready(lambda *_: 1.0, ALL_READY), 0)) == []


def test_what_was_found_takes_its_place_among_the_others(tmp_path):
    path = tmp_path / "tuned.json"
    tiles = VectorTiles(8, 512, 2)
    for product in PRODUCTS:
        gemv_search.write(path, gemv_search.Found(subject(product), tiles, 1.0, {}))
    assert list(read(path)) == PRODUCTS
    gemv_search.write(path, gemv_search.Found(subject(PRODUCTS[1]), tiles._replace(warps=4), 1.0, {}))
    assert read(path) == dict.fromkeys(PRODUCTS, tiles) | {PRODUCTS[1]: tiles._replace(warps=4)}
    rule = gemv_tiles.by_rule(PRODUCTS[0])
    gemv_search.write(path, gemv_search.Found(subject(), rule, 1.0, {}))
    assert list(read(path)) == PRODUCTS[1:]


def test_the_shipped_file_stays_as_it_is_but_for_one_product(tmp_path):
    shipped = gemv_tiles._TUNED.read_text("utf-8")
    path = tmp_path / "tuned.json"
    path.write_text(shipped, "utf-8")
    other = Product(12345, 4096, 1)
    gemv_search.write(path, gemv_search.Found(subject(other), VectorTiles(2, 512, 1), 1.0, {}))
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
