"""The search for tiles of the experts' kernels, with made-up times. (Real shapes, no weights.)"""

import pytest
import torch

from engine.kernels.moe import tiles as moe_tiles
from engine.kernels.moe.tiles import DecodeTiles, Shape
from engine.kernels.tuning import experts_search
from engine.kernels.tuning.search import _EXPERT_TOKENS
from engine.layers.moe import SparseMLP

SHARED = 227 << 10
TOKENS = (1, *_EXPERT_TOKENS)


def subject(width=0, itemsize=1):
    """Of real sizes; it has no weights, for whoever times it here needs none."""
    with torch.device("meta"):
        layer = SparseMLP(2048, 768, 128, 8)
    return experts_search.Subject("model", "fp8", layer, Shape(128, 8, 2048, 768, itemsize), None, width)


def test_the_search_covers_each_layer_and_number_of_tokens_with_tiles_that_fit():
    todo = experts_search.cells([subject(), subject(512)], TOKENS, SHARED)
    assert {(id(c.subject), c.tokens) for c in todo} == {(id(c.subject), n) for c in todo for n in TOKENS}
    for cell in todo:
        found = cell.all_tiles()
        assert 8 < len(found) < 40
        for tiles in found:
            if isinstance(tiles, DecodeTiles):
                assert tiles.router.warps == tiles.dense_gate_up.warps
                assert tiles.down.warps == tiles.dense_down.warps
            else:
                # of both kernels; each was looked at alone
                # of both kernels; each was looked at alone
                assert moe_tiles.shared_bytes(tiles, cell.subject.shape) <= 2 * SHARED


@pytest.mark.parametrize("tokens", [1, 64])
def test_the_search_finds_the_best_of_each_kernel(tokens):
    """With times that are known: a penalty for each field that differs from the best."""
    (cell,) = experts_search.cells([subject(512)], [tokens], SHARED)
    best = cell.start
    for stage in cell.stages:
        if "rows" not in stage[0]:
            best = best._replace(**stage[-1])

    def seconds(_subject, _tokens, tiles):
        return 1 + sum(getattr(tiles, name) != getattr(best, name) for name in best._fields)

    ready = experts_search.Ready(seconds, lambda *_: True)
    ((_, measured, row),) = experts_search.search([cell], ready, 1000)
    assert measured.tiles == best
    assert measured.dense_width == (512 if tokens == 1 else None)
    assert row["us"] == 1e6
    assert row["us_by_rule"] == seconds(None, None, cell.start) * 1e6


def test_what_cannot_be_compiled_is_passed_over():
    (cell,) = experts_search.cells([subject()], [1], SHARED)
    change = next(c for c in cell.stages[0] if c["gate_up"].block_n == 8)
    there = cell.start, cell.start._replace(**change)
    ready = experts_search.Ready(lambda _s, _t, tiles: tiles.gate_up.block_n, lambda _s, _t, tiles: tiles in there)
    ((_, measured, row),) = experts_search.search([cell], ready, 1000)
    assert row["tried"] == 2
    assert measured.tiles == cell.start


def test_a_search_ends_with_its_budget():
    todo = experts_search.cells([subject()], [1, 64], SHARED)
    assert list(experts_search.search(todo, experts_search.Ready(lambda *_: 1.0, lambda *_: True), 0)) == []
