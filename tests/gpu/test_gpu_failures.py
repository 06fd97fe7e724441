"""What goes wrong on a GPU stays where it went wrong: exceptions inside a step, and values that are no numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gpu_kit import VOCAB, assert_idle, checkpoint, drain, generated, on_gpu, prompts, tokens_of

from engine import LLM, SamplingParams
from engine.core.request import EngineRequest, FinishReason, StepOutput
from engine.errors import AtollError
from engine.worker.results import NAN_ERROR

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

POISON = 777  # a token whose embedding becomes NaN


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Few pages, so that those of a failed request are soon somebody else's."""
    model = checkpoint(tmp_path_factory.mktemp("failures") / "qwen3", "qwen3")
    return on_gpu(model, max_num_seqs=16, max_model_len=512, kv_cache_memory_bytes=4 << 20)


def request(name: str, length: int, max_tokens: int = 20, seed: int = 0) -> EngineRequest:
    generator = torch.Generator().manual_seed(sum(name.encode()) + 1000 * seed)
    ids = torch.randint(1, POISON, (length,), generator=generator).tolist()
    return EngineRequest(name, ids, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))


def once(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, whose next call raises."""
    calls = 0

    def broken(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("injected fault")
        return original(*args, **kwargs)

    return broken


def break_mixed(runner: Any) -> tuple[Any, str]:
    return runner, "_mixed_step"


def break_replay(runner: Any) -> tuple[Any, str]:
    return runner.graphs, "replay"


def break_sampling(runner: Any) -> tuple[Any, str]:
    return runner.sampler, "sample"


def break_collect(runner: Any) -> tuple[Any, str]:
    return runner, "collect"


@pytest.mark.parametrize("what", [break_mixed, break_replay, break_sampling, break_collect])
def test_an_exception_fails_the_requests_of_its_step_and_the_next_request_works(
    llm: LLM, what: Callable[[Any], tuple[Any, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = llm.engine
    assert_idle(core)
    failures = core.stats().step_failures
    core.reset_prefix_cache()
    before = tokens_of(drain(core, [request("after", 60)])["after"])

    core.reset_prefix_cache()
    outputs: dict[str, list[StepOutput]] = {}

    def step() -> None:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
        core.check()

    for name in "ABC":
        core.add_request(request(name, 30, max_tokens=40))
    for _ in range(5):
        step()
    assert not [o for listed in outputs.values() for o in listed if o.finish_reason], outputs
    owner, name = what(core.runner)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, once(getattr(owner, name)))
        if what is break_mixed:  # more prompt tokens than a step takes: W is not in the broken one
            for other in "DEW":
                core.add_request(request(other, 200))
        while not [o for listed in outputs.values() for o in listed if o.finish_reason]:
            step()
    failed = {rid: o for rid, listed in outputs.items() for o in listed if o.finish_reason is FinishReason.ERROR}
    assert failed.keys() == (set("ABCDE") if what is break_mixed else set("ABC")), failed
    assert {o.error for o in failed.values()} == {"RuntimeError: injected fault"}
    assert core.stats().step_failures == failures + 1
    while core.has_work():
        step()
    if what is break_mixed:
        assert outputs["W"][-1].finish_reason is FinishReason.LENGTH
        assert len(tokens_of(outputs["W"])) == 20
    assert_idle(core)
    core.reset_prefix_cache()
    after = drain(core, [request("after", 60)])["after"]
    assert after[-1].finish_reason is FinishReason.LENGTH, after[-1]
    assert tokens_of(after) == before


def test_the_offline_api_names_the_request_that_failed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = llm.engine.runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_mixed_step", once(runner._mixed_step))
        with pytest.raises(AtollError, match=r"Request \d+-0 failed: RuntimeError: injected fault"):
            llm.generate(prompts(2, longest=50), SamplingParams(max_tokens=4), use_tqdm=False)
    assert_idle(llm.engine)
    answers = generated(llm, prompts(2, longest=50), SamplingParams(max_tokens=4, ignore_eos=True))
    assert [len(tokens) for tokens in answers] == [4, 4]


def run(llm: LLM, requests: Sequence[EngineRequest]) -> dict[str, list[StepOutput]]:
    llm.engine.reset_prefix_cache()
    outputs = drain(llm.engine, requests)
    assert_idle(llm.engine)
    return outputs


def test_values_that_are_no_numbers_fail_the_request_that_met_them_alone(llm: LLM) -> None:
    runner: Any = llm.engine.runner
    embedding = runner.model.embed_tokens.weight
    good = [request(f"good-{i}", 20 + 9 * i) for i in range(8)]
    bad = request("bad", 70, max_tokens=2)  # as long in the engine as one that fails: every step has the same shape
    pool = llm.engine.kv.pool
    rounds = 3 * pool.capacity // 12
    later = [request(f"later-{i}", 180, max_tokens=8) for i in range(rounds)]

    with_bad = [*good[:4], bad, *good[4:]]
    clean = {rid: tokens_of(outputs) for rid, outputs in run(llm, with_bad).items()}
    clean |= {rid: tokens_of(outputs) for rid, outputs in run(llm, later).items()}
    assert POISON not in {t for tokens in clean.values() for t in tokens}, "choose another token"
    bad.prompt_token_ids[33] = POISON
    kept = embedding[POISON].clone()
    with torch.inference_mode():
        embedding[POISON] = float("nan")
    try:
        outputs = run(llm, with_bad)
        [last] = outputs["bad"]
        assert (last.finish_reason, last.error) == (FinishReason.ERROR, NAN_ERROR), last
        errors = {rid: o.error for rid, listed in outputs.items() for o in listed if o.error and rid != "bad"}
        assert not errors, f"a neighbour failed too: {errors}"
        different = {rid: (tokens_of(outputs[rid]), clean[rid]) for rid in outputs
                     if rid != "bad" and tokens_of(outputs[rid]) != clean[rid]}
        assert not different, f"neighbours that answer otherwise (now, before): {different}"
        # Its pages go round: whoever gets them must not meet the NaN in them.
        again = run(llm, later)
        errors = {rid: o.error for rid, listed in again.items() for o in listed if o.error}
        assert not errors, f"NaN was inherited with a page: {errors}"
        different = [rid for rid, listed in again.items() if tokens_of(listed) != clean[rid]]
        assert not different, f"answers changed for {different}"
    finally:
        with torch.inference_mode():
            embedding[POISON] = kept
    healed = run(llm, [bad])["bad"]
    assert len(tokens_of(healed)) == 2, healed


def test_poison_reached_by_sampling_fails_one_step_later(llm: LLM) -> None:
    """The token itself is fine; the step that reads its embedding, a graph's replay, is not."""
    runner: Any = llm.engine.runner
    embedding = runner.model.embed_tokens.weight
    forced = request("forced", 40)
    forced.params.logit_bias = {POISON: 100.0}
    beside = request("beside", 40)
    kept = embedding[POISON].clone()
    with torch.inference_mode():
        embedding[POISON] = float("nan")
    try:
        outputs = run(llm, [forced, beside])
    finally:
        with torch.inference_mode():
            embedding[POISON] = kept
    assert tokens_of(outputs["forced"]) == [POISON]
    assert outputs["forced"][-1].error == NAN_ERROR
    assert outputs["beside"][-1].finish_reason is FinishReason.LENGTH
    assert len(tokens_of(outputs["beside"])) == 20
    assert VOCAB > POISON
