"""The benchmark of routed experts: shapes of every family's config.json, and what it counts. (On a tiny layer.)"""

import argparse
import json
from pathlib import Path

import pytest
import torch

from engine.bench import __main__ as bench
from engine.bench import floor, moe, moe_search
from engine.kernels.moe import tiles as moe_tiles
from engine.kernels.moe.tiles import FewTiles, Shape
from engine.layers.moe import SparseMLP
from engine.models.config.model import ModelConfig
from engine.models.registry import model_class

CONFIGS = Path(moe.__file__).parent / "configs"
TINY = {"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64, "moe_intermediate_size": 32}


@pytest.mark.parametrize("raw, shape, gate", [
    (TINY, Shape(8, 2, 64, 32, 2), "silu"),
    ({"text_config": TINY}, Shape(8, 2, 64, 32, 2), "silu"),
    ({"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 16, "intermediate_size": 48},
     Shape(4, 2, 16, 48, 2), "silu"),
    ({"num_experts": 4, "top_k_experts": 3, "hidden_size": 16, "intermediate_size": 48, "moe_intermediate_size": 8,
      "hidden_activation": "gelu_pytorch_tanh"}, Shape(4, 3, 16, 8, 2), "gelu_tanh"),
])
def test_shapes_of_each_family(raw, shape, gate):
    assert floor.read_shape(raw) == (shape, gate)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_rows(tmp_path, quantization):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    args = argparse.Namespace(device="cpu", model=tmp_path, tokens=[1, 40], quantization=quantization, search=False)
    one, many = moe.run(args)
    assert (one["active_experts"], many["active_experts"]) == (2, 8)
    bytes_read = 2 * 3 * 64 * 32 * (1 if quantization == "fp8" else 2)
    assert one["tb_s"] == pytest.approx(bytes_read / (one["us"] / 1e6) / 1e12, abs=6e-4)
    assert many["tflop_s"] == pytest.approx(2 * 40 * 2 * 3 * 64 * 32 / (many["us"] / 1e6) / 1e12, abs=6e-3)


SHARED = 227 << 10


def subject(width=0, itemsize=1):
    """Of real sizes; it has no weights, for whoever times it here needs none."""
    with torch.device("meta"):
        layer = SparseMLP(2048, 768, 128, 8)
    return moe_search.Subject("model", "fp8", layer, Shape(128, 8, 2048, 768, itemsize), None, width)


def test_the_search_covers_each_layer_and_number_of_tokens_with_tiles_that_fit():
    todo = moe_search.cells([subject(), subject(512)], moe._SEARCH_TOKENS, SHARED)
    assert {(id(c.subject), c.tokens) for c in todo} == {(id(c.subject), n) for c in todo for n in moe._SEARCH_TOKENS}
    for cell in todo:
        found = cell.all_tiles()
        assert 8 < len(found) < 40
        for tiles in found:
            if isinstance(tiles, FewTiles):
                assert tiles.router.warps == tiles.beside_gate_up.warps
                assert tiles.down.warps == tiles.beside_down.warps
            else:
                # of both kernels; each was looked at alone
                # of both kernels; each was looked at alone
                assert moe_tiles.shared_bytes(tiles, cell.subject.shape) <= 2 * SHARED


@pytest.mark.parametrize("tokens", [1, 64])
def test_the_search_finds_the_best_of_each_kernel(tokens):
    """With times that are known: a penalty for each field that differs from the best."""
    (cell,) = moe_search.cells([subject(512)], [tokens], SHARED)
    best = cell.start
    for stage in cell.stages:
        if "rows" not in stage[0]:
            best = best._replace(**stage[-1])

    def seconds(_subject, _tokens, tiles):
        return 1 + sum(getattr(tiles, name) != getattr(best, name) for name in best._fields)

    ready = moe_search.Ready(seconds, lambda *_: True)
    ((_, measured, row),) = moe_search.search([cell], ready, 1000)
    assert measured.tiles == best
    assert measured.beside == (512 if tokens == 1 else None)
    assert row["us"] == 1e6
    assert row["us_by_rule"] == seconds(None, None, cell.start) * 1e6


def test_what_cannot_be_compiled_is_passed_over():
    (cell,) = moe_search.cells([subject()], [1], SHARED)
    change = next(c for c in cell.stages[0] if c["gate_up"].block_n == 8)
    there = cell.start, cell.start._replace(**change)
    ready = moe_search.Ready(lambda _s, _t, tiles: tiles.gate_up.block_n, lambda _s, _t, tiles: tiles in there)
    ((_, measured, row),) = moe_search.search([cell], ready, 1000)
    assert row["tried"] == 2
    assert measured.tiles == cell.start


def test_a_search_ends_with_its_budget():
    todo = moe_search.cells([subject()], [1, 64], SHARED)
    assert list(moe_search.search(todo, moe_search.Ready(lambda *_: 1.0, lambda *_: True), 0)) == []


def test_a_search_needs_a_gpu(capsys):
    assert bench.main(["moe", "--search", "--device", "cpu"]) == 1
    assert "--search needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("name, width, factor", [
    ("gemma4-26b-a4b", 2112, False), ("qwen3.6-35b-a3b", 512, True), ("qwen3-30b-a3b", 0, False),
])
def test_the_mlp_beside_the_experts(name, width, factor):
    raw = json.loads((CONFIGS / name / "config.json").read_text())
    assert floor.beside_experts(raw) == (width, factor)


def test_qwen3_30b_a3b_has_the_published_size():
    config = ModelConfig.load(CONFIGS / "qwen3-30b-a3b")
    weights = model_class(config)(config, 16).weights()
    assert sum(tensor.numel() for tensor in weights.values()) == 30_532_122_624


def test_bytes_of_a_token_count_its_experts_alone():
    """Qwen3-30B-A3B: of 30.5 B parameters a token reads 3.35 B, less the embedding."""
    expected = 3_353_032_704 - 151936 * 2048
    assert floor.bytes_per_token(CONFIGS / "qwen3-30b-a3b") == 2 * expected
