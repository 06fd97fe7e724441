"""Embeddings equal the hidden states of transformers, however the work is cut, shared, evicted or interrupted."""

import random

import numpy as np
import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_oracle import VOCAB, run, tiny_engine
from tiny_llama import TINY_LLAMAS

from engine import LLM
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, FinishReason
from engine.embedding import finished
from engine.errors import InvalidRequestError


def assert_equal(model_dir, request, output):
    expected = oracle.embedding(model_dir, request.prompt_token_ids, request.pooling)
    np.testing.assert_allclose(finished(output.embedding), expected, atol=1e-4)


def embed(name, prompt, pooling):
    return EngineRequest(name, prompt, SamplingParams(), pooling=pooling)


def chat(name, prompt, tokens=24):
    return EngineRequest(name, prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))


@pytest.mark.parametrize("shape", sorted(TINY_LLAMAS))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_embeddings_beside_answers_equal_transformers(shape, tiny_llama_dir, data):
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
    bank = random.Random(7)
    stems = [[bank.randrange(3, VOCAB) for _ in range(n)] for n in (1, 5, 40, 70)]
    tails = [[], [9, 8, 7], [bank.randrange(3, VOCAB) for _ in range(20)]]
    requests = []
    for i in range(rng.randrange(1, 9)):
        prompt, pooling = rng.choice(stems) + rng.choice(tails), rng.choice([None, "last", "mean"])
        requests.append(chat(f"r{i}", prompt, rng.randrange(1, 25)) if pooling is None
                        else embed(f"r{i}", prompt, pooling))
    tokens, last = run(core, requests, rng, aborts=0.05)
    for request in requests:
        output = last[request.request_id]
        if request.pooling is None:
            expected = oracle.greedy(model_dir, tuple(request.prompt_token_ids), 24)
            assert tokens[request.request_id] == expected[: len(tokens[request.request_id])]
        elif output.finish_reason is FinishReason.ABORT:
            assert output.embedding is None
        else:
            assert_equal(model_dir, request, output)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_preemption_does_not_change_embeddings(tiny_llama_dir, pooling):
    model_dir = tiny_llama_dir("gqa")
    core = tiny_engine(model_dir, num_pages=14, max_num_batched_tokens=16, overlap=True)
    prompts = [[(i * 7 + k) % 300 + 3 for k in range(100)] for i in range(4)]
    requests = [request for i, prompt in enumerate(prompts)
                for request in (chat(f"c{i}", prompt[:20], 100), embed(f"e{i}", prompt, pooling))]
    _, last = run(core, requests, random.Random(3))
    assert core.stats().num_preemptions > 0
    for request in requests:
        if request.pooling:
            assert_equal(model_dir, request, last[request.request_id])


def test_a_sliding_window_leaves_embeddings_right(tmp_path):
    from tiny_llama import save_byte_tokenizer
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=24, initializer_range=0.25, max_position_embeddings=512,
    )).save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    requests = [embed(f"{pooling}{n}", [(i * 37) % 300 + 3 for i in range(n)], pooling)
                for pooling in ("last", "mean") for n in (60, 90)]
    _, last = run(tiny_engine(tmp_path, max_num_batched_tokens=13), requests)
    for request in requests:
        assert_equal(tmp_path, request, last[request.request_id])


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_vector_that_is_not_finite_fails_its_request_alone(tiny_llama_dir, pooling):
    core = tiny_engine(tiny_llama_dir("gqa"), max_num_batched_tokens=200)
    weight = core.runner.model.embed_tokens.weight
    kept = weight[7].clone()
    with torch.inference_mode():
        weight[7] = float("nan")
    requests = [embed("bad", [5, 6, 7, 8] * 9, pooling), embed("good", [5, 6, 9, 8] * 9, pooling)]
    try:
        _, last = run(core, requests, failing={"bad"})
    finally:
        with torch.inference_mode():
            weight[7] = kept
    assert last["bad"].finish_reason is FinishReason.ERROR
    assert "not numbers" in last["bad"].error
    assert_equal(tiny_llama_dir("gqa"), requests[1], last["good"])
    again = [embed("again", [5, 6, 7, 8] * 9, pooling)]
    assert_equal(tiny_llama_dir("gqa"), again[0], run(core, again)[1]["again"])


@pytest.fixture(scope="module")
def llm(smollm2_dir):
    return LLM(model=str(smollm2_dir), dtype="float32", device="cpu", max_model_len=512, gpu_memory_utilization=0.5,
               max_num_seqs=16, max_num_batched_tokens=64)


TEXTS = ["The capital of France is Paris.", "Paris is the capital of France.", "def add(a, b): return a + b",
         "A long text. " * 40]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_real_model_through_the_offline_api(llm, smollm2_dir, pooling):
    outputs = llm.embed(TEXTS, pooling=pooling)
    again = llm.embed(TEXTS, pooling=pooling)
    for first, second in zip(outputs, again, strict=True):
        expected = oracle.embedding(smollm2_dir, first.prompt_token_ids, pooling)
        np.testing.assert_allclose(first.outputs.embedding, expected, atol=1e-4)
        np.testing.assert_allclose(second.outputs.embedding, expected, atol=1e-4)
    assert (again[3].num_cached_tokens > 0) == (pooling == "last")
    assert llm.engine.kv.pool.num_in_use == 0


def test_alike_texts_lie_near(llm):
    france, turned, code, _ = (np.array(o.outputs.embedding) for o in llm.embed(TEXTS, pooling="mean"))
    assert france @ turned > france @ code


def test_dimensions_are_cut_and_normalised_again(llm, smollm2_dir):
    [output] = llm.embed(TEXTS[0], dimensions=64)
    assert len(output.outputs.embedding) == 64
    expected = oracle.embedding(smollm2_dir, output.prompt_token_ids, "last", 64)
    np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-4)
    [raw] = llm.embed(TEXTS[0], normalize=False)
    assert np.linalg.norm(raw.outputs.embedding) > 1.5


def test_a_bad_prompt_leaves_nothing_behind(llm):
    with pytest.raises(InvalidRequestError):
        llm.embed(["fine", ""])
    assert not llm.engine.has_work()
    llm.engine.check()
