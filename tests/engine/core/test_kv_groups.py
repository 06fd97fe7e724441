"""Groups of pages, windows and state slots in one arena: whatever is admitted, grown, preempted or aborted, every
request gets the tokens it would get alone, and every slab, page and slot has one owner."""

import random
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paged_machine import PAGE_SIZE, VOCAB, PagedMachine, expected_tokens, next_token

from engine.config import EngineConfig
from engine.core.kv import manager
from engine.core.kv.spec import CacheMemory
from engine.core.loop import EngineCore
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, FinishReason

MAX_LEN = 160
NO_EOS: frozenset[int] = frozenset()

KINDS = {  # windows, has_state, units of each kind in a slab
    "window": ((40,), False, (1,)),
    "narrow window": ((17,), False, (1,)),
    "full+window": ((None, 40), False, (5, 1)),
    "full+window, small": ((None, 17), False, (2, 3)),
    "full+state": ((None,), True, (4, 1)),
    "full+state, many slots": ((None,), True, (2, 3)),
    "full+window+state": ((None, 33), True, (3, 2, 1)),
}
RUNS = {"full+window": (5, 1), "full+window, small": (1, 3)}  # of numbers, where a slab has more than one of a kind


def make_core(
    kinds: str, slabs: int, *, max_num_seqs=8, budget=32, depth=1, max_model_len=MAX_LEN, **config
) -> EngineCore:
    windows, has_state, per_slab = KINDS[kinds]
    if len(per_slab) == 1:
        memory = CacheMemory(PAGE_SIZE, windows, has_state, (slabs,), 1)
    else:
        memory = CacheMemory(PAGE_SIZE, windows, has_state, per_slab, slabs, 16, RUNS.get(kinds, ()))
    machine = PagedMachine(memory, max_num_seqs + 1, max_model_len)
    return EngineCore(
        EngineConfig(Path("none"), **config), machine, memory=memory, max_model_len=max_model_len,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, vocab_size=VOCAB, depth=depth,
    )  # fmt: skip


def fewest_slabs(kinds: str, budget: int) -> int:
    windows, has_state, per_slab = KINDS[kinds]
    return CacheMemory(PAGE_SIZE, windows, has_state, per_slab, 0).slabs_for(MAX_LEN, budget)


def cached(core: EngineCore, prompt: list[int]) -> int:
    """Runs a prompt to its first token; how much of it was found in the cache."""
    core.add_request(EngineRequest("r", prompt, SamplingParams(max_tokens=1)))
    found = 0
    while core.has_work():
        for out in core.step():
            found = max(found, out.num_cached_tokens)
            windows, has_state = core.kv.memory.windows, core.kv.memory.has_state
            assert out.new_token_ids == [next_token(prompt, windows, has_state)]
        core.check()
    return found


def step(core: EngineCore, tokens: dict, last: dict) -> None:
    for out in core.step():
        assert out.error is None, out.error
        tokens.setdefault(out.request_id, []).extend(out.new_token_ids)
        if out.finish_reason:
            last[out.request_id] = out
    core.check()


