"""Requests for embeddings in the scheduler: nothing is sampled, and paging, sharing and preemption change no vector."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_machine import PAGE_SIZE, VOCAB, PagedMachine, absorb, expected_tokens

from engine.config import EngineConfig
from engine.core.kv.spec import CacheMemory
from engine.core.loop import EngineCore
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, FinishReason
from engine.errors import InvalidRequestError

MAX_LEN = 160


def make_core(num_pages=40, *, max_num_seqs=8, budget=32, depth=1, state=False, **config) -> EngineCore:
    memory = CacheMemory.of_pages(num_pages - 1, PAGE_SIZE)
    if state:
        memory = CacheMemory(PAGE_SIZE, (None,), True, (1, 1), num_pages - 1)
    machine = PagedMachine(memory, max_num_seqs + 1, MAX_LEN)
    return EngineCore(
        EngineConfig("none", **config), machine, memory=memory, max_model_len=MAX_LEN,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, vocab_size=VOCAB, depth=depth,
    )


def embedding(prompt, pooling, state=False):
    """What the machine must answer."""
    return repr(prompt if pooling == "mean" else ([prompt], absorb(0, prompt) if state else 0)).encode()


def pooled(name, prompt, pooling="last", **settings):
    return EngineRequest(name, prompt, SamplingParams(), pooling=pooling, **settings)


def drain(core, found, limit=20_000):
    while core.has_work():
        for out in core.step():
            found.setdefault(out.request_id, []).append(out)
        core.check()
        limit -= 1
        assert limit, "the engine does not come to an end"


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32), num_pages=st.integers(11, 60), budget=st.integers(1, 70),
    max_num_seqs=st.integers(1, 9), depth=st.sampled_from([1, 2, 3]), caching=st.booleans(), chunked=st.booleans(),
)  # fmt: skip
def test_embeddings_and_answers_are_those_of_a_request_alone(
    seed, num_pages, budget, max_num_seqs, depth, caching, chunked
):
    rng = random.Random(seed)
    core = make_core(num_pages, max_num_seqs=max_num_seqs, budget=budget, depth=depth, enable_prefix_caching=caching,
                     enable_chunked_prefill=chunked)
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 120))] for _ in range(3)]
    requests, aborted, found = {}, set(), {}
    for i in range(rng.randrange(1, 25)):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(1, len(stem) + 1)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 20))]
        params = SamplingParams(max_tokens=rng.randrange(1, 40), ignore_eos=True)
        request = EngineRequest(f"r{i}", prompt, params, pooling=rng.choice([None, "last", "mean"]))
        core.add_request(request)
        requests[request.request_id] = request
        for _ in range(rng.randrange(3)):
            for out in core.step():
                found.setdefault(out.request_id, []).append(out)
            core.check()
        if rng.random() < 0.15:
            aborted.add(victim := rng.choice(list(requests)))
            core.abort([victim])
    drain(core, found)
    assert core.kv.pool.num_in_use == 0
    for name, request in requests.items():
        *_, last = found[name]
        if last.finish_reason is FinishReason.ABORT:
            assert name in aborted
        elif request.pooling is None:
            tokens = [token for out in found[name] for token in out.new_token_ids]
            assert tokens == expected_tokens(request.prompt_token_ids, request.params, frozenset(), MAX_LEN)
        else:
            assert found[name] == [last], "an embedding comes once"
            assert last.finish_reason is FinishReason.STOP
            assert last.new_token_ids == []
            assert last.embedding == embedding(request.prompt_token_ids, request.pooling)
            assert last.times.scheduled <= last.times.first_token <= last.times.finished


@pytest.mark.parametrize(("pooling", "cached"), [("last", 48), ("mean", 0)])
def test_the_last_token_may_hit_the_prefix_cache_and_a_mean_may_not(pooling, cached):
    core, found = make_core(), {}
    prompt = list(range(50))
    for name in ("first", "second"):
        core.add_request(pooled(name, prompt, pooling))
        drain(core, found)
    assert found["second"][0].num_cached_tokens == cached
    assert found["second"][0].embedding == found["first"][0].embedding == embedding(prompt, pooling)


def test_what_an_embedding_computed_serves_a_chat():
    core, found = make_core(), {}
    prompt = list(range(50))
    core.add_request(pooled("first", prompt, "mean"))
    drain(core, found)
    core.add_request(EngineRequest("chat", prompt, SamplingParams(max_tokens=1)))
    drain(core, found)
    assert found["chat"][0].num_cached_tokens == 48


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_preempted_embedding_begins_again(pooling, at_the_end):
    core, found = make_core(budget=20, depth=2, enable_prefix_caching=False), {}
    prompt = [i % VOCAB for i in range(96)]
    core.add_request(pooled("r", prompt, pooling))
    seq = core.scheduler.seqs["r"]
    while seq.num_computed_tokens < (96 if at_the_end else 40):
        assert core.step() == []
    core.scheduler._preempt(seq)
    drain(core, found)
    assert [out.embedding for out in found["r"]] == [embedding(prompt, pooling)]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_states_of_recurrent_layers_are_kept_for_the_next_prompt(pooling):
    core, found = make_core(state=True, budget=200), {}
    prompt = [i % VOCAB for i in range(130)]
    for name in ("first", "second"):
        core.add_request(pooled(name, prompt, pooling))
        drain(core, found)
        assert found[name][0].embedding == embedding(prompt, pooling, state=True)
    assert (found["second"][0].num_cached_tokens > 0) == (pooling == "last")


def test_an_embedding_may_fill_the_whole_context():
    core, found = make_core(), {}
    core.add_request(pooled("r", [5] * MAX_LEN))
    drain(core, found)
    assert found["r"][0].embedding == embedding([5] * MAX_LEN, "last")
    with pytest.raises(InvalidRequestError) as refusal:
        core.add_request(pooled("r", [5] * (MAX_LEN + 1)))
    assert (refusal.value.param, refusal.value.code) == ("input", "context_length_exceeded")


def test_prompt_tokens_are_counted_and_no_generated_ones():
    core = make_core()
    core.add_request(pooled("r", [5] * 30))
    drain(core, {})
    stats = core.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (30, 0)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_failing_step_fails_an_embedding_and_no_other(pooling):
    core, found = make_core(max_num_seqs=1, budget=20), {}
    core.runner.fail_steps = {1}
    prompt = [7] * 50
    for name in ("bad", "good"):
        core.add_request(pooled(name, prompt, pooling))
    drain(core, found)
    assert found["bad"][0].finish_reason is FinishReason.ERROR
    assert found["good"][0].embedding == embedding(prompt, pooling)
