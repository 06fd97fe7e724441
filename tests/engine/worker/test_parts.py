"""A step in two parts gives what the whole step gives, and both parts' errors, contexts and threads stay their own."""

import gc
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from test_grammar_steps import GRAMMAR, PROMPTS, texts
from test_grammar_steps import params as guided_params
from test_oracle import LENGTH, VOCAB, run, tiny_engine
from torch import nn

from engine import LLM
from engine.core.batch import PooledChunk, RowInit, ScheduledSeq, StepPlan
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, FinishReason
from engine.kernels.attention.reference import AttentionBatch
from engine.kernels.runtime.cpu_threads import at_most, num_threads
from engine.layers.context import ForwardContext, forward_context, get_context
from engine.layers.linear import Linear
from engine.worker import parts
from engine.worker.parts import SideBySide, cut, reads_fresh_pages
from engine.worker.pause import Pause
from engine.worker.state import RequestTable
from engine.worker.team import Team


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every step that can be cut is cut, on any machine. Yields the numbers of sequences in the first parts."""
    counts: list[int] = []
    plain = SideBySide.run

    def counted(self: SideBySide, work: Any, pair: Any) -> Any:
        if isinstance(pair[0], StepPlan):
            counts.append(len(pair[0].seqs))
        return plain(self, work, pair)

    monkeypatch.setattr(SideBySide, "run", counted)
    monkeypatch.setattr(parts, "_FEWEST_SEQS", 2)
    monkeypatch.setattr(parts, "_FEWEST_TOKENS", 2)
    monkeypatch.setattr(parts, "_MOST_WORK", 1.0)
    monkeypatch.setattr(Pause, "allows", lambda _: True)
    monkeypatch.setattr(Team, "allows_step", lambda _: False)
    with num_threads(2):
        yield counts


def plan_of(*seqs: tuple[int, int], admitted: tuple[int, ...] = (), **fields: Any) -> StepPlan:
    """Sequences of (start, tokens) in rows 1, 2, ..."""
    listed = [ScheduledSeq(f"r{i}", i, i + 1, start, count, True) for i, (start, count) in enumerate(seqs)]
    inits = [RowInit(row, [1], 1, SamplingParams(), 0, ()) for row in admitted]
    return StepPlan(0, listed, inits, **fields)


def table_of(*pages: list[int]) -> RequestTable:
    """The pages of rows 1, 2, ..."""
    table = RequestTable(len(pages) + 1, 64, 16, torch.device("cpu"))
    for row, listed in enumerate(pages, 1):
        table.block_tables[0][row, : len(listed)] = torch.tensor(listed, dtype=torch.int32)
    return table


def sizes(plan: StepPlan, fewest: int = 2) -> list[int]:
    table = RequestTable(len(plan.seqs) + 1, 2048, 16, torch.device("cpu"))
    return [len(part.seqs) for part in cut(plan, table, fewest)]


# -- what is cut --------------------------------------------------------------------------------------------------


def test_parts_have_about_equal_work_and_keep_the_order() -> None:
    count = 2 * parts._FEWEST_SEQS
    plan = plan_of(*[(100, 1)] * count)
    assert sizes(plan) == [count // 2] * 2
    first, second = cut(plan, table_of(*[[]] * count), 2)
    assert first.seqs + second.seqs == plan.seqs
    assert sizes(plan_of(*[(0, 30)] * count, *[(1000, 1)] * 15)) == [count // 2, count // 2 + 15]


@pytest.mark.parametrize("plan", [
    plan_of(*[(100, 1)] * (parts._FEWEST_SEQS - 1)),
    plan_of(*[(100, 1)] * parts._FEWEST_SEQS, (0, 1000)),
    plan_of(*[(100, 1)] * parts._FEWEST_SEQS, pooled={1: PooledChunk("last", ends=True)}),
    plan_of(*[(100, 1)] * parts._FEWEST_SEQS, state_saves=[(1, 2)]),
], ids=["few sequences", "one long prompt", "an embedding", "states"])  # fmt: skip
def test_other_steps_stay_whole(plan: StepPlan) -> None:
    assert sizes(plan) == [len(plan.seqs)]


def test_a_step_of_few_tokens_stays_whole() -> None:
    """Of few sequences' next tokens; their prompts are more."""
    seqs = [(100, 1)] * 23
    assert sizes(plan_of(*seqs), 24) == [23]
    assert sizes(plan_of(*seqs, (100, 1)), 24) == [12, 12]
    assert len(sizes(plan_of(*[(0, 5)] * 8), 24)) == 2


def test_large_weights_are_read_twice_for_many_tokens_only() -> None:
    def model(*weights: tuple[int, int]) -> nn.Module:
        return nn.ModuleList([Linear(*sides) for sides in weights])

    small, large = (576, 3072), (8192, 2048)
    assert parts.fewest_tokens(model(small, small)) < parts.fewest_tokens(model(small, large))
    assert parts.fewest_tokens(nn.Module()) == parts.fewest_tokens(model(small))


