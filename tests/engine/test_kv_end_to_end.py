"""Real layers over the arena: a window bounds the memory that a request holds, sequences wait for state slots, and
tokens stay those of transformers all the while."""

import random
from typing import Any

import oracle
import pytest
import torch
from test_oracle import VOCAB, run
from tiny_llama import save_byte_tokenizer

from engine.config import EngineConfig
from engine.core.kv.spec import pages_for
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, FinishReason
from engine.worker.startup.build import build_engine

WINDOW, PAGE = 24, 8
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.25,
         "max_position_embeddings": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def engine(model_dir, memory, **config) -> Any:
    return build_engine(EngineConfig(
        model_dir, device="cpu", dtype="float32", max_model_len=192, block_size=PAGE, kv_cache_memory_bytes=memory,
        **config))  # fmt: skip


@pytest.fixture(scope="module")
def mistral_dir(tmp_path_factory):
    from transformers import MistralConfig, MistralForCausalLM

    directory = tmp_path_factory.mktemp("mistral-")
    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(**SMALL, num_hidden_layers=2, sliding_window=WINDOW)).save_pretrained(directory)
    save_byte_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def recurrent_dir(tmp_path_factory):
    """Three recurrent layers to one of attention."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    directory = tmp_path_factory.mktemp("recurrent-")
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(
        **SMALL, num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16,
    )).save_pretrained(directory)  # fmt: skip
    save_byte_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def mixed_dir(tmp_path_factory):
    """Layers with and without a window, in turns."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    directory = tmp_path_factory.mktemp("mixed-")
    torch.manual_seed(0)
    Gemma2ForCausalLM(Gemma2Config(**SMALL, num_hidden_layers=4, sliding_window=WINDOW)).save_pretrained(directory)
    save_byte_tokenizer(directory)
    return directory


def greedy_requests(count, seed=3, longest=60):
    rng = random.Random(seed)
    stems = [[rng.randrange(3, VOCAB) for _ in range(longest)] for _ in range(2)]
    return [
        EngineRequest(f"r{i}", [*rng.choice(stems)[: rng.randrange(1, longest)], rng.randrange(3, VOCAB)],
                      SamplingParams(temperature=0, max_tokens=rng.randrange(1, 40), ignore_eos=True))
        for i in range(count)
    ]  # fmt: skip


def check_tokens(model_dir, requests, tokens, last):
    for request in requests:
        expected = oracle.greedy(model_dir, tuple(request.prompt_token_ids), request.params.max_tokens)
        got = tokens[request.request_id]
        assert got == expected[: len(got)]
        assert last[request.request_id].finish_reason is FinishReason.ABORT or got == expected


@pytest.mark.parametrize("budget", [9, 200])
def test_a_window_bounds_the_memory_of_a_request(mistral_dir, budget):
    core = engine(mistral_dir, 1 << 20, max_num_batched_tokens=budget)
    prompt = [(i * 37) % 300 + 3 for i in range(70)]
    core.add_request(EngineRequest("r", prompt, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)))
    tokens, held = [], []
    while core.has_work():
        for out in core.step():
            tokens += out.new_token_ids
        core.check()
        held.append(core.kv.pool.num_in_use)
    assert tokens == oracle.greedy(mistral_dir, tuple(prompt), 100)
    assert max(held) <= pages_for(WINDOW - 1 + min(budget, 70), PAGE) + 1
    assert max(held[-20:]) <= core.kv.memory.most_pages(0, 192, 1) < 170 // PAGE
    # What the window left behind is cached: a prompt that repeats hits, with the pages of its last window alone.
    core.add_request(EngineRequest("again", prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)))
    outputs = core.step()
    while core.has_work():
        outputs += core.step()
    assert outputs[0].num_cached_tokens == 64
    assert [t for out in outputs for t in out.new_token_ids] == tokens[:4]


