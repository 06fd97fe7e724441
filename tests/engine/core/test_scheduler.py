"""The scheduler against a machine that can only answer right if every page is right. No torch, milliseconds."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_machine import PAGE_SIZE, VOCAB, PagedMachine, expected_tokens

from engine.config import EngineConfig
from engine.core.kv.spec import CacheMemory
from engine.core.loop import EngineCore
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, FinishReason
from engine.errors import InvalidRequestError

EOS = frozenset({3})
MAX_LEN = 160


def make_core(num_pages=40, max_num_seqs=8, budget=32, depth=1, **config) -> EngineCore:
    memory = CacheMemory.of_pages(num_pages - 1, PAGE_SIZE)
    machine = PagedMachine(memory, max_num_seqs + 1, MAX_LEN)
    return EngineCore(
        EngineConfig("none", **config), machine, memory=memory, max_model_len=MAX_LEN,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, vocab_size=VOCAB, eos_token_ids=EOS, depth=depth,
    )


class Collector:
    """Steps a core to the end, checking invariants after every step and gathering what came out."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.cached: dict[str, int] = {}
        self.prompt_logprobs: dict[str, list] = {}

    def step(self) -> None:
        for out in self.core.step():
            assert out.request_id not in self.reasons, "output after the end"
            self.tokens.setdefault(out.request_id, []).extend(out.new_token_ids)
            self.cached[out.request_id] = max(self.cached.get(out.request_id, 0), out.num_cached_tokens)
            if out.prompt_logprobs is not None:
                assert out.request_id not in self.prompt_logprobs, "they come once"
                self.prompt_logprobs[out.request_id] = out.prompt_logprobs
            if out.finish_reason:
                self.reasons[out.request_id] = out.finish_reason
        self.core.check()

    def drain(self, limit=20_000) -> None:
        while self.core.has_work():
            self.step()
            limit -= 1
            assert limit, "the engine does not come to an end"


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(11, 60),
    budget=st.integers(1, 70),
    max_num_seqs=st.integers(1, 9),
    depth=st.sampled_from([1, 2, 3]),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.booleans(),
    chunked=st.booleans(),
)
def test_every_request_gets_the_tokens_it_would_get_alone(
    seed, num_pages, budget, max_num_seqs, depth, policy, caching, chunked
):
    rng = random.Random(seed)
    core = make_core(num_pages, max_num_seqs, budget, depth, scheduling_policy=policy, enable_prefix_caching=caching,
                     enable_chunked_prefill=chunked)
    run = Collector(core)
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 100))] for _ in range(3)]
    requests: dict[str, EngineRequest] = {}
    aborted = set()
    for i in range(rng.randrange(1, 25)):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(1, len(stem) + 1)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 20))]
        params = SamplingParams(
            max_tokens=rng.choice([None, 1, 2, rng.randrange(1, 60)]),
            ignore_eos=rng.random() < 0.5, stop_token_ids=[rng.randrange(VOCAB)] if rng.random() < 0.3 else [],
            prompt_logprobs=1 if rng.random() < 0.3 else None,
        )
        request = EngineRequest(f"r{i}", prompt, params, priority=rng.randrange(3), owner=rng.choice("abc"))
        core.add_request(request)
        requests[request.request_id] = request
        for _ in range(rng.randrange(3)):
            run.step()
        if rng.random() < 0.15:
            victim = rng.choice(list(requests))
            aborted.add(victim)
            core.abort([victim])
            core.check()
    run.drain()
    assert core.kv.pool.num_in_use == 0
    for rid, request in requests.items():
        expected = expected_tokens(request.prompt_token_ids, request.params, EOS, MAX_LEN)
        got = run.tokens.get(rid, [])
        if run.reasons[rid] is FinishReason.ABORT:
            assert rid in aborted
            assert got == expected[: len(got)]
        else:
            assert got == expected
        if got and request.params.prompt_logprobs is not None:
            assert_all_scored(request.prompt_token_ids, run.prompt_logprobs[rid])


def assert_all_scored(prompt, logprobs):
    assert logprobs[0] is None
    assert [(entry.token_id, -entry.logprob) for entry in logprobs[1:]] == [(t, i) for i, t in enumerate(prompt)][1:]


def test_prompt_logprobs_are_whole_when_the_last_chunk_is_preempted_in_flight():
    core = make_core(num_pages=16, budget=77, depth=2)
    run = Collector(core)
    prompt = [i % VOCAB for i in range(96)]
    core.add_request(EngineRequest("first", [1] * 20, SamplingParams(max_tokens=30, ignore_eos=True)))
    core.add_request(EngineRequest("asks", prompt, SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=1)))
    seq = core.scheduler.seqs["asks"]
    while seq.num_computed_tokens < len(prompt):
        run.step()
    assert seq.num_placeholders == 1, "the last chunk is in flight"
    core.scheduler._preempt(seq)
    run.drain()
    assert_all_scored(prompt, run.prompt_logprobs["asks"])
    assert run.tokens["asks"] == expected_tokens(prompt, seq.params, EOS, MAX_LEN)


