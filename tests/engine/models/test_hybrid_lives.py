"""Real layers in random lives: chunks of any size, prefixes found, preemption, ends in flight, little memory, overlap.

For each kind of memory a family: pages alone, with a window, with wide heads that keep keys for values, with states.
What a request gets is what transformers gives it alone, token for token, and pages and slots add up after every step.
All is drawn from the seed that a failure names.
"""

import random
from collections import Counter
from pathlib import Path

import oracle
import pytest
import torch
from test_gemma import SHAPES as GEMMA_SHAPES
from test_gemma import save_tiny_gemma
from tiny_llama import TINY_LLAMAS, save_byte_tokenizer, save_tiny_llama

from engine.config import EngineConfig
from engine.core.loop import EngineCore
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, FinishReason
from engine.worker.startup.build import build_engine

VOCAB, MAX_LEN, TOKENS, SEEDS = 320, 192, 60, range(8)
FAMILIES = ["llama", "gemma3", "gemma4_31b", "qwen3.5"]


@pytest.fixture(scope="module", params=FAMILIES)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        save_tiny_llama(directory, **TINY_LLAMAS["gqa"])
    elif request.param == "qwen3.5":
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

        torch.manual_seed(5)
        Qwen3_5ForCausalLM(Qwen3_5TextConfig(
            vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=16, linear_value_head_dim=16, max_position_embeddings=512, initializer_range=0.25,
        )).save_pretrained(directory)  # fmt: skip
        save_byte_tokenizer(directory)
    else:
        save_tiny_gemma(directory, GEMMA_SHAPES[request.param])
    return directory


def small_engine(model_dir: Path, rng: random.Random) -> EngineCore:
    """Of random limits, with memory for one request of full length and little more."""
    def build(memory: int) -> EngineCore:
        return build_engine(EngineConfig(
            model_dir, device="cpu", dtype="float32", max_model_len=MAX_LEN, kv_cache_memory_bytes=memory, **knobs))

    knobs = {
        "block_size": rng.choice([8, 16, 32]), "max_num_batched_tokens": rng.choice([4, 16, 40, 90]),
        "max_num_seqs": rng.randrange(3, 10), "overlap": rng.random() < 0.6,
        "enable_prefix_caching": rng.random() < 0.85,
        "scheduling_policy": rng.choice(["fcfs", "fcfs", "priority"]),
    }  # fmt: skip
    spec = build(8 << 20).runner.cache.spec
    least = spec.slabs_for(MAX_LEN, knobs["max_num_batched_tokens"]) * spec.slab_bytes + spec.fixed_bytes
    return build(least + rng.choice([0, 0, 1, 4]) * spec.slab_bytes * (2 if spec.slot_bytes else 1))


def live(model_dir: Path, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    core = small_engine(model_dir, rng)
    bank = random.Random(7)  # the same few prompts in all lives: the oracle is asked once for each
    stems = [[bank.randrange(3, VOCAB) for _ in range(n)] for n in (3, 20, 100)]
    tails = [[], [bank.randrange(3, VOCAB)], [bank.randrange(3, VOCAB) for _ in range(30)]]
    requests = [
        EngineRequest(f"r{i}", rng.choice(stems) + rng.choice(tails), SamplingParams(
            temperature=0, max_tokens=rng.choice([1, 6, TOKENS, TOKENS]), ignore_eos=True), priority=rng.randrange(2))
        for i in range(12)
    ]  # fmt: skip
    tokens, last, waiting = {r.request_id: [] for r in requests}, {}, list(requests)
    seen: Counter[str] = Counter()
    while waiting or core.has_work():
        if waiting and (rng.random() < 0.5 or not core.has_work()):
            core.add_request(waiting.pop(0))
        if rng.random() < 0.03 and core.scheduler.running:
            victim = rng.choice(core.scheduler.running)
            seen["ends in flight"] += victim.last_step > core.scheduler.rows.completed_step
            core.abort([victim.request_id])
        for out in core.step():
            assert out.error is None, out.error
            tokens[out.request_id] += out.new_token_ids
            if out.finish_reason:
                last[out.request_id] = out.finish_reason
        core.check()
    for request in requests:
        got = tokens[request.request_id]
        expected = oracle.greedy(model_dir, tuple(request.prompt_token_ids), TOKENS)[: request.params.max_tokens]
        assert got == expected[: len(got)], request.request_id
        assert last[request.request_id] is FinishReason.ABORT or got == expected, request.request_id
    stats = core.stats()
    assert stats.pages_in_use == core.kv.num_deferred == 0
    seen["preemptions"] += stats.num_preemptions
    seen["tokens from the cache"] += stats.prefix_hits
    return seen


def test_random_lives(model_dir: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        try:
            seen += live(model_dir, seed)
        except AssertionError as error:
            raise AssertionError(f"the life of seed {seed}: {error}") from error
    assert seen["ends in flight"], seen
    assert seen["preemptions"], seen
    assert seen["tokens from the cache"], seen


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_prefix_is_found_in_pages_of_any_size(model_dir: Path, block_size: int, overlap: bool) -> None:
    """States lie at multiples of 64 whatever a page holds; pages where they are full. Chunks end beside both."""
    core = build_engine(EngineConfig(
        model_dir, device="cpu", dtype="float32", max_model_len=MAX_LEN, kv_cache_memory_bytes=8 << 20,
        block_size=block_size, max_num_batched_tokens=45, overlap=overlap,
    ))  # fmt: skip
    prompt = [(i * 31) % 300 + 3 for i in range(150)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for name in ("computed", "cached"):
        core.add_request(EngineRequest(name, prompt, params))
        outputs = []
        while core.has_work():
            outputs += core.step()
            core.check()
        assert [t for out in outputs for t in out.new_token_ids] == oracle.greedy(model_dir, tuple(prompt), 12)
        cached = max(out.num_cached_tokens for out in outputs)
        grid = 64 if core.kv.memory.has_state else block_size
        assert cached == (0 if name == "computed" else 149 // grid * grid)


def test_a_seeded_request_does_not_see_who_runs_beside_it(model_dir: Path) -> None:
    """Drawn tokens and their scores, alone and in a crowd that comes and goes, with other chunks and slots."""
    rng = random.Random(3)
    prompt = [rng.randrange(3, VOCAB) for _ in range(77)]
    params = SamplingParams(temperature=1.1, seed=9, max_tokens=20, ignore_eos=True, logprobs=0)
    crowd = [
        EngineRequest(f"c{i}", [rng.randrange(3, VOCAB) for _ in range(9 + 21 * i)], SamplingParams(
            temperature=1.0, seed=i, max_tokens=5 + 8 * i, ignore_eos=True)) for i in range(4)
    ]  # fmt: skip

    def drawn(others: list[EngineRequest], **knobs: object) -> tuple[list[int], list[float]]:
        core = build_engine(EngineConfig(
            model_dir, device="cpu", dtype="float32", max_model_len=MAX_LEN, kv_cache_memory_bytes=8 << 20, **knobs))
        for request in (*others, EngineRequest("x", prompt, params)):
            core.add_request(request)
        mine = []
        while core.has_work():
            mine += [out for out in core.step() if out.request_id == "x" and out.new_token_ids]
            core.check()
        return [out.new_token_ids[0] for out in mine], [out.logprobs[0].logprob for out in mine]

    alone = drawn([])
    for others, knobs in ((crowd, {}), (crowd[:2], {"max_num_batched_tokens": 33, "overlap": True})):
        tokens, scores = drawn(others, **knobs)
        assert tokens == alone[0]
        assert scores == pytest.approx(alone[1], abs=1e-4)
