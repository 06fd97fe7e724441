"""One short sequence attends in float32 on a Zen 4. A step that must repeat does not, nor does any other step."""

import pytest
import torch
from test_oracle import run

from engine.config import EngineConfig
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest
from engine.kernels.attention.reference import AttentionBatch, DecodeBucket
from engine.kernels.gemm import cpu_format
from engine.layers import attention
from engine.worker.startup.build import build_engine

PROMPT = list(range(5, 25))


@pytest.fixture
def core(tiny_llama_dir, monkeypatch):
    monkeypatch.setattr(cpu_format, "compute_dtype", lambda stored: stored)
    return build_engine(EngineConfig(tiny_llama_dir("gqa"), device="cpu", dtype="bfloat16", max_model_len=128))


@pytest.fixture
def decoded_in(core, monkeypatch):
    """Answers so many requests, and returns the types that their decode steps attended in."""
    found, plain = [], attention.paged_attention

    def watched(q, k, v, k_cache, v_cache, batch, **around):
        if not batch.prefills:
            found.append(q.dtype)
        return plain(q, k, v, k_cache, v_cache, batch, **around)

    monkeypatch.setattr(attention, "paged_attention", watched)

    def answer(count=1, *, zen4=True, seed=None, base_seed=False, short=attention._SHORT):
        monkeypatch.setattr(core.runner, "all_repeat", base_seed)
        monkeypatch.setattr(cpu_format, "reads_bf16_slowly", lambda: zen4)
        monkeypatch.setattr(attention, "_SHORT", short)
        found.clear()
        params = SamplingParams(temperature=0.7 if seed else 0, seed=seed, max_tokens=6, ignore_eos=True)
        tokens, _ = run(core, [EngineRequest(str(i), PROMPT, params) for i in range(count)])
        assert all(len(each) == 6 for each in tokens.values())
        return set(found)

    return answer


def test_one_short_sequence(decoded_in):
    assert decoded_in() == {torch.float32}


@pytest.mark.parametrize("other", [{"count": 2}, {"zen4": False}, {"seed": 1}, {"base_seed": True},
                                   {"short": 0}],
                         ids=["two sequences", "another CPU", "with a seed", "--seed", "a long one"])  # fmt: skip
def test_any_other_step_attends_in_bf16(decoded_in, other):
    assert decoded_in(**other) == {torch.bfloat16}


def test_a_seed_of_the_server_makes_all_steps_repeat(tiny_llama_dir):
    repeats = [
        build_engine(EngineConfig(tiny_llama_dir("gqa"), device="cpu", dtype="bfloat16", seed=seed)).runner.all_repeat
        for seed in (None, 0, 7)
    ]
    assert repeats == [False, True, True]


def test_a_cache_in_bf16_is_read_exactly():
    """float32 attends to the same keys and values, and loses less."""
    torch.manual_seed(0)
    pages, heads, dim, length = 12, 3, 64, 77
    keys, values = (torch.randn(pages, 8, heads, dim).bfloat16() for _ in range(2))
    table = torch.randperm(pages)[: -(-length // 8)]
    q = torch.randn(1, 9, dim).bfloat16()

    def attended(query):
        bucket = DecodeBucket(torch.tensor([0]), table, torch.tensor([length]), 8 * len(table))
        return attention.paged_attention(query, keys, values, keys, values, AttentionBatch([bucket], []), scale=0.2)

    k, v = (cache[table].flatten(0, 1)[:length].double().repeat_interleave(3, 1) for cache in (keys, values))
    weights = (torch.einsum("hd,lhd->hl", q[0].double(), k) * 0.2).softmax(-1)
    exact = torch.einsum("hl,lhd->hd", weights, v)
    errors = [(attended(query)[0].double() - exact).norm() / exact.norm() for query in (q.float(), q)]
    assert errors[0] < 1e-6
    assert 1e-4 < errors[1] < 2e-2