@settings(max_examples=120, deadline=None)
@given(
    kinds=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 2**32),
    more=st.integers(0, 12),
    budget=st.integers(1, 140),
    max_num_seqs=st.integers(1, 9),
    depth=st.sampled_from([1, 2, 3]),
    caching=st.booleans(),
)
# A waiting sequence fits because pages of its hit were lost.
@example(kinds="narrow window", seed=3, more=3, budget=8, max_num_seqs=3, depth=1, caching=True)
def test_every_request_gets_the_tokens_it_would_get_alone(kinds, seed, more, budget, max_num_seqs, depth, caching):
    rng = random.Random(seed)
    core = make_core(kinds, fewest_slabs(kinds, budget) + more, max_num_seqs=max_num_seqs, budget=budget,
                     depth=depth, enable_prefix_caching=caching)  # fmt: skip
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 100))] for _ in range(3)]
    requests: dict[str, EngineRequest] = {}
    tokens: dict[str, list[int]] = {}
    last: dict = {}
    for i in range(rng.randrange(1, 20)):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(1, len(stem) + 1)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 20))]
        params = SamplingParams(max_tokens=rng.choice([None, 1, 2, rng.randrange(1, 60)]))
        request = requests[f"r{i}"] = EngineRequest(f"r{i}", prompt, params)
        core.add_request(request)
        for _ in range(rng.randrange(4)):
            step(core, tokens, last)
        if rng.random() < 0.15:
            core.abort([rng.choice(list(requests))])
            core.check()
        if rng.random() < 0.05:
            core.reset_prefix_cache()
    limit = 20_000
    while core.has_work():
        step(core, tokens, last)
        limit -= 1
        assert limit, "the engine does not come to an end"
    windows, has_state, _ = KINDS[kinds]
    for rid, request in requests.items():
        expected = expected_tokens(request.prompt_token_ids, request.params, NO_EOS, MAX_LEN, windows, has_state)
        got = tokens.get(rid, [])
        assert got == expected[: len(got)]
        assert last[rid].finish_reason is FinishReason.ABORT or len(got) == len(expected)


def test_a_window_hits_with_the_pages_of_its_end():
    core = make_core("full+window", 60)
    prompt = list(range(90))
    assert cached(core, prompt) == 0
    assert cached(core, prompt) == 80
    assert cached(core, [*prompt[:70], 1]) == 64, "pages that the window had left behind"
    window = core.kv.pools[1]
    window.forget(list(window._page_of.values())[:2])
    assert cached(core, prompt) == 80, "nobody needs the first pages of the window"
    window.forget(list(window._page_of.values())[-1:])
    assert cached(core, prompt) < 80


def test_the_slots_of_running_requests_are_counted():
    kinds = next(name for name, (_, has_state, _) in KINDS.items() if has_state)
    core = make_core(kinds, 60)
    assert (core.stats().slots_total > 0, core.stats().slots_in_use) == (True, 0)
    for number in range(3):
        core.add_request(EngineRequest(str(number), [number] * 8, SamplingParams(max_tokens=4)))
    core.step()
    assert core.stats().slots_in_use >= 3
    while core.has_work():
        core.step()
    assert core.stats().slots_in_use == 0
    assert make_core("full+window", 60).stats().slots_total == 0, "no layer keeps a state"


def prefill(core: EngineCore, prompt: list[int], max_tokens: int = 1) -> list[int]:
    """Runs a prompt; how many pages of the window's group were in use after each step."""
    core.add_request(EngineRequest("p", prompt, SamplingParams(max_tokens=max_tokens)))
    used, got = [], []
    while core.has_work():
        for out in core.step():
            got += out.new_token_ids
        core.check()
        used.append(core.kv.pools[-1].num_in_use)
    windows = core.kv.memory.windows
    assert got == expected_tokens(prompt, SamplingParams(max_tokens=max_tokens), NO_EOS, MAX_LEN, windows)
    return used


@pytest.mark.parametrize("kinds, slabs, few", [("window", 8, 8), ("full+window", 10, 8)])
def test_where_pages_are_short_a_long_chunk_takes_those_that_will_be_seen(kinds, slabs, few):
    """Ten pages of prompt, a window of three. With room enough all are taken, for the prefix cache."""
    prompt = [i * i % VOCAB for i in range(150)]
    assert max(prefill(make_core(kinds, 40, budget=150), prompt, 2)) == 10
    core = make_core(kinds, slabs, budget=150)
    assert max(prefill(core, prompt, 2)) <= few
    assert cached(core, prompt) == 144, "the end of the chunk has all that its window sees"
    assert cached(core, [*prompt[:60], 1]) == 0, "what the window had passed was never kept"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_chunks_follow_each_other_where_pages_are_short(depth):
    """Each reads the end of the one before it from pages, and its own tokens from the step."""
    assert fewest_slabs("narrow window", 70) == 4
    core = make_core("narrow window", 4, budget=70, depth=depth)
    prompt = [i * i % VOCAB for i in range(140)]
    assert max(prefill(core, prompt, 12)) <= 4