def test_a_step_in_which_one_reads_what_another_fills_stays_whole() -> None:
    fills, found, elsewhere = [5, 6], [5, 7], [8, 9]
    assert reads_fresh_pages(plan_of((0, 20), (16, 4), admitted=(1, 2)), table_of(fills, found))
    assert reads_fresh_pages(plan_of((15, 1), (16, 4), admitted=(2,)), table_of(fills, found))
    assert not reads_fresh_pages(plan_of((16, 4), (16, 4), admitted=(1, 2)), table_of(fills, found)), "both were there"
    assert not reads_fresh_pages(plan_of((0, 20), (16, 4), admitted=(1, 2)), table_of(fills, elsewhere))
    assert not reads_fresh_pages(plan_of((0, 20), (0, 4), admitted=(1, 2)), table_of(fills, elsewhere))


# -- threads ------------------------------------------------------------------------------------------------------


def test_each_part_has_its_own_context_and_half_the_threads() -> None:
    both = threading.Barrier(2, timeout=30)

    def work(number: int) -> tuple[bool, int, int]:
        nothing = torch.tensor([number])
        with forward_context(context := ForwardContext(nothing, nothing, AttentionBatch([], []))):
            both.wait()
            own = get_context() is context
            both.wait()
        with num_threads(8):
            return own, torch.get_num_threads(), threading.get_ident()

    with num_threads(4):
        ((first, threads, here), (second, its_threads, there)), timing = SideBySide().run(work, [1, 2])
        assert torch.get_num_threads() == 4
    assert first
    assert second
    assert (threads, its_threads) == (2, 2)
    assert here == threading.get_ident() != there
    assert timing.wall > 0


def test_a_bound_ends_with_its_block() -> None:
    before = torch.get_num_threads()
    with at_most(1), num_threads(4):
        assert torch.get_num_threads() == 1
    with num_threads(before + 1):
        assert torch.get_num_threads() == before + 1


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_comes_after_both_have_ended(failing: int) -> None:
    done = []

    def work(number: int) -> None:
        if number == failing:
            raise ZeroDivisionError(str(number))
        threading.Event().wait(0.05)
        done.append(number)

    side_by_side = SideBySide()
    with pytest.raises(ZeroDivisionError, match=str(failing)):
        side_by_side.run(work, [0, 1])
    assert done == [1 - failing]
    assert side_by_side.run(str, [0, 1])[0] == ["0", "1"]


def test_its_thread_ends_with_it() -> None:
    side_by_side = SideBySide()
    _, thread = side_by_side.run(lambda _: threading.current_thread(), [0, 1])[0]
    assert thread.is_alive()
    del side_by_side
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


# -- in the engine ------------------------------------------------------------------------------------------------


