"""Who is served in a step: sequences that decode always, prompts from what is left, and nobody stops the others."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_machine import PAGE_SIZE, VOCAB, PagedMachine
from test_regressions import KINDS, MAX_LEN, Engine

from engine.config import EngineConfig
from engine.core.batch import StepPlan
from engine.core.kv.spec import CacheMemory
from engine.core.loop import EngineCore
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest


def watch_steps(core: EngineCore) -> list[StepPlan]:
    """From now on every step serves each sequence that decodes and has room, and puts it before chunks."""
    schedule, plans = core.scheduler.schedule, []

    def watched() -> StepPlan | None:
        ready = {
            seq for seq in core.scheduler.running
            if seq.num_tokens_to_compute == 1 and seq.num_computed_tokens < len(seq.pages) * PAGE_SIZE
        }
        plan = schedule()
        served = {seq.uid for seq in plan.seqs} if plan else set()
        missed = [s.request_id for s in ready if s.arrival_order not in served and s in core.scheduler.running]
        assert not missed, f"{missed} had room and got nothing"
        if plan:
            chunks = [seq.num_tokens > 1 for seq in plan.seqs]
            assert chunks == sorted(chunks), "a chunk comes before a sequence that decodes"
            assert plan.num_tokens <= core.scheduler.max_num_batched_tokens
            plans.append(plan)
        return plan

    core.scheduler.schedule = watched
    return plans


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 2**32), depth=st.sampled_from([1, 2, 3]),
    budget=st.integers(8, 90), spare=st.sampled_from([0, 1, 3, 8, 60]),
)  # fmt: skip
def test_no_sequence_that_decodes_is_skipped_while_it_has_room(kind, seed, depth, budget, spare):
    rng = random.Random(seed)
    windows, has_state, per_slab = KINDS[kind]
    least = CacheMemory(PAGE_SIZE, windows, has_state, per_slab, 0).slabs_for(MAX_LEN, budget)
    engine = Engine(kind, slabs=least + spare, seqs=8, budget=budget, depth=depth)
    watch_steps(engine.core)
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 150))] for _ in range(3)]
    for i in range(rng.randrange(2, 18)):
        stem = rng.choice(stems)
        engine.add(f"r{i}", stem[: rng.randrange(1, len(stem) + 1)] + [i] * rng.randrange(30), rng.choice([2, 9, 40]))
        for _ in range(rng.randrange(5)):
            engine.step()
    engine.drain()
    engine.judge()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stream_behind_a_long_prompt_gets_a_token_in_every_step(depth):
    """The state kept at 2,048 tokens cuts the prompt's fourth chunk; what that leaves admits the short request."""
    memory = CacheMemory(PAGE_SIZE, (None,), True, (16, 1), 60)
    core = EngineCore(
        EngineConfig("none"), PagedMachine(memory, 5, 8000), memory=memory, max_model_len=8000, max_num_seqs=4,
        max_num_batched_tokens=600, vocab_size=VOCAB, depth=depth,
    )  # fmt: skip
    plans = watch_steps(core)
    core.add_request(EngineRequest("long", [i % VOCAB for i in range(6000)], SamplingParams(max_tokens=3)))
    core.add_request(EngineRequest("short", [5, 6, 7], SamplingParams(max_tokens=100)))
    while core.has_work():
        core.step()
        core.check()
    behind = [plan for plan in plans if any(s.request_id == "short" for s in plan.seqs)]
    together = [plan for plan in behind if any(s.request_id == "long" and s.num_tokens > 1 for s in plan.seqs)]
    assert len(together) > 3, "the short one was admitted while the long one was computed"
    assert behind == plans[plans.index(behind[0]) :][: len(behind)], "it has a token in each step"
    assert all(plan.num_tokens == 600 for plan in together[1:3]), "the prompt has the rest of the budget"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_short_of_pages_does_not_stop_the_others(depth):
    engine = Engine("Llama", slabs=13, seqs=6, budget=64, depth=depth)  # as many pages as one request may need
    plans = watch_steps(engine.core)
    for i in range(6):
        engine.add(f"r{i}", [i] * (9 + 3 * i), 100)
    engine.drain()
    engine.judge()
    assert engine.seen["preemptions"] > 0, "pages were short"
    assert len(plans) < 2200 / depth + 1000


# -- the first waiting sequence, while it does not fit


def count_searches(core: EngineCore) -> list[str]:
    find, searched = core.kv.find_prefix, []

    def counted(seq):
        searched.append(seq.request_id)
        return find(seq)

    core.kv.find_prefix = counted
    core.check = lambda: None  # it searches, too
    return searched


@pytest.mark.parametrize("reason", ["pages", "budget"])
def test_a_blocked_request_is_not_searched_again_until_something_changes(reason):
    if reason == "pages":
        engine = Engine("Llama", slabs=14, seqs=8, budget=200)
    else:  # a prompt that must not be split waits for a step of its own
        engine = Engine("Llama", slabs=40, seqs=8, budget=20, enable_chunked_prefill=False)
    engine.add("first", [1] * 100, 8)
    engine.drain()
    engine.add("running", [2] * 17, 60)
    engine.step()
    searched = count_searches(engine.core)
    engine.add("head", [1] * 96 + [3] * 100, 4)
    steps = 0
    while engine.core.scheduler.waiting:
        engine.step()
        steps += 1
    assert steps > 50, "it was blocked"
    assert len(searched) < 5, "not searched in every step"
    engine.drain()
    engine.judge()


def test_a_blocked_request_is_admitted_once_its_prompt_is_cached_by_another():
    """Nothing is released, but what another request computes makes it fit."""
    engine = Engine("Llama", slabs=17, seqs=8, budget=48, depth=1)
    prompt = [i % VOCAB for i in range(160)]
    engine.add("computes", prompt, 30)
    engine.step()
    engine.add("shares", prompt, 30)
    engine.step()
    assert [seq.request_id for seq in engine.core.scheduler.waiting] == ["shares"], "it does not fit"
    while engine.core.scheduler.waiting:
        engine.step()
    assert "computes" not in engine.reasons, "both run"
    engine.drain()
    engine.judge()
    assert engine.cached["shares"] >= 96
