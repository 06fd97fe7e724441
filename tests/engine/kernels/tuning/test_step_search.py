"""The search for tiles in a decode step, with made-up times."""

import math

import pytest

from engine.kernels.gemm import tiles as gemm_tiles
from engine.kernels.gemm.tiles import GemmShape
from engine.kernels.moe import tiles as moe_tiles
from engine.kernels.moe.tiles import Shape
from engine.kernels.tuning import step_search
from engine.kernels.tuning.experts_search import decode_stages
from engine.kernels.tuning.step_search import Block, Stage

PRODUCTS = [GemmShape(4096, 4096, 1), GemmShape(24576, 4096, 2, True, True), GemmShape(1536, 256, 2, False, True)]
BLOCK = Block(Shape(128, 8, 2048, 768, 1), 0)
SOON = math.inf


@pytest.mark.parametrize("product", [*PRODUCTS, GemmShape(64, 2048, 2)], ids=str)
def test_candidates_read_whole_vectors(product):
    found = step_search.candidates(product)
    assert len(set(found)) == len(found) >= 4
    for tiles in found:
        each = tiles.block_n * (2 if product.gated else 1) * tiles.block_k * product.itemsize / (32 * tiles.warps)
        assert each in ((16, 32, 64, 128) if product.outputs <= 256 else (64, 128))
        assert tiles.block_k < 2 * product.inner


def stage_of(product=PRODUCTS[0], head=False):
    changes = [tiles._asdict() for tiles in step_search.candidates(product)]
    return Stage(str(product), product, changes, head)


def start_of(*products):
    return {product: gemm_tiles.by_rule(product) for product in products}


def others(product=PRODUCTS[0]):
    """The candidates that are not there at the start."""
    return [tiles for tiles in step_search.candidates(product) if tiles != gemm_tiles.by_rule(product)]


def ready_with(ms, compiled=lambda *_: True, right=lambda *_: True):
    return step_search.Ready(ms, compiled, right)


def search_one(ms, deadline=SOON, **how):
    found = step_search.search([stage_of()], start_of(PRODUCTS[0]), ready_with(ms, **how), deadline)
    return list(found)


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_the_search_finds_the_fastest_candidate(product):
    best = others(product)[-2]
    ready = ready_with(lambda chosen, _: 1.0 if chosen[product] == best else 2.0)
    (found,) = step_search.search([stage_of(product)], start_of(product), ready, SOON)
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
    found = list(step_search.search(stages, start, ready_with(ms), SOON))
    assert [each.tiles for each in found] == [first, second]
    assert [(each.row["ms_before"], each.row["ms"]) for each in found] == [(4.0, 3.0), (3.0, 2.0)]
    assert start == start_of(one, two)
    found = list(step_search.search(stages[1:], start, ready_with(ms), SOON))
    assert [each.tiles for each in found] == [other]


def test_kernels_of_a_block_get_their_tiles_one_after_the_other():
    start = moe_tiles.decode_tiles(*BLOCK[:1], 1)
    stages = [Stage(str(i), BLOCK, some) for i, some in enumerate(decode_stages(start, *BLOCK))]
    gate_up, down = stages[0].changes[2]["gate_up"], stages[1].changes[3]["down"]

    def ms(chosen, _):
        return 4.0 - (chosen[BLOCK].gate_up == gate_up) - (chosen[BLOCK].down == down)

    found = list(step_search.search(stages, {BLOCK: start}, ready_with(ms), SOON))
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
    list(step_search.search(stages, start_of(*products), ready_with(ms), SOON))
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