def test_overlap_keeps_two_steps_in_flight():
    core = make_core(depth=2)
    core.add_request(EngineRequest("a", [1, 2], SamplingParams(max_tokens=5, ignore_eos=True)))
    assert core.step() == []  # launched, not read
    assert [o.new_token_ids for o in core.step()]
    assert core.runner.launched == 2


def test_preemption_happens_and_is_counted():
    core = make_core(num_pages=13, budget=64)
    run = Collector(core)
    for i in range(4):
        core.add_request(EngineRequest(f"r{i}", [i] * 20, SamplingParams(max_tokens=100, ignore_eos=True)))
    run.drain()
    assert core.stats().num_preemptions > 0
    assert all(len(t) == 100 for t in run.tokens.values())


def test_second_sighting_of_a_prompt_hits_all_but_the_last_page():
    core = make_core()
    run = Collector(core)
    prompt = list(range(50))
    for rid in ("first", "second"):
        core.add_request(EngineRequest(rid, prompt, SamplingParams(max_tokens=1)))
        run.drain()
    assert run.cached["first"] == 0
    assert run.cached["second"] == 48
    core.add_request(EngineRequest("exact", prompt[:48], SamplingParams(max_tokens=1)))
    run.drain()
    assert run.cached["exact"] == 32, "the page of the last token is computed again: its logits are needed"


def test_equal_prompts_of_one_step_share_pages():
    core = make_core(budget=200)
    prompt = list(range(64))
    for i in range(3):
        core.add_request(EngineRequest(f"r{i}", prompt, SamplingParams(max_tokens=4, ignore_eos=True)))
    core.step()
    assert core.kv.pool.num_in_use <= 4 + 3 * 2
    Collector(core).drain()


def test_a_salt_separates_tenants():
    core = make_core()
    run = Collector(core)
    prompt = list(range(40))
    for rid, salt in (("a", "tenant-1"), ("b", "tenant-2"), ("c", "tenant-1")):
        core.add_request(EngineRequest(rid, prompt, SamplingParams(max_tokens=1), cache_salt=salt))
        run.drain()
    assert (run.cached["b"], run.cached["c"]) == (0, 32)


def test_priority_goes_first():
    core = make_core(max_num_seqs=1, scheduling_policy="priority")
    order = []
    for rid, priority in (("low", 5), ("mid", 3), ("high", 0)):
        core.add_request(EngineRequest(rid, [1], SamplingParams(max_tokens=2, ignore_eos=True), priority=priority))
    while core.has_work():
        order += [o.request_id for o in core.step() if o.finish_reason]
    assert order == ["high", "mid", "low"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failing_step_fails_its_requests_only(depth):
    core = make_core(max_num_seqs=2, depth=depth, budget=64)
    core.runner.fail_steps = {3}
    run = Collector(core)
    for i in range(4):
        core.add_request(EngineRequest(f"r{i}", [7] * 40, SamplingParams(max_tokens=8, ignore_eos=True)))
    run.drain()
    failed = {r for r, reason in run.reasons.items() if reason is FinishReason.ERROR}
    assert failed == {"r0", "r1"}
    good = expected_tokens([7] * 40, SamplingParams(max_tokens=8, ignore_eos=True), EOS, MAX_LEN)
    assert run.tokens["r2"] == run.tokens["r3"] == good
    assert run.cached["r2"] == 0, "pages of a failed step must not be found again"
    assert core.stats().step_failures == 1


@pytest.mark.parametrize(
    "request_, code",
    [
        (EngineRequest("x", [], SamplingParams()), None),
        (EngineRequest("x", [VOCAB], SamplingParams()), None),
        (EngineRequest("x", [-1], SamplingParams()), None),
        (EngineRequest("x", [1] * MAX_LEN, SamplingParams()), "context_length_exceeded"),
        (EngineRequest("x", [1], SamplingParams(logit_bias={VOCAB: 1})), None),
    ],
)
def test_impossible_requests_are_refused_at_the_door(request_, code):
    core = make_core()
    with pytest.raises(InvalidRequestError) as refusal:
        core.add_request(request_)
    assert refusal.value.code == code
    assert not core.has_work()


def test_waste_is_at_most_a_page_per_sequence():
    core = make_core(num_pages=60, budget=64)
    for i in range(8):
        core.add_request(EngineRequest(f"r{i}", [i] * (10 + i), SamplingParams(max_tokens=30, ignore_eos=True)))
    while core.has_work():
        core.step()
        allocated, written = core.scheduler.waste()
        assert allocated - written < PAGE_SIZE * max(1, len(core.scheduler.running))
