"""`--kv-cache-dtype int8_per_token_head`: memory, requests that share it, and what it costs in quality."""

import random

import pytest
import torch
from test_kv_end_to_end import WINDOW, engine, greedy_requests, mistral_dir, mixed_dir, recurrent_dir  # noqa: F401
from test_oracle import run

from engine.capabilities import check_capabilities
from engine.config import EngineConfig
from engine.core.kv.spec import AttentionLayer, StateLayer
from engine.errors import ConfigError
from engine.kernels.pointwise.reference import to_int8
from engine.layers.attention import Attention
from engine.worker.cache import Cache, cache_spec

INT8 = {"kv_cache_dtype": "int8_per_token_head"}
LAYERS = (AttentionLayer(4, 16), AttentionLayer(1, 64, window=WINDOW), AttentionLayer(4, 16, kv_from=0))


def test_a_page_holds_the_numbers_and_a_scale_for_each_token_and_head():
    spec, in_16_bits = (cache_spec(LAYERS, dtype, 16) for dtype in (torch.int8, torch.bfloat16))
    assert spec.page_bytes == 16 * 2 * (4 * (16 + 4) + (64 + 4))
    assert in_16_bits.page_bytes == 16 * 2 * (4 * 16 + 64) * 2


@pytest.mark.parametrize("layers", [
    LAYERS[:1], LAYERS, (*LAYERS, StateLayer(((3, 5), (7,)), ("float32", "bfloat16"))),
    (AttentionLayer(2, 16), AttentionLayer(3, 24)),
])  # fmt: skip
@pytest.mark.parametrize("heads_first", [False, True])
def test_numbers_and_scales_of_all_layers_have_memory_of_their_own(layers, heads_first, monkeypatch):
    if heads_first:  # as on a GPU
        monkeypatch.setattr("engine.worker.cache._is_gpu", lambda device: True)
    spec = cache_spec(layers, torch.int8, 8)
    cache = Cache(spec, 3, torch.int8, torch.device("cpu"))
    for group in spec.groups:  # a slab holds pages of one group at a time
        taken = torch.zeros(cache.nbytes, dtype=torch.int32)
        for i in group.layers:
            for numbers, scales in zip(cache.kv[i], cache.scales[i], strict=True):
                head_dim = spec.storing[i].head_dim
                assert numbers.shape == (*scales.shape, head_dim)
                # What the kernels compute the address of a scale from.
                page, token, head, _ = numbers.stride()
                assert scales.stride() == (page // 4, token // head_dim, head // head_dim)
                assert page % 4 == 0
                for number in range(numbers.shape[0]):
                    numbers[number], scales[number] = 1, 1.0
                    found = cache.memory != 0
                    # Of the four bytes of 1.0, two are not zero.
                    assert int(found.sum()) == numbers[0].numel() + 2 * scales[0].numel()
                    taken += found
                    cache.memory.zero_()
        assert taken.max() == 1
    modules = [torch.nn.Module() for _ in layers]
    cache.bind(modules)
    if len(layers) > 2:
        assert modules[2].k_scale is modules[0].k_scale


def test_rounding_is_to_the_nearest_of_127_steps():
    x = torch.randn(5, 3, 64) * torch.logspace(-6, 6, 5)[:, None, None]
    numbers, scale = to_int8(x)
    assert (numbers.abs().amax(-1) == 127).all()
    assert ((numbers * scale[..., None] - x).abs() <= scale[..., None] * 0.5001).all()
    assert not to_int8(torch.zeros(2, 3, 8))[0].any()


@pytest.mark.parametrize("model, memory, longest", [
    ("mistral_dir", 30_000, 60), ("mixed_dir", 60_000, 60), ("recurrent_dir", 95_000, 110)
])  # fmt: skip
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_do_not_depend_on_preemption_chunks_or_the_prefix_cache(model, memory, longest, overlap, request):
    """Little memory and small steps, beside one request at a time with plenty of memory and no prefix cache."""
    directory = request.getfixturevalue(model)
    requests = greedy_requests(14, longest=longest)
    core = engine(directory, memory, max_num_batched_tokens=33, overlap=overlap, **INT8)
    assert {m.k_cache.dtype for m in core.runner.model.modules() if isinstance(m, Attention)} == {torch.int8}
    tokens, _ = run(core, requests, random.Random(1))
    assert core.stats().num_preemptions > 0
    assert core.stats().prefix_hits > 0 or model == "recurrent_dir"  # states are kept every 64 tokens only
    alone = engine(directory, 1 << 22, max_num_seqs=1, enable_prefix_caching=False, **INT8)
    expected, _ = run(alone, greedy_requests(14, longest=longest))
    assert tokens == expected


@pytest.mark.parametrize("name", ["int8", "int8_per_token_head"])
def test_twice_as_many_tokens_fit_into_the_same_memory(smollm2_dir, name):
    memory = 32 << 20
    in_16_bits, in_8 = (
        engine_of(smollm2_dir, memory, dtype="bfloat16", kv_cache_dtype=dtype) for dtype in ("bfloat16", name)
    )
    ratio = in_8.stats().pages_total / in_16_bits.stats().pages_total
    assert ratio == pytest.approx(2 * 64 / (64 + 4), rel=0.01)


def engine_of(model, memory, **config):
    from engine.worker.startup.build import build_engine

    return build_engine(EngineConfig(model, device="cpu", max_model_len=256, kv_cache_memory_bytes=memory, **config))


@pytest.mark.timeout(300)
def test_a_real_model_predicts_as_well_as_with_a_cache_in_16_bits(smollm2_dir):
    from engine.bench.quality import scores

    before, after = (scores(smollm2_dir, 300, device="cpu", kv_cache_dtype=dtype) for dtype in ("auto", "int8"))
    for language, score in after.items():
        assert score.losses != before[language].losses
        assert score.perplexity == pytest.approx(before[language].perplexity, rel=0.02)
        assert score.agreement(before[language]) > 0.95


def test_greedy_answers_of_a_real_model_stay_what_they_were(smollm2_dir):
    from engine import LLM, SamplingParams

    prompts = ["The capital of France is", "Water boils at", "1, 2, 3, 4,", "def add(a, b):\n    return"]
    params = SamplingParams(temperature=0, max_tokens=12)
    found = []
    for dtype in ("auto", "int8"):
        llm = LLM(model=smollm2_dir, device="cpu", max_model_len=128, kv_cache_dtype=dtype)
        found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    same = [a == b for one, other in zip(*found, strict=True) for a, b in zip(one, other, strict=True)]
    assert sum(same) >= 0.9 * len(same)


def test_batch_invariance_is_refused_with_an_int8_cache(tmp_path):
    config = EngineConfig(tmp_path, kv_cache_dtype="int8", batch_invariant=True)
    with pytest.raises(ConfigError, match="int8 KV cache"):
        check_capabilities(config, "cuda")
