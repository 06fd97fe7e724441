"""Greedy tokens equal transformers' for every shape, however the work is cut, shared, evicted or interrupted."""

import random

import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_llama import TINY_LLAMAS

from engine.config import EngineConfig
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, FinishReason
from engine.worker.startup.build import build_engine

VOCAB = 320
MAX_LEN = 192
LENGTH = 24


def tiny_engine(model_dir, *, num_pages=64, block_size=16, **config):
    """A float32 engine with exactly `num_pages` pages, one of them the null page."""
    fixed = {"device": "cpu", "dtype": "float32", "max_model_len": MAX_LEN, "block_size": block_size}
    probe = EngineConfig(model_dir, **fixed, **config)
    raw = oracle.load(model_dir).config
    page_bytes = 2 * raw.num_hidden_layers * raw.num_key_value_heads * raw.head_dim * 4 * block_size
    probe.kv_cache_memory_bytes = num_pages * page_bytes
    core = build_engine(probe)
    assert core.kv.pool.num_pages == num_pages
    return core


def run(core, requests, rng=None, aborts=0.0, failing=()):
    """Feed requests at random moments, step to the end, check invariants; returns ({id: tokens}, {id: last output}).

    No request may fail but those of the ids in `failing`."""
    tokens, last = {r.request_id: [] for r in requests}, {}
    pending = list(requests)
    while pending or core.has_work():
        while pending and (rng is None or rng.random() < 0.6 or not core.has_work()):
            core.add_request(pending.pop(0))
        if rng and rng.random() < aborts:
            core.abort([rng.choice(requests).request_id])
        for out in core.step():
            assert out.error is None or out.request_id in failing, out.error
            tokens[out.request_id] += out.new_token_ids
            if out.finish_reason:
                last[out.request_id] = out
        core.check()
    return tokens, last


@pytest.mark.parametrize("shape", sorted(TINY_LLAMAS))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_greedy_equals_transformers(shape, tiny_llama_dir, data):
    model_dir = tiny_llama_dir(shape)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    core = tiny_engine(
        model_dir,
        num_pages=data.draw(st.integers(26, 50)),
        block_size=data.draw(st.sampled_from([8, 16])),
        max_num_batched_tokens=data.draw(st.sampled_from([1, 7, 16, 33, 200])),
        max_num_seqs=data.draw(st.integers(1, 6)),
        overlap=data.draw(st.booleans()),
        enable_prefix_caching=data.draw(st.booleans()),
    )
    bank = random.Random(7)  # few different prompts, so that prefixes hit and the oracle's answers are reused
    stems = [[bank.randrange(3, VOCAB) for _ in range(n)] for n in (5, 40, 70)]
    tails = [[], [9, 8, 7], [bank.randrange(3, VOCAB) for _ in range(20)]]
    requests = [
        EngineRequest(f"r{i}", rng.choice(stems) + rng.choice(tails), SamplingParams(
            temperature=0, max_tokens=rng.randrange(1, LENGTH + 1), ignore_eos=True))
        for i in range(rng.randrange(1, 9))
    ]
    tokens, last = run(core, requests, rng, aborts=0.05)
    for r in requests:
        expected = oracle.greedy(model_dir, tuple(r.prompt_token_ids), LENGTH)
        got = tokens[r.request_id]
        assert got == expected[: len(got)]
        if last[r.request_id].finish_reason is not FinishReason.ABORT:
            assert len(got) == r.params.max_tokens


def test_preemption_does_not_change_tokens(tiny_llama_dir):
    model_dir = tiny_llama_dir("gqa")
    core = tiny_engine(model_dir, num_pages=14, max_num_batched_tokens=64)
    requests = [EngineRequest(f"r{i}", list(range(i + 3, i + 23)), SamplingParams(
        temperature=0, max_tokens=100, ignore_eos=True)) for i in range(4)]
    tokens, _ = run(core, requests)
    assert core.stats().num_preemptions > 0
    for r in requests:
        assert tokens[r.request_id] == oracle.greedy(model_dir, tuple(r.prompt_token_ids), 100)


def test_sliding_window_masks_old_tokens(tmp_path_factory):
    """A Mistral with a window of 24 over prompts of 60: the mask, in prefill, chunked prefill and decode."""
    from tiny_llama import save_byte_tokenizer
    from transformers import MistralConfig, MistralForCausalLM

    model_dir = tmp_path_factory.mktemp("mistral-")
    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=24, initializer_range=0.25, max_position_embeddings=512,
    )).save_pretrained(model_dir)
    save_byte_tokenizer(model_dir)
    prompt = [(i * 37) % 300 + 3 for i in range(60)]
    for budget in (13, 200):
        tokens, _ = run(tiny_engine(model_dir, max_num_batched_tokens=budget), [
            EngineRequest("r", prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))])
        assert tokens["r"] == oracle.greedy(model_dir, tuple(prompt), 20)


@pytest.mark.parametrize("budget", [8, 200])
def test_prompt_logprobs_equal_transformers(tiny_llama_dir, budget):
    model_dir = tiny_llama_dir("tied")
    core = tiny_engine(model_dir, max_num_batched_tokens=budget)
    prompt = [(i * 31) % 300 + 3 for i in range(45)]
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=4, logprobs=2)
    core.add_request(EngineRequest("r", prompt, params))
    outputs = []
    while core.has_work():
        outputs += core.step()
    listed = outputs[0].prompt_logprobs
    expected = oracle.logits(model_dir, prompt).log_softmax(-1)
    assert listed[0] is None
    assert len(listed) == len(prompt)
    for i, entry in enumerate(listed[1:]):
        assert entry.token_id == prompt[i + 1]
        assert entry.logprob == pytest.approx(expected[i, prompt[i + 1]].item(), abs=1e-3)
        assert [t for t, _ in entry.top] == expected[i].topk(4).indices.tolist()
        assert entry.rank == 1 + int((expected[i] > expected[i, prompt[i + 1]]).sum())
    assert all(len(o.logprobs) == 1 and len(o.logprobs[0].top) == 2 for o in outputs)