def requests_of(rng: random.Random, count: int) -> list[EngineRequest]:
    bank = random.Random(7)  # few different prompts, so that prefixes hit
    stems = [[bank.randrange(3, VOCAB) for _ in range(n)] for n in (5, 40, 70)]
    tails = [[], [9, 8, 7], [bank.randrange(3, VOCAB) for _ in range(20)]]
    return [
        EngineRequest(f"r{i}", rng.choice(stems) + rng.choice(tails), SamplingParams(
            temperature=0, max_tokens=rng.randrange(1, LENGTH + 1), ignore_eos=True))
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("budget", [7, 33, 200])
@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_equals_transformers(tiny_llama_dir: Any, forced: list[int], budget: int, *, overlap: bool) -> None:
    """Chunks, prefix hits, preemption and aborts, with every step in parts that can be."""
    model_dir = tiny_llama_dir("gqa")
    rng = random.Random(budget)
    core = tiny_engine(model_dir, num_pages=26, max_num_batched_tokens=budget, max_num_seqs=6, overlap=overlap)
    requests = requests_of(rng, 24)
    tokens, last = run(core, requests, rng, aborts=0.02)
    for r in requests:
        got = tokens[r.request_id]
        assert got == oracle.greedy(model_dir, tuple(r.prompt_token_ids), LENGTH)[: len(got)]
        if last[r.request_id].finish_reason is not FinishReason.ABORT:
            assert len(got) == r.params.max_tokens
    assert len(forced) > 20
    assert len(set(forced)) > 1
    assert core.stats().prefix_hits


def test_drawn_tokens_and_log_probabilities_are_the_whole_steps(
    tiny_llama_dir: Any, forced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sequence keeps its own row, seed, logprobs and penalties."""
    asked = [
        SamplingParams(temperature=[0, 0.7, 1.5][i % 3], top_k=[0, 20][i % 2], seed=i, max_tokens=12, ignore_eos=True,
                       logprobs=i % 4 or None, repetition_penalty=1 + i % 2 / 10)
        for i in range(9)
    ]  # fmt: skip
    prompts = [list(range(3 + i, 40 + 2 * i)) for i in range(9)]

    def answers() -> list[Any]:
        core = tiny_engine(tiny_llama_dir("gqa"))
        found: dict[str, list[Any]] = {}
        for i, (prompt, params) in enumerate(zip(prompts, asked, strict=True)):
            core.add_request(EngineRequest(f"r{i}", prompt, params))
        while core.has_work():
            for out in core.step():
                entries = [(e.token_id, e.rank, [t for t, _ in e.top]) for e in out.logprobs or ()]
                found.setdefault(out.request_id, []).append((out.new_token_ids, entries))
        return [found[f"r{i}"] for i in range(9)]

    in_parts = answers()
    assert forced
    forced.clear()
    monkeypatch.setattr(Pause, "allows", lambda _: False)
    assert answers() == in_parts
    assert not forced


def test_grammars_mask_the_sequences_of_both_parts(
    tiny_llama_dir: Any, forced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny_llama_dir("gqa"), kv_cache_memory_bytes=64_000_000, max_num_seqs=16)
    assert guided_params(0).grammar is GRAMMAR
    asked = [guided_params(i, guided=i % 3 > 0, max_tokens=40) for i in range(len(PROMPTS))]
    in_parts = texts(llm, asked)
    assert forced
    monkeypatch.setattr(Pause, "allows", lambda _: False)
    assert texts(llm, asked) == in_parts


@pytest.mark.parametrize("where", ["forward", "logits"])
@pytest.mark.parametrize("on_caller", [True, False])
def test_an_error_in_one_part_ends_the_step_s_requests_and_no_others(
    tiny_llama_dir: Any, forced: list[int], where: str, *, on_caller: bool
) -> None:
    core = tiny_engine(tiny_llama_dir("gqa"))
    model = core.runner.model
    plain = getattr(model, where)

    def failing(*args: Any) -> Any:
        if (threading.current_thread() is caller) is on_caller:
            raise ZeroDivisionError("injected")
        return plain(*args)

    caller = threading.current_thread()
    setattr(model, where, failing)
    requests = [EngineRequest(f"r{i}", list(range(3 + i, 30 + i)), SamplingParams(temperature=0, max_tokens=4,
                ignore_eos=True)) for i in range(4)]  # fmt: skip
    _, last = run(core, requests, failing={r.request_id for r in requests})
    assert {out.finish_reason for out in last.values()} == {FinishReason.ERROR}
    assert all("ZeroDivisionError: injected" in (out.error or "") for out in last.values())
    assert forced
    setattr(model, where, plain)
    again = [EngineRequest(f"s{i}", r.prompt_token_ids, r.params) for i, r in enumerate(requests)]
    tokens, _ = run(core, again)
    for r in again:
        assert tokens[r.request_id] == oracle.greedy(tiny_llama_dir("gqa"), tuple(r.prompt_token_ids), 4)


def test_a_sequence_without_numbers_fails_alone_in_its_part(tiny_llama_dir: Any, forced: list[int]) -> None:
    core = tiny_engine(tiny_llama_dir("gqa"))
    plain = core.runner.model.logits
    caller = threading.current_thread()

    def spoilt(hidden: torch.Tensor) -> torch.Tensor:
        logits = plain(hidden)
        if threading.current_thread() is not caller:
            logits[-1] = torch.nan
        return logits

    core.runner.model.logits = spoilt
    requests = [EngineRequest(f"r{i}", list(range(3 + i, 30 + i)), SamplingParams(temperature=0, max_tokens=1))
                for i in range(4)]  # fmt: skip
    _, last = run(core, requests, failing={"r3"})
    assert [last[f"r{i}"].finish_reason is FinishReason.ERROR for i in range(4)] == [False, False, False, True]
    assert forced


def test_bf16_answers_do_not_depend_on_parts(
    smollm2_dir: Path, forced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(smollm2_dir), dtype="bfloat16", device="cpu", max_model_len=256, max_num_seqs=16,
              kv_cache_memory_bytes=64_000_000, enable_prefix_caching=False)  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [f"{'One two three. ' * (i % 5 + 1)} The number {i} is" for i in range(12)]

    def tokens() -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)]

    in_parts = tokens()
    assert forced
    monkeypatch.setattr(Pause, "allows", lambda _: False)
    assert tokens() == in_parts


def test_models_that_keep_something_during_a_step_run_whole_steps(tiny_llama_dir: Any) -> None:
    core = tiny_engine(tiny_llama_dir("gqa"))
    runner = core.runner
    assert parts.supports(runner.model, runner.cache.spec)
    assert not parts.supports(runner.model, SimpleNamespace(slot_bytes=4))  # type: ignore[arg-type]
    runner.model.layers[0].self_attn.attention.lends = True
    assert not parts.supports(runner.model, runner.cache.spec)
