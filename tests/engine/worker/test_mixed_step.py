"""Steps with prompts as numbers: what belongs to whom, before and after they are filled up to a graph's size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

TILES = (16, 64)


@pytest.fixture(scope="module")
def mixed():
    """Imported when a test runs, not when it is collected: the tests of the kernels set Triton's mode before that."""
    return pytest.importorskip("engine.worker.mixed_step", reason="needs Triton")


def make(mixed, singles: list[int], chunks: list[tuple[int, int]]):
    """Sequences that decode, by their positions; chunks, by the position of their first token and their length."""
    starts = np.array([*singles, *(start for start, _ in chunks)])
    counts = np.array([1] * len(singles) + [count for _, count in chunks])
    return mixed.MixedStep.of(np.arange(len(starts)) + 1, starts, counts, TILES)


@given(
    singles=st.lists(st.integers(0, 5000), max_size=128),
    chunks=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 90)), min_size=1, max_size=7),
)
def test_what_fills_a_step_up_leaves_it_as_it_is(mixed, singles, chunks):
    chunks[0] = chunks[0][0], chunks[0][1] + 1  # else it would be one of the others
    step = make(mixed, singles, chunks)
    shape = step.shape(mixed.SHAPES)
    tokens = sum(count for _, count in chunks)
    if shape is None:
        assert tokens > 512
        return
    assert shape.singles >= len(singles)
    assert shape.tokens >= tokens
    padded, form = step.padded(shape, TILES), mixed.form_of(shape, TILES)
    assert padded.form == form
    assert padded.counts.sum() == form.tokens
    kept = [*range(len(singles)), *range(shape.singles, shape.singles + len(chunks))]
    for ours, filled in ((step.rows, padded.rows), (step.starts, padded.starts), (step.counts, padded.counts)):
        assert (filled[kept] == ours).all()
        added = np.delete(filled, kept)
        assert filled is padded.counts or (added == 0).all(), "all that is added belongs to row 0, from position 0 on"
    assert (padded.counts[: shape.singles] == 1).all()
    assert (padded.q_starts[kept][: len(singles)] == np.arange(len(singles))).all()
    assert padded.q_starts[kept][len(singles)] == shape.singles
    for size, own, tiles in zip(TILES, step.tiles, padded.tiles, strict=True):
        # Each chunk's tokens are covered once, in the padded step as well; what is left over lies behind every chunk.
        for which, found in ((step, own), (padded, tiles)):
            seen = np.zeros(which.counts.sum(), dtype=int)
            for sequence, first in found:
                if first < which.counts[sequence]:
                    at = which.q_starts[sequence] + first
                    seen[at : which.q_starts[sequence] + min(first + size, which.counts[sequence])] += 1
            assert (seen[: which.singles] == 0).all()
            assert (seen[which.singles :] == 1).all()
    several = padded.counts[padded.counts > 1]
    assert (-(-several // 64)).sum() <= form.chunks


def test_shapes_go_from_small_to_large_and_have_more_tokens_than_sequences(mixed):
    sizes = [shape.singles + shape.tokens for shape in mixed.SHAPES]
    for shape in mixed.SHAPES:
        larger = [s for s in mixed.SHAPES if s.singles >= shape.singles and s.tokens >= shape.tokens]
        assert larger[0] == shape, "the first that has room is the smallest"
        assert mixed.form_of(shape, TILES).sequences < shape.singles + shape.tokens
    assert max(sizes) == sizes[-1], "the largest one is recorded first: its memory serves the others"


def test_steps_beyond_all_shapes_have_none(mixed):
    shapes = mixed.SHAPES
    assert make(mixed, [], [(0, 513)]).shape(shapes) is None
    assert make(mixed, [5] * 129, [(0, 20)]).shape(shapes) is None
    assert make(mixed, [5] * 33, [(0, 20)]).shape(shapes) == mixed.MixedShape(128, 128)
    assert make(mixed, [], [(0, 2)] * 8).shape(shapes) is None
    assert make(mixed, [], [(0, 2)] * 7).shape(shapes) == mixed.MixedShape(0, 32)
    assert make(mixed, [5], [(0, 20)]).shape(shapes) == mixed.MixedShape(32, 128)


def test_a_small_server_has_only_the_shapes_that_its_steps_can_have(mixed):
    assert mixed.shapes_within(8192, 1024) == list(mixed.SHAPES)
    assert mixed.shapes_within(256, 1024) == [(0, 32), (0, 128), (0, 256), (32, 128), (128, 128)]
    assert mixed.shapes_within(256, 32) == [(0, 32), (0, 128), (0, 256)]
    assert mixed.shapes_within(16, 4) == []


def test_a_step_of_padding_is_of_its_shape(mixed):
    shape = mixed.MixedShape(32, 128)
    step = mixed.MixedStep.of_padding(shape, TILES)
    assert step.form == mixed.form_of(shape, TILES)
    assert not step.rows.any()
    assert not step.starts.any()
    assert step.counts.tolist() == [1] * 32 + [128] + [0] * 7
