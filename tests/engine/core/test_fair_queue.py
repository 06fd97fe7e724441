"""Owners take turns in the queue: by tokens, within a priority, and without credit for having been away."""

import random

from test_scheduler import Collector, make_core

from engine.core.loop import EngineCore
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest


def add(core: EngineCore, name: str, owner: str, *, prompt: int = 4, tokens: int = 2, priority: int = 0) -> None:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    core.add_request(EngineRequest(name, [1] * prompt, params, owner=owner, priority=priority))


def finished(core: EngineCore) -> list[str]:
    """Request ids in the order of their ends, with invariants checked after each step."""
    run = Collector(core)
    run.drain()
    return list(run.reasons)


def test_one_owner_is_served_in_the_order_of_arrival() -> None:
    core = make_core(max_num_seqs=1)
    for i in range(20):
        add(core, f"r{i}", "a", prompt=1 + i * 7 % 30)
    assert finished(core) == [f"r{i}" for i in range(20)]


def test_an_owner_with_500_requests_does_not_delay_anothers_first() -> None:
    core = make_core(max_num_seqs=1)
    for i in range(500):
        add(core, f"a{i}", "a")
    for _ in range(3):
        core.step()
    add(core, "b0", "b")
    order = finished(core)
    assert order.index("b0") <= 2
    assert [name for name in order if name != "b0"] == [f"a{i}" for i in range(500)][-(len(order) - 1):]


def test_turns_are_counted_in_tokens() -> None:
    """Prompts of a are four times as long as those of b and c, so each of these is served about four times as often."""
    core = make_core(max_num_seqs=1, num_pages=60)
    for i in range(40):
        add(core, f"a{i}", "a", prompt=119, tokens=1)
        add(core, f"b{i}", "b", prompt=29, tokens=1)
        add(core, f"c{i}", "c", prompt=29, tokens=1)
    first = finished(core)[:45]
    assert 4 <= sum(name.startswith("a") for name in first) <= 6
    assert abs(sum(name.startswith("b") for name in first) - sum(name.startswith("c") for name in first)) <= 1


def test_priorities_come_before_turns() -> None:
    core = make_core(max_num_seqs=1, scheduling_policy="priority")
    for i in range(3):
        add(core, f"low{i}", "a", priority=1)
    for i in range(3):
        add(core, f"a{i}", "a")
    add(core, "b0", "b")
    add(core, "low-b", "b", priority=1)
    assert finished(core) == ["a0", "b0", "a1", "a2", "low0", "low-b", "low1", "low2"]


def test_who_was_away_saved_nothing_up() -> None:
    """b comes back after a was served for long: from then on they alternate."""
    core = make_core(max_num_seqs=1)
    for i in range(60):
        add(core, f"a{i}", "a")
    while len(core.scheduler.waiting) > 20:
        core.step()
        core.check()
    for i in range(20):
        add(core, f"b{i}", "b")
    order = [name[0] for name in finished(core)][-38:]
    assert all(set(order[i : i + 2]) == {"a", "b"} for i in range(0, 36, 2)), order


def test_what_was_aborted_while_it_waited_costs_no_turn() -> None:
    core = make_core(max_num_seqs=1)
    add(core, "running", "b", tokens=8)
    core.step()
    for i in range(100):
        add(core, f"a{i}", "a")
    for i in range(10):
        add(core, f"b{i}", "b")
    core.abort([f"a{i}" for i in range(100)])
    add(core, "again", "a")
    order = [name for name in finished(core) if not name.startswith("a") or name == "again"]
    assert order.index("again") <= 2


def test_preempted_sequences_return_to_the_front() -> None:
    """Too few pages, many owners: each request ends, none is lost, and the memory of turns ends with the queue."""
    rng = random.Random(7)
    core = make_core(num_pages=14, max_num_seqs=6, budget=32)
    run = Collector(core)
    for i in range(80):
        add(core, f"r{i}", rng.choice("abcdefgh"), prompt=rng.randrange(1, 60), tokens=rng.randrange(1, 60))
        run.step()
    while core.has_work():
        before = set(core.scheduler.preempted)
        run.step()
        if core.scheduler.preempted and not before:
            head = core.scheduler.waiting.peek()
            assert head is not None
            assert head.num_preemptions == head.times.preemptions > 0
    assert len(run.reasons) == 80
    assert core.stats().num_preemptions > 3
    queue = core.scheduler.waiting
    assert not queue._turns
    assert not queue._lines
    assert not queue._heads