def test_same_seed_same_tokens_whatever_the_batch(tiny_llama_dir):
    model_dir = tiny_llama_dir("gqa")
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=1234, max_tokens=20, ignore_eos=True)
    prompt = list(range(5, 30))
    alone, _ = run(tiny_engine(model_dir), [EngineRequest("x", prompt, params)])
    crowd = [EngineRequest(f"c{i}", list(range(3, 10 + 7 * i)), SamplingParams(
        temperature=1.3, seed=i, max_tokens=30, ignore_eos=True)) for i in range(5)]
    for overlap, budget in ((False, 17), (True, 200)):
        core = tiny_engine(model_dir, max_num_batched_tokens=budget, overlap=overlap)
        mixed, _ = run(core, [*crowd[:3], EngineRequest("x", prompt, params), *crowd[3:]])
        assert mixed["x"] == alone["x"]
    other, _ = run(tiny_engine(model_dir), [EngineRequest("x", prompt, SamplingParams(
        temperature=0.9, top_p=0.95, top_k=50, seed=1235, max_tokens=20, ignore_eos=True))])
    assert other["x"] != alone["x"]


def test_a_step_that_raises_fails_its_requests_and_nobody_else(tiny_llama_dir, monkeypatch):
    model_dir = tiny_llama_dir("gqa")
    core = tiny_engine(model_dir, max_num_seqs=1)
    forward = core.runner.forward
    calls = {"n": 0}

    def faulty(*arguments):
        calls["n"] += 1
        if calls["n"] == 3:
            raise RuntimeError("injected")
        return forward(*arguments)

    monkeypatch.setattr(core.runner, "forward", faulty)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    tokens, last = run(core, [EngineRequest(name, [5] * 20, params) for name in ("bad", "good")], failing={"bad"})
    assert last["bad"].finish_reason is FinishReason.ERROR
    assert "injected" in last["bad"].error
    assert last["good"].finish_reason is FinishReason.LENGTH
    assert tokens["good"] == oracle.greedy(model_dir, (5,) * 20, 6)


def test_a_request_whose_numbers_break_spoils_nobody(tiny_llama_dir):
    """Token 7 embeds to NaN: its request fails, the others of the batch and the next owners of its pages do not."""
    model_dir = tiny_llama_dir("gqa")
    core = tiny_engine(model_dir, num_pages=26, max_num_seqs=2)
    with torch.inference_mode():
        core.runner.model.embed_tokens.weight[7] = float("nan")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompt = [(i * 13) % 300 + 10 for i in range(40)]
    expected = oracle.greedy(model_dir, tuple(prompt), 20)
    for _ in range(3):
        tokens, last = run(core, [
            EngineRequest("bad", [*prompt, *([7] * 60)], params),
            EngineRequest("good", prompt[::-1], params),
            EngineRequest("next", prompt, params),  # begins like "bad": must not find its pages
        ], failing={"bad"})  # fmt: skip
        assert last["bad"].finish_reason is FinishReason.ERROR
        assert "not numbers" in last["bad"].error
        assert tokens["good"] == oracle.greedy(model_dir, tuple(prompt[::-1]), 20)
        assert tokens["next"] == expected


def test_bf16_results_hardly_depend_on_the_batch(smollm2_dir):
    """Log-probs of a seeded request, alone and in a crowd, agree to what sums of bf16 numbers in another order leave.

    The order is the CPU libraries' choice, by the size of a step. After a token that fell otherwise, texts go apart.
    """
    rng = random.Random(5)
    prompt = [rng.randrange(20, 40_000) for _ in range(101)]
    params = SamplingParams(temperature=1.1, seed=9, max_tokens=12, ignore_eos=True, logprobs=0)
    crowd = [EngineRequest(f"c{i}", [rng.randrange(20, 40_000) for _ in range(9 + 31 * i)], SamplingParams(
        temperature=1.0, seed=i, max_tokens=20, ignore_eos=True)) for i in range(4)]

    def logprobs(others=()):
        core = build_engine(EngineConfig(smollm2_dir, device="cpu", max_model_len=256, kv_cache_memory_bytes=64 << 20))
        found = []
        for request in (*others, EngineRequest("x", prompt, params)):
            core.add_request(request)
        while core.has_work():
            found += [(o.new_token_ids[0], o.logprobs[0].logprob) for o in core.step() if o.request_id == "x"]
        return found

    together, alone = logprobs(crowd), logprobs()
    assert together[0][0] == alone[0][0]
    for (token, logprob), (token_alone, logprob_alone) in zip(together, alone, strict=True):
        if token != token_alone:
            break
        assert logprob == pytest.approx(logprob_alone, abs=0.5)


def test_smollm2_greedy_equals_transformers(smollm2_dir):
    core = build_engine(EngineConfig(smollm2_dir, device="cpu", dtype="float32", max_model_len=512,
                                     kv_cache_memory_bytes=64 << 20, max_num_batched_tokens=48))
    rng = random.Random(3)
    requests = [EngineRequest(f"r{i}", [rng.randrange(20, 40_000) for _ in range(n)], SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True)) for i, n in enumerate((4, 33, 70))]
    tokens, _ = run(core, requests)
    for r in requests:
        assert tokens[r.request_id] == oracle.greedy(smollm2_dir, tuple(r.prompt_token_ids), 12)