@pytest.mark.parametrize("overlap", [False, True])
def test_layers_with_and_without_a_window_share_the_memory(mixed_dir, overlap):
    """So little that requests are preempted and slabs change hands."""
    core = engine(mixed_dir, 200_000, max_num_batched_tokens=33, overlap=overlap)
    assert core.kv.memory.windows == (None, WINDOW)
    requests = greedy_requests(14)
    tokens, last = run(core, requests, random.Random(1), aborts=0.03)
    check_tokens(mixed_dir, requests, tokens, last)
    assert core.stats().num_preemptions > 0
    assert core.stats().prefix_hits > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_more_requests_than_state_slots_wait(recurrent_dir, overlap):
    core = engine(recurrent_dir, 250_000, max_num_batched_tokens=33, max_num_seqs=16, overlap=overlap)
    assert core.kv.slots is not None
    requests = greedy_requests(20)
    for request in requests:
        core.add_request(request)
    most = waited = 0
    tokens, last = {r.request_id: [] for r in requests}, {}
    while core.has_work():
        for out in core.step():
            assert out.error is None
            tokens[out.request_id] += out.new_token_ids
            if out.finish_reason:
                last[out.request_id] = out
        core.check()
        most = max(most, core.kv.slots.num_in_use)
        waited += bool(core.scheduler.waiting)
    assert 1 < most < 16
    assert waited
    check_tokens(recurrent_dir, requests, tokens, last)


def test_states_survive_chunks_preemption_and_aborts(recurrent_dir):
    core = engine(recurrent_dir, 130_000, max_num_batched_tokens=7, max_num_seqs=5)
    requests = greedy_requests(14, seed=8)
    tokens, last = run(core, requests, random.Random(2), aborts=0.03)
    assert core.stats().num_preemptions > 0
    check_tokens(recurrent_dir, requests, tokens, last)


def test_a_request_whose_state_breaks_spoils_nobody(recurrent_dir):
    """Token 7 embeds to NaN; the next owner of its slot starts from zero."""
    core = engine(recurrent_dir, 250_000, max_num_seqs=2)
    with torch.inference_mode():
        core.runner.model.embed_tokens.weight[7] = float("nan")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompt = [(i * 13) % 300 + 10 for i in range(40)]
    requests = [EngineRequest(f"r{i}", prompt[::-1], params) for i in range(3)]
    tokens, last = run(core, [EngineRequest("bad", [*prompt, 7, 7], params), *requests], failing={"bad"})
    assert last["bad"].finish_reason is FinishReason.ERROR
    check_tokens(recurrent_dir, requests, tokens, last)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_state_from_the_cache_is_bit_equal(recurrent_dir, overlap):
    core = engine(recurrent_dir, 500_000, overlap=overlap)
    prompt = [(i * 31) % 300 + 3 for i in range(150)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    found = []
    for name in ("computed", "cached"):
        core.add_request(EngineRequest(name, prompt, params))
        outputs = []
        while core.has_work():
            outputs += core.step()
        found.append([(out.new_token_ids, out.logprobs) for out in outputs if out.new_token_ids])
        cached = outputs[0].num_cached_tokens
    assert cached == 128
    assert found[0] == found[1]
    assert [ids[0] for ids, _ in found[0]] == oracle.greedy(recurrent_dir, tuple(prompt), 12)


def test_requests_that_begin_alike_share_states(recurrent_dir):
    core = engine(recurrent_dir, 400_000, max_num_batched_tokens=90, max_num_seqs=4, overlap=True)
    rng = random.Random(4)
    stem = [rng.randrange(3, VOCAB) for _ in range(140)]
    requests = [
        EngineRequest(f"r{i}", [*stem[: rng.choice([70, 100, 140])], rng.randrange(3, 9)],
                      SamplingParams(temperature=0, max_tokens=rng.randrange(1, 12), ignore_eos=True))
        for i in range(14)
    ]  # fmt: skip
    tokens, last = run(core, requests, random.Random(2), aborts=0.02)
    check_tokens(recurrent_dir, requests, tokens, last)
    assert core.stats().prefix_hits >= 64 * 6