def test_a_request_that_ends_or_fails_in_such_a_step_gives_all_back():
    prompt = [i * i % VOCAB for i in range(150)]
    core = make_core("full+window", 10, budget=150)
    core.add_request(EngineRequest("aborted", prompt, SamplingParams(max_tokens=5)))
    core.step()
    assert 0 in core.scheduler.running[0].tables[1], "there is a hole"
    core.abort(["aborted"])
    while core.has_work():
        core.step()
    core.check()
    assert not any(pool.num_in_use for pool in core.kv.pools)
    core.reset_prefix_cache()
    core.runner.fail_steps = {core.runner.launched}  # type: ignore[attr-defined]
    core.add_request(EngineRequest("failed", prompt, SamplingParams(max_tokens=5)))
    while core.has_work():
        core.step()
    core.check()
    assert not any(pool.num_in_use for pool in core.kv.pools)
    assert cached(core, prompt) == 0


def test_a_state_is_found_where_a_prompt_ended():
    core = make_core("full+state", 12)
    prompt = list(range(90))
    assert cached(core, prompt) == 0
    assert cached(core, prompt) == 80
    assert cached(core, [*prompt, 1, 2, 3]) == 80
    core.reset_prefix_cache()
    assert cached(core, prompt) == 0


def test_a_short_prompt_is_not_cut_for_its_state(monkeypatch):
    """Keeping the state before its last tokens would take a step more, for tokens that are computed in one anyway."""
    monkeypatch.setattr(manager, "WORTH_A_STEP", 64)
    core = make_core("full+state", 40)
    short, long = list(range(60)), list(range(90, 20, -1))
    assert [cached(core, short), cached(core, short)] == [0, 0]
    assert [cached(core, long), cached(core, long)] == [0, 64]
    # A hit is not followed by another state close behind it.
    assert [cached(core, [*long[:64], *[9] * 40]) for _ in range(2)] == [64, 64]
    # Where prompts were the same so far, a state is kept all the same: there may be many more.
    assert [cached(core, [*short[:50], *[tail] * 9]) for tail in (1, 2)] == [48, 48]


def test_a_state_is_kept_where_prompts_part():
    """The second prompt finds pages but no state; the third finds what the second left at that point."""
    core = make_core("full+state", 12)
    stem = list(range(50))
    assert [cached(core, [*stem, *[tail] * 40]) for tail in (1, 2, 3)] == [0, 0, 48]


def test_a_repeated_prefix_of_8k_tokens_hits_on_its_second_sighting():
    core = make_core("full+state", 300, budget=1000, max_model_len=10_000)
    stem = [i * i % VOCAB for i in range(8192)]
    assert cached(core, [*stem, *[1] * 500]) == 0
    assert cached(core, [*stem, *[2] * 500]) == 8192
    again = make_core("full+state", 300, budget=1000, max_model_len=10_000)
    assert cached(again, [*stem[:8100], *[1] * 500]) == 0
    assert cached(again, [*stem[:8100], *[2] * 500]) == 6144
    assert cached(again, [*stem[:8100], *[3] * 500]) == 8096


def test_a_path_keeps_a_bounded_number_of_states():
    core = make_core("full+state", 1500, budget=1000, max_model_len=70_000)
    cached(core, [i * i % VOCAB for i in range(60_000)])
    assert core.kv.slots is not None
    assert 6 <= core.kv.slots.num_free <= 10


def test_states_wait_for_no_one_and_make_room():
    """Prompts beyond what the arena can remember: old states and old pages go, requests never wait for them."""
    core = make_core("full+state", 6)
    for i in range(30):
        assert cached(core, [i] * 60) == 0
    assert cached(core, [29] * 60) == 48, "the newest is remembered"


def test_a_state_of_a_failed_step_is_not_found():
    core = make_core("full+state", 12, budget=200)
    core.runner.fail_steps = {1}  # type: ignore[attr-defined]
    prompt = list(range(90))
    core.add_request(EngineRequest("bad", prompt, SamplingParams(max_tokens=1)))
    outputs = []
    while core.has_work():
        outputs += core.step()
    assert outputs[-1].error
    assert cached(core, prompt) == 0
