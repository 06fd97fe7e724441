"""No legal step is too large for the GPU runner's buffers, however many words it changes and however it is made up.

The real scheduler plans, the real runner packs, on a CPU; see plan_steps.py.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from forks import Forks

pytest.importorskip("triton")

from engine.kernels.recurrent.reference import CHUNK
from engine.worker.mixed_step import MOST_CHUNKS, SHAPES, MixedStep, form_of

HERE = Path(__file__).parent


Planned = Callable[..., dict[str, int]]


@pytest.fixture
def planned(interpreting: Forks) -> Planned:
    def steps(*arguments: str) -> dict[str, int]:
        done = interpreting.run(HERE / "plan_steps.py", *arguments)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return steps


@pytest.mark.parametrize("prefix", ["1024", "2100"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])  # the second has two groups of pages
def test_a_crowd_that_shares_its_prompt_fits_into_a_step(planned: Planned, family: str, prefix: str) -> None:
    seen = planned(family, "crowd", prefix)
    assert seen["sequences"] == 256
    assert seen["words"] > 256 * int(prefix), "in one step"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4-e2b", "qwen3.5-moe"])
def test_random_steps_at_the_limits_fit(planned: Planned, family: str, seed: int) -> None:
    """Small tables, budgets and pages; staging so small that steps take several copies; windows, states, preemption."""
    assert planned(family, "random", str(seed))["steps"] > 20


@pytest.mark.parametrize("size", [1, 7, 16, 64, 128])
def test_every_step_that_has_a_shape_fits_into_its_graph(size: int) -> None:
    """Its tiles, its sequences and its chunks, for tiles of any size."""
    choose = random.Random(size)
    fitted = 0
    for _ in range(600):
        singles, chunks = choose.choice([0, 1, 31, 32, 128]), choose.randint(1, MOST_CHUNKS)
        counts = np.array([1] * singles + [choose.choice([1, 2, 63, 64, 65, choose.randint(1, 90)])] * chunks)
        if not (counts > 1).any():
            continue
        rows, starts = np.arange(1, len(counts) + 1), np.array([choose.randint(0, 500) for _ in counts])
        step = MixedStep.of(rows, starts, counts, [size])
        shape = step.shape(SHAPES)
        if shape is None:
            continue
        padded, form = step.padded(shape, [size]), form_of(shape, [size])
        fitted += 1
        assert padded.form == form
        assert padded.counts.min() >= 0
        assert sum(-(-n // CHUNK) for n in padded.counts.tolist() if n > 1) <= form.chunks
        covered = np.zeros(form.tokens, dtype=int)
        covered[: shape.singles] = 1
        for seq, first in padded.tiles[0]:
            covered[padded.q_starts[seq] :][: padded.counts[seq]][first : first + size] += 1
        assert (covered == 1).all(), "every token of a chunk belongs to one tile"
    assert fitted > 100
