"""Gemma 2, 3 and 4: greedy tokens equal transformers' however the work is cut, shared, evicted or interrupted."""

import functools
import random

import numpy as np
import oracle
import pytest
import torch
from test_oracle import VOCAB, run
from tiny_llama import save_byte_tokenizer

from engine.config import EngineConfig
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest
from engine.embedding import finished
from engine.errors import OutOfMemoryPlanError
from engine.worker.startup.build import build_engine

GEMMA4 = {"sliding_window": 24, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_attention_heads": 4,
          "final_logit_softcapping": 4.0}
SHAPES = {
    "gemma2": {"model": "Gemma2", "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
               "sliding_window": 24, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0,
               "final_logit_softcapping": 4.0},
    "gemma3": {"model": "Gemma3", "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1,
               "sliding_window": 24, "query_pre_attn_scalar": 20},
    "gemma3_linear": {"model": "Gemma3", "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
                      "hidden_size": 48, "sliding_window": 17, "layer_types": ["full_attention", "sliding_attention"],
                      "rope_parameters": {
                          "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                          "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "gemma4_31b": GEMMA4 | {"model": "Gemma4", "num_hidden_layers": 6, "num_attention_heads": 8,
                            "num_key_value_heads": 4, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
    "gemma4_12b": GEMMA4 | {"model": "Gemma4Unified", "num_hidden_layers": 6, "num_key_value_heads": 4,
                            "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "gemma4_26b": GEMMA4 | {"model": "Gemma4", "num_hidden_layers": 6, "num_key_value_heads": 2,
                            "num_global_key_value_heads": 1, "attention_k_eq_v": True, "enable_moe_block": True,
                            "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32},
    "gemma4_e2b": GEMMA4 | {"model": "Gemma4", "num_hidden_layers": 10, "num_key_value_heads": 1,
                            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
                            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
                            "num_kv_shared_layers": 5, "use_double_wide_mlp": True},
    "gemma4_e4b": GEMMA4 | {"model": "Gemma4", "num_hidden_layers": 6, "num_key_value_heads": 2,
                            "layer_types": ["sliding_attention", "full_attention"] * 3,
                            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
                            "num_kv_shared_layers": 3},
}


def save_tiny_gemma(directory, settings):
    import transformers

    settings = dict(settings)
    family = settings.pop("model")
    config_class = getattr(transformers, f"{family}Config" if family == "Gemma2" else f"{family}TextConfig")
    config = config_class(**({
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "initializer_range": 0.25,
        "max_position_embeddings": 512} | settings))
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():  # norms and scalars start as ones or zeros: dropping them must show
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if any(part in name for part in ("norm", "layer_scalar", "router.")):
                tensor.add_(torch.randn_like(tensor) * 0.3)
    model.save_pretrained(directory)
    save_byte_tokenizer(directory)


@pytest.fixture(scope="module")
def gemma_dir(tmp_path_factory):
    made = {}

    def make(shape):
        if shape not in made:
            made[shape] = tmp_path_factory.mktemp(shape)
            save_tiny_gemma(made[shape], SHAPES[shape])
        return made[shape]

    return make


def engine(model_dir, *, memory=8 << 20, dtype="float32", **config):
    return build_engine(EngineConfig(model_dir, device="cpu", dtype=dtype, max_model_len=192,
                                     kv_cache_memory_bytes=memory, **config))


def prompt_scores(core, prompt):
    """Logprobs of all tokens of the prompt but the first."""
    core.add_request(EngineRequest("r", prompt, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)))
    outputs = []
    while core.has_work():
        outputs += core.step()
    return torch.tensor([entry.logprob for entry in outputs[0].prompt_logprobs[1:]])


def greedy(prompt, name="r", max_tokens=16):
    return EngineRequest(name, prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [13, 200])
def test_embeddings_equal_transformers(gemma_dir, shape, budget):
    """Twice, so that the second prompt continues from the prefix cache where it may; beside an answer."""
    model_dir = gemma_dir(shape)
    prompt = [(i * 37) % 300 + 3 for i in range(70)]
    core = engine(model_dir, max_num_batched_tokens=budget, max_num_seqs=3)
    answer = EngineRequest("answer", prompt[:9], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    requests = [EngineRequest(f"{pooling}{n}", prompt, SamplingParams(), pooling=pooling)
                for n in range(2) for pooling in ("last", "mean")]
    _, last = run(core, [answer, *requests])
    for request in requests:
        expected = oracle.embedding(model_dir, prompt, request.pooling)
        np.testing.assert_allclose(finished(last[request.request_id].embedding), expected, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [7, 33, 200])
def test_greedy_equals_transformers(gemma_dir, shape, budget):
    """Chunks of any size, hits of prefixes longer and shorter than the window, three of eight at a time, aborts."""
    model_dir, rng = gemma_dir(shape), random.Random(budget)
    bank = random.Random(7)
    stems = [[bank.randrange(3, VOCAB) for _ in range(n)] for n in (5, 40, 70)]
    requests = [greedy(rng.choice(stems) + [9, 8, 7][: i % 4], f"r{i}") for i in range(8)]
    size = 8 if budget == 7 else 16
    core = engine(model_dir, max_num_batched_tokens=budget, max_num_seqs=3, block_size=size, overlap=budget == 33)
    tokens, _ = run(core, requests, rng, aborts=0.03)
    assert any(len(tokens[r.request_id]) == 16 for r in requests)
    for r in requests:
        got = tokens[r.request_id]
        assert got == oracle.greedy(model_dir, tuple(r.prompt_token_ids), 16)[: len(got)]


@pytest.mark.parametrize("shape", ["gemma2", "gemma4_31b", "gemma4_26b", "gemma4_e2b"])
def test_preemption_does_not_change_tokens(gemma_dir, shape):
    """In little more memory than the plan accepts, until requests have to give theirs up."""
    model_dir, preempted, accepted = gemma_dir(shape), 0, 0
    requests = [greedy(list(range(i + 3, i + 43)), f"r{i}", 80) for i in range(4)]
    memory = 64 << 10
    while not preempted:
        memory = memory * 11 // 10
        try:
            core = engine(model_dir, memory=memory, max_num_batched_tokens=64)
        except OutOfMemoryPlanError:
            continue
        accepted += 1
        assert accepted < 10, f"{memory} bytes hold all requests, and in less none had to wait for another's pages"
        tokens, _ = run(core, requests)
        preempted = core.stats().num_preemptions
    for r in requests:
        assert tokens[r.request_id] == oracle.greedy(model_dir, tuple(r.prompt_token_ids), 80)


def smallest_engine(model_dir):
    """With as little memory as the plan accepts."""
    return engine(model_dir, memory=smallest_memory(model_dir), max_num_batched_tokens=150)


@functools.cache
def smallest_memory(model_dir):
    """Tens of engines are tried."""
    memory, accepted = 4 << 20, None
    while True:
        try:
            engine(model_dir, memory=memory, max_num_batched_tokens=150)
        except OutOfMemoryPlanError:
            assert accepted is not None
            return accepted
        accepted, memory = memory, memory * 9 // 10


@pytest.mark.parametrize("shape", ["gemma2", "gemma3_linear", "gemma4_31b", "gemma4_e2b"])
def test_a_long_chunk_of_which_a_window_keeps_the_end_does_not_change_tokens(gemma_dir, shape):
    """What a window passes within a step gets no pages where they are short."""
    model_dir = gemma_dir(shape)
    core = smallest_engine(model_dir)
    requests = [greedy([(i * 7 + n) % 300 + 3 for n in range(170)], f"r{i}", 12) for i in range(2)]
    with_holes = 0
    grow = core.kv.grow

    def watched(seq, num_tokens):
        nonlocal with_holes
        grown = grow(seq, num_tokens)
        with_holes += any(0 in table[passed:] for table, passed in zip(seq.tables, seq.num_out_of_window, strict=True))
        return grown

    core.kv.grow = watched
    tokens, _ = run(core, requests)
    assert with_holes
    for r in requests:
        assert tokens[r.request_id] == oracle.greedy(model_dir, tuple(r.prompt_token_ids), 12)


@pytest.mark.parametrize(("shape", "writing"), [("gemma4_e2b", 5), ("gemma4_e4b", 3), ("gemma3", 6)])
def test_layers_without_keys_of_their_own_go_on_with_tokens_that_are_read(gemma_dir, shape, writing):
    core = engine(gemma_dir(shape), max_num_batched_tokens=60, max_num_seqs=3)
    rows = [[] for _ in core.runner.model.blocks]
    for seen, layer in zip(rows, core.runner.model.blocks, strict=True):
        layer.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(len(inputs[0])))
    run(core, [greedy(list(range(3, 73)), "long", 3), greedy(list(range(9, 29)), "short", 3)])
    assert rows[0][:2] == [60, 30], "the first 60 tokens of one; its last ten, and the other"
    assert all(seen == rows[0] for seen in rows[:writing])
    assert all(seen[:2] == [1, 2] for seen in rows[writing:]), "of the first step nothing is read, but one"
    assert all(seen[2:] == rows[0][2:] for seen in rows), "decode steps"
    rows[-1].clear()
    prompt_scores(core, list(range(40, 90)))
    assert rows[-1] == [50], "all are read"


@pytest.mark.parametrize("length", range(130, 146))
def test_the_last_token_of_such_a_chunk_finds_all_that_it_sees(gemma_dir, length):
    """Layers that borrow keys read its window from pages. For one of these lengths the first one that it sees stands
    alone on a page, which the next token does not see."""
    model_dir = gemma_dir("gemma4_e2b")
    prompt = [n % 300 + 3 for n in range(length)]
    core = smallest_engine(model_dir)
    core.add_request(EngineRequest("r", prompt, SamplingParams(temperature=0, max_tokens=2, logprobs=1)))
    [output] = core.step()
    [seq] = core.scheduler.running
    assert any(0 in table for table in seq.tables), "there is a hole"
    assert all(0 not in table[(length - 24) // core.kv.page_size :] for table in seq.tables), "before the window"
    expected = oracle.logits(model_dir, prompt)[-1].log_softmax(-1).max().item()
    assert output.logprobs[0].logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("shape", ["gemma2", "gemma3", "gemma4_12b", "gemma4_26b", "gemma4_e2b"])
def test_scores_equal_transformers(gemma_dir, shape):
    """Caps do not change which token is best: only scores show them."""
    model_dir = gemma_dir(shape)
    prompt = [(i * 31) % 300 + 3 for i in range(60)]
    logits = oracle.logits(model_dir, prompt)
    if shape != "gemma3":
        assert 3 < logits.abs().max() <= 4
    found = prompt_scores(engine(model_dir, max_num_batched_tokens=23), prompt)
    torch.testing.assert_close(found, logits.log_softmax(-1)[range(59), prompt[1:]], rtol=0, atol=1e-3)


@pytest.mark.parametrize("shape", ["gemma2", "gemma3", "gemma4_12b", "gemma4_e2b"])
def test_bf16_scores_stay_near(gemma_dir, shape):
    model_dir = gemma_dir(shape)
    prompt = [(i * 31) % 300 + 3 for i in range(60)]
    found = prompt_scores(engine(model_dir, dtype="bfloat16"), prompt)
    expected = oracle.logits(model_dir, prompt).log_softmax(-1)[range(59), prompt[1:]]
    assert (found - expected).abs().mean() < 0.1
