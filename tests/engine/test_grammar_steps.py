"""Guided sequences in the engine's own steps: whatever else a step does, they say what one token at a time says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch

from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, FinishReason
from engine.errors import InvalidRequestError
from engine.llm import LLM
from engine.text.grammar import forms
from engine.text.grammar.compiler import GrammarCompiler

SCHEMA = {"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 9}, "n": {"type": "integer"},
    "list": {"type": "array", "items": {"enum": ["a", "bb", 3]}, "minItems": 2, "maxItems": 6},
}, "required": ["name", "n", "list"], "additionalProperties": False}  # fmt: skip
GRAMMAR = forms.whole(forms.json_schema(SCHEMA, "x", strict=True))
WORD = forms.whole(forms.regex("[a-f]{4,40}!", "x"))
PROMPTS = [f"{'abcdefgh' * (1 + 5 * (i % 4))} {i}" for i in range(12)]


@pytest.fixture(scope="module")
def directory(tiny_llama_dir: Callable[..., Path]) -> Path:
    return tiny_llama_dir("gqa")


@pytest.fixture(scope="module", params=[1, 2], ids=["sync", "overlap"])
def llm(request: pytest.FixtureRequest, directory: Path) -> LLM:
    return make(directory, overlap=request.param == 2)


def make(directory: Path, **config: Any) -> LLM:
    return LLM(directory, **{"kv_cache_memory_bytes": 64_000_000, "max_num_seqs": 16, **config})


def params(seed: int, *, guided: bool = True, **options: Any) -> SamplingParams:
    return SamplingParams(**{
        "temperature": 1.0, "seed": seed, "max_tokens": 120, "grammar": GRAMMAR if guided else None, **options})


def texts(llm: LLM, asked: list[SamplingParams], prompts: list[str] = PROMPTS) -> list[tuple[list[int], str | None]]:
    outputs = llm.generate(prompts[: len(asked)], asked, use_tqdm=False)
    llm.engine.check()
    return [(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs]


def test_greedy_is_the_best_allowed_token_each_time(llm: LLM, directory: Path) -> None:
    """Against transformers, with the masks applied by hand."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    compiler = GrammarCompiler(directory, llm.engine.vocab_size, sorted(llm.engine.eos_token_ids))
    got = llm.generate(PROMPTS[:4], params(0, temperature=0.0, max_tokens=60), use_tqdm=False)
    for output in got:
        pending = compiler.begin(GRAMMAR)
        while (matcher := pending.poll()) is None:
            pass
        ids = list(output.prompt_token_ids)
        with torch.inference_mode():
            for token in output.outputs[0].token_ids:
                logits = reference(torch.tensor([ids])).logits[0, -1].numpy()
                words = compiler.masks([0], [matcher]).words[0]
                allowed = np.unpackbits(words.view(np.uint8), count=len(logits), bitorder="little").astype(bool)
                assert token == int(np.where(allowed, logits, -np.inf).argmax())
                matcher.accept(token)
                ids.append(token)
        assert matcher.finished == (output.outputs[0].finish_reason == "stop")


def test_a_mixed_batch_says_what_each_says_alone(llm: LLM) -> None:
    asked = [params(i, guided=i % 2 == 0, min_tokens=3 * (i % 3), logprobs=2 if i % 4 == 0 else None)
             for i in range(12)]
    together = texts(llm, asked)
    alone = [texts(llm, [one], [prompt])[0] for one, prompt in zip(asked, PROMPTS, strict=True)]
    assert together == alone
    for i, (ids, reason) in enumerate(together):
        if i % 2 == 0 and reason == "stop":
            jsonschema_rs.validate(SCHEMA, json.loads(llm.get_tokenizer().decode(ids)))
    assert sum(reason == "stop" for ids, reason in together[::2]) >= 3


def test_chunks_preemption_and_prefix_hits_change_nothing(directory: Path, llm: LLM) -> None:
    asked = [params(i, guided=i % 3 != 2) for i in range(12)]
    want = texts(llm, asked)
    for overlap in (False, True):
        tight = make(directory, overlap=overlap, max_num_batched_tokens=24, max_model_len=320,
                     kv_cache_memory_bytes=260_000, block_size=8)
        assert texts(tight, asked) == want
        assert texts(tight, asked) == want, "from the prefix cache"
        assert tight.engine.stats().num_preemptions > 0, "pages were short"
        assert tight.engine.stats().prefix_hits > 0


