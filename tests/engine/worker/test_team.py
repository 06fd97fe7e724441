"""A step on all CPU threads gives what it gives otherwise, and is left where other processes want the cores."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from test_oracle import LENGTH, run, tiny_engine
from test_parts import requests_of

from engine import LLM, SamplingParams
from engine.kernels.runtime import cpu_threads
from engine.kernels.runtime.cpu_threads import gemm_threads, gemms_on, num_threads, team_spins
from engine.worker import team
from engine.worker.pause import Timing
from engine.worker.team import Team

PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 100 + 1 for j in range(5 + 3 * i)]} for i in range(9)]
ALL = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)


@pytest.fixture
def two_spinning_threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(team, "team_spins", lambda: True)
    with num_threads(2):
        yield


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """Of each product: who multiplies, and with how many threads."""
    calls = []
    plain = gemm_threads

    def noting(threads: int, elements: int, rows: int) -> int:
        given = plain(threads, elements, rows)
        calls.append((cpu_threads._bound.gemms, given))
        return given

    monkeypatch.setattr("engine.layers.quant.unquantized.gemm_threads", noting)
    return calls


def engine(model: Path, **config: Any) -> LLM:
    return LLM(model, **config, dtype="bfloat16", kv_cache_memory_bytes=64_000_000, max_num_seqs=16, max_model_len=128,
               enable_prefix_caching=False)  # fmt: skip


def answers(llm: LLM, params: SamplingParams = ALL) -> list[Any]:
    found = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in found]


def test_products_get_the_team_one_thread_or_what_they_are_worth() -> None:
    small, large = (2, 100, 1), (2, 1 << 30, 1)
    assert (gemm_threads(*small), gemm_threads(*large)) == (1, 2)
    with gemms_on("team"):
        assert (gemm_threads(*small), gemm_threads(*large)) == (2, 2)
        with gemms_on("alone"):
            assert (gemm_threads(*small), gemm_threads(*large)) == (1, 1)
        assert gemm_threads(*small) == 2
    assert gemm_threads(*small) == 1


@pytest.mark.parametrize(("variables", "spins"), [
    ({}, False), ({"GOMP_SPINCOUNT": "100000"}, True), ({"GOMP_SPINCOUNT": "0"}, False),
    ({"OMP_WAIT_POLICY": "PASSIVE"}, False), ({"OMP_WAIT_POLICY": "active"}, True),
    ({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "100k"}, True),
])  # fmt: skip
def test_which_threads_spin(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], *, spins: bool) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert team_spins() is spins


@pytest.mark.parametrize(("given", "spins"), [({}, "100000 None"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None PASSIVE"),
                                              ({"GOMP_SPINCOUNT": "7"}, "7 None")])  # fmt: skip
def test_an_operators_choice_of_waiting_stays(given: dict[str, str], spins: str) -> None:
    if not given and (Path("/dev/nvidiactl").exists() or len(os.sched_getaffinity(0)) != 2):
        spins = "None PASSIVE"
    code = "import engine, os; print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'))"
    ended = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True,
                           cwd=Path(__file__).parents[3])  # fmt: skip
    assert ended.stdout.strip() == spins


def test_answers_are_the_same_on_the_team_and_alone(
    tiny_llama_dir: Callable[..., Path], two_spinning_threads: None, seen: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Team, "allows_step", lambda self: self.exists)
    llm = engine(tiny_llama_dir("gqa"))
    on_team = answers(llm)
    assert set(seen) == {("team", 2)}
    seen.clear()
    monkeypatch.setattr(Team, "allows_step", lambda _: False)
    assert answers(llm) == on_team
    assert set(seen) == {("alone", 1)}


@pytest.mark.parametrize("budget", [7, 200])
def test_greedy_equals_transformers(
    tiny_llama_dir: Callable[..., Path], two_spinning_threads: None, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, prefix hits, preemption and aborts, with every step on the team."""
    monkeypatch.setattr(Team, "allows_step", lambda self: self.exists)
    model, rng = tiny_llama_dir("gqa"), random.Random(budget)
    core = tiny_engine(model, num_pages=26, max_num_batched_tokens=budget, max_num_seqs=6)
    requests = requests_of(rng, 24)
    tokens, _ = run(core, requests, rng, aborts=0.02)
    for request in requests:
        got = tokens[request.request_id]
        assert got == oracle.greedy(model, tuple(request.prompt_token_ids), LENGTH)[: len(got)]


def test_steps_leave_the_team_where_it_does_not_get_its_cores(
    tiny_llama_dir: Callable[..., Path], two_spinning_threads: None, seen: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = 1.9
    monkeypatch.setattr(team, "_since", lambda cpu, wall: Timing(share * 0.1, 0.1))
    llm = engine(tiny_llama_dir("gqa"))
    first = answers(llm)
    assert set(seen) == {("team", 2)}
    share = 1.5
    assert answers(llm) == first
    seen.clear()
    for _ in range(7):  # also after the first pause: the team fails to prove itself
        assert answers(llm) == first
    assert set(seen) == {("alone", 1)}
    share = 1.9
    for _ in range(20):
        answers(llm)
    assert llm.engine.runner.team._has_proved


def test_the_team_proves_itself_with_work_of_its_own(two_spinning_threads: None) -> None:
    proof = Team()._proof()
    assert proof.wall >= team._PROOF_SECONDS
    assert proof.cpu > 0


@pytest.mark.parametrize(("of_engine", "of_request"), [(None, 1), (1, None)])
def test_what_has_a_seed_is_never_computed_by_the_team(
    tiny_llama_dir: Callable[..., Path], two_spinning_threads: None, seen: list, of_engine: int | None,
    of_request: int | None,
) -> None:  # fmt: skip
    llm = engine(tiny_llama_dir("gqa"), seed=of_engine)
    answers(llm, SamplingParams(max_tokens=3, seed=of_request, ignore_eos=True))
    assert {who for who, _ in seen} == {None}


def test_threads_that_sleep_are_no_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "team_spins", lambda: False)
    with num_threads(2):
        assert not Team().exists
        assert not Team().allows_step()


def test_one_thread_is_no_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "team_spins", lambda: True)
    with num_threads(1):
        assert not Team().exists
    assert torch.get_num_threads() >= 1
