"""Pages get their names when a step is planned. What a failed step did not compute is never found, and never used."""

import random

import pytest
from test_regressions import Engine

from engine.core.request import FinishReason
from engine.core.sequence import Sequence

PROMPT = [i * 7 % 97 for i in range(100)]


def start(kind: str, depth: int = 2, **fields) -> Engine:
    """Its first request's whole prompt is in flight, in step 0."""
    engine = Engine(kind, budget=200, depth=depth, **fields)
    engine.add("first", PROMPT, 20)
    engine.step()
    assert len(engine.core._in_flight) == 1
    return engine


def leave(engine: Engine, how: str) -> None:
    if how == "abort":
        engine.abort("first")
    elif how == "preemption":
        engine.core.scheduler._preempt(engine.core.scheduler.seqs["first"])


def assert_nothing_is_found(engine: Engine) -> None:
    seq = Sequence("x", None, PROMPT, 0, 0, frozenset(), frozenset(), 0, 0, "", None)  # type: ignore[arg-type]
    engine.core.kv._hasher.extend(seq)
    assert not [pool for pool in engine.core.kv.arena.pools for name in seq.page_hashes if pool.find(name)]


@pytest.mark.parametrize("kind", ["Llama", "Gemma 3", "Qwen3.5", "all"])
@pytest.mark.parametrize("how", ["abort", "preemption", "neither"])
@pytest.mark.parametrize("fault", ["step", "NaN"])
def test_pages_of_a_failed_step_are_forgotten_whoever_left_before(kind, how, fault):
    engine = Engine(kind, budget=200, depth=2)
    if fault == "step":
        engine.machine.fail_reads = {0}
    else:
        engine.machine.nan = {(0, "first"), (1, "first")}
    engine.add("first", PROMPT, 20)
    engine.step()
    leave(engine, how)
    engine.drain()
    assert engine.reasons["first"] is (FinishReason.ABORT if how == "abort" else FinishReason.ERROR)
    assert_nothing_is_found(engine)
    engine.add("next", PROMPT, 5)
    engine.drain()
    assert engine.cached["next"] == 0
    engine.judge()


@pytest.mark.parametrize("kind", ["Llama", "Gemma 3", "all"])
@pytest.mark.parametrize("how", ["abort", "neither"])
def test_who_found_pages_of_a_step_that_fails_does_not_go_on_with_them(kind, how):
    engine = start(kind)
    engine.machine.fail_reads = {0}
    leave(engine, how)
    engine.add("follower", [*PROMPT, 1, 2, 3], 9)
    engine.drain()
    assert engine.reasons["follower"] is FinishReason.ERROR, "it was in the step behind"
    engine.judge()


@pytest.mark.parametrize("kind", ["Llama", "Gemma 3", "all"])
@pytest.mark.parametrize("how", ["abort", "neither"])
def test_who_found_pages_of_a_sequence_with_nan_computes_them_itself(kind, how):
    engine = Engine(kind, budget=200, depth=1)
    engine.machine.nan = {(0, "first")}
    engine.add("first", PROMPT, 9)
    engine.add("beside", [*PROMPT, 1, 2, 3], 9)
    forward = engine.machine.forward

    def heal(plan):  # the same step's follower would have NaN, too; it is asked for the time after it
        result = forward(plan)
        if plan.step_id == 0 and how == "abort":
            engine.abort("first")
        return result

    engine.machine.forward = heal
    engine.drain()
    assert engine.reasons["beside"] is FinishReason.LENGTH
    assert engine.core.stats().num_preemptions == (kind != "all"), "states are not shared within a step"
    engine.judge()


@pytest.mark.parametrize("depth", [2, 3])
def test_a_new_request_with_an_old_id_does_not_die_of_its_error(depth):
    engine = Engine("Llama", seqs=1, budget=200, depth=depth)
    engine.machine.fail_reads = {1}
    engine.add("same", PROMPT, 50)
    engine.step()
    engine.step()
    assert len(engine.core._in_flight) >= 1
    engine.abort("same")
    engine.core._pending.clear()  # as if the front end had read it
    engine.add("same", [9] * 33, 12)
    engine.drain()
    assert engine.core.stats().step_failures == 1
    assert engine.reasons["same"] is FinishReason.LENGTH
    engine.judge()


def test_slabs_of_a_step_that_was_not_launched_are_named_again():
    """Their next owner would find what pages of another kind left there."""
    engine = Engine("all", slabs=40, seqs=3, budget=64, depth=1)
    rng, notes, taken = random.Random(5), [], set()
    forward = engine.machine.forward

    def note(plan):
        if plan.moved_slabs and not notes:
            notes.append(plan.moved_slabs)
            raise RuntimeError("injected fault")
        taken.update(plan.moved_slabs)
        return forward(plan)

    engine.machine.forward = note
    for i in range(60):
        engine.add(f"r{i}", [rng.randrange(97) for _ in range(rng.randrange(1, 150))], rng.choice([1, 40]))
        for _ in range(4):
            engine.step()
    engine.drain()
    engine.judge()
    assert notes, "slabs change hands"
    assert set(notes[0]) <= taken