def test_several_answers_each_follow_the_grammar_on_their_own(llm: LLM) -> None:
    output = llm.generate("x", params(5, n=6, grammar=WORD, max_tokens=60), use_tqdm=False)[0]
    words = {answer.text for answer in output.outputs}
    assert len(words) > 3
    assert all(set(word[:-1]) <= set("abcdef") and word[-1] == "!" for word in words)
    assert all(answer.finish_reason == "stop" for answer in output.outputs)


def test_aborts_at_any_moment_leave_nothing(llm: LLM) -> None:
    engine = llm.engine
    for steps in range(6):
        fresh = forms.whole(forms.regex(f"[a-z]{{30,40}}{steps}", "x"))  # not yet compiled
        engine.add_request(EngineRequest("gone", [5, 6, 7], params(1, grammar=fresh)))
        engine.add_request(EngineRequest("stays", [5, 6, 7], params(1, grammar=WORD)))
        ends = {}
        for step in range(10_000):
            if step == steps:
                engine.abort(["gone"])
            ends |= {output.request_id: output.finish_reason for output in engine.step()}
            if not engine.has_work():
                break
        assert ends == {"gone": FinishReason.ABORT, "stays": FinishReason.STOP}
        engine.check()


def drain(engine: Any) -> dict[str, list[Any]]:
    """request id -> its tokens, then the reason of its end"""
    said: dict[str, list[Any]] = {}
    while engine.has_work():
        for output in engine.step():
            said.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                said[output.request_id].append(output.finish_reason)
    return said


def test_a_failed_step_ends_its_requests_and_later_ones_work(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for overlap in (False, True):
        for what in ("forward", "sample", "collect"):
            for at in (2, 3, 4):
                engine = make(directory, overlap=overlap).engine
                original, calls = getattr(engine.runner, what), [0]

                def fails(*args: Any, original: Any = original, calls: list[int] = calls, at: int = at) -> Any:
                    calls[0] += 1
                    if calls[0] == at:
                        raise RuntimeError("a fault")
                    return original(*args)

                with monkeypatch.context() as patch:
                    patch.setattr(engine.runner, what, fails)
                    for name, guided in (("a", True), ("b", False), ("c", True)):
                        engine.add_request(EngineRequest(name, [5, 6, 7], params(1, guided=guided, max_tokens=9)))
                    said = drain(engine)
                ends = {end[-1] for end in said.values()}
                assert ends <= {FinishReason.ERROR, FinishReason.LENGTH, FinishReason.STOP}
                assert FinishReason.ERROR in ends, (overlap, what, at)
                assert set(said) == {"a", "b", "c"}
                engine.check()
                engine.add_request(EngineRequest("d", [5, 6, 7], params(1, grammar=WORD)))
                assert drain(engine)["d"][-1] is FinishReason.STOP


def test_a_bad_grammar_is_its_own_requests_error(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        llm.generate(["x", "y"], [params(1, guided=False), params(1, grammar=forms.whole(forms.regex("((", "x")))],
                     use_tqdm=False)
    llm.engine.check()
    assert not llm.engine.has_work()
    for grammar in ("", "{}", "[1]", '{"grammars": []}', '{"grammars": [{"lark_grammar": 5}]}', "start: y"):
        with pytest.raises(InvalidRequestError):
            llm.generate("x", params(1, grammar=grammar), use_tqdm=False)
            pytest.fail(f"{grammar} was taken")


def test_one_whose_grammar_costs_too_much_ends_and_the_others_go_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm.engine
    engine.add_request(EngineRequest("costly", [5, 6, 7], params(1, grammar=WORD)))
    engine.add_request(EngineRequest("fine", [5, 6, 7], params(1, grammar=WORD)))
    while "costly" not in engine.scheduler.seqs:
        engine.step()
    matcher = engine.scheduler.seqs["costly"].matcher
    assert matcher is not None
    engine.step()
    matcher.accept(0)  # no grammar allows this token here: the library gives up
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    ends = {output.request_id: output for output in outputs if output.finish_reason is not None}
    assert ends["costly"].refusal is not None
    assert ends["costly"].finish_reason is FinishReason.ERROR
    assert ends["fine"].finish_reason is FinishReason.STOP
    engine.check()
