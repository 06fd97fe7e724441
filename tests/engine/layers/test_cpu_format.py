"""In which numbers a CPU computes: chosen by its instructions, told in the plan, the same for one row and for many."""

import random

import pytest
import torch
from oracle import greedy, logits
from questions import ANSWER, QUESTION

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.core.request import EngineRequest
from engine.kernels.gemm import cpu_format, fp16_weight
from engine.layers.linear import Linear
from engine.worker.startup.build import build_engine

pytestmark = pytest.mark.skipif(not fp16_weight.is_available(), reason="PyTorch has no FBGEMM here")


@pytest.fixture
def weak(monkeypatch):
    """A CPU without bf16 instructions."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")


def build(model_dir, **config):
    return build_engine(EngineConfig(model_dir, device="cpu", **(
        {"max_model_len": 256, "kv_cache_memory_bytes": 64 << 20} | config)))


@pytest.mark.parametrize(("limit", "has_units", "stored", "compute"), [
    ("", True, torch.bfloat16, torch.bfloat16),
    ("", False, torch.bfloat16, torch.float32),
    ("AVX512_CORE_AMX", True, torch.bfloat16, torch.bfloat16),
    ("AVX512_CORE_BF16", True, torch.bfloat16, torch.bfloat16),
    ("avx512_core_vnni", True, torch.bfloat16, torch.float32),
    ("AVX2", True, torch.bfloat16, torch.float32),
    ("", True, torch.float16, torch.float32),
    ("AVX2", False, torch.float32, torch.float32),
])
def test_the_instruction_set_decides(monkeypatch, limit, has_units, stored, compute):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_units)
    assert cpu_format.compute_dtype(stored) == compute


def test_without_fbgemm_nothing_changes(monkeypatch, weak):
    monkeypatch.setattr(fp16_weight, "is_available", lambda: False)
    assert cpu_format.compute_dtype(torch.bfloat16) == torch.bfloat16


def test_the_plan_says_what_was_chosen_and_counts_it(smollm2_dir, weak):
    core = build(smollm2_dir)
    [line] = [line for line in core.info()["memory_plan"].splitlines() if line.startswith("  weights")]
    assert line.endswith("bfloat16; computes in float32: this CPU has no bf16 instructions")
    assert (core.info()["dtype"], core.info()["compute_dtype"]) == ("bfloat16", "float32")
    model = core.runner.model
    packed = sum(getattr(m, "packed_bytes", 0) for m in model.modules())
    assert packed > 2 * 134_000_000, "all products read packed weights"
    assert model.embed_tokens.weight.dtype == torch.bfloat16, "a table that is only looked up is not widened"
    assert {p.dtype for name, p in model.named_parameters() if "norm" in name} == {torch.float32}


def pages(model, **flags):
    """The dtype of keys and of values."""
    keys, values = build(model, **flags).runner.cache.kv[0]
    assert keys.dtype == values.dtype
    return keys.dtype


def test_pages_hold_what_the_cpu_computes_in(smollm2_dir, weak):
    """Or each step would widen every page that it reads; unless a smaller cache is asked for."""
    assert pages(smollm2_dir) == torch.float32
    assert pages(smollm2_dir, kv_cache_dtype="bfloat16") == torch.bfloat16
    tight = {"max_model_len": 1024, "kv_cache_memory_bytes": 32 << 20}  # 45 MiB in float32
    assert pages(smollm2_dir, **tight) == torch.bfloat16


def test_the_plan_of_a_cpu_with_bf16(smollm2_dir, monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if not cpu_format.has_bf16_products():
        pytest.skip("this CPU has no bf16 instructions")
    plan = build(smollm2_dir).info()["memory_plan"]
    assert "bfloat16; computes in bfloat16: this CPU has bf16 instructions" in plan


def test_it_answers_like_float32(smollm2_dir, weak):
    """Weights as stored, all else exact: greedy tokens are those of transformers in float32, near ties included."""
    core = build(smollm2_dir, dtype="bfloat16", kv_cache_dtype="float32", max_num_batched_tokens=48)
    rng = random.Random(3)
    prompts = {f"r{n}": tuple(rng.randrange(20, 40_000) for _ in range(n)) for n in (4, 33, 70)}
    for name, prompt in prompts.items():
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        core.add_request(EngineRequest(name, list(prompt), params))
    found = {name: [] for name in prompts}
    while core.has_work():
        for output in core.step():
            found[output.request_id] += output.new_token_ids
    assert found == {name: greedy(smollm2_dir, prompt, 12) for name, prompt in prompts.items()}


def test_a_result_does_not_depend_on_the_batch(smollm2_dir, weak):
    rng = random.Random(11)
    prompt = [rng.randrange(20, 40_000) for _ in range(40)]
    params = SamplingParams(temperature=1.1, seed=9, max_tokens=10, ignore_eos=True, logprobs=0)
    crowd = [EngineRequest(f"c{i}", [rng.randrange(20, 40_000) for _ in range(9 + 31 * i)], SamplingParams(
        temperature=1.0, seed=i, max_tokens=16, ignore_eos=True)) for i in range(4)]

    def logprobs(others=()):
        core, found = build(smollm2_dir), []
        for request in (*others, EngineRequest("x", prompt, params)):
            core.add_request(request)
        while core.has_work():
            found += [(o.new_token_ids[0], o.logprobs[0].logprob) for o in core.step() if o.request_id == "x"]
        return found

    assert logprobs(crowd) == logprobs()


@pytest.mark.parametrize(("kv", "close"), [("bfloat16", 0.1), ("float16", 0.01)])
def test_keys_and_values_may_be_narrower_than_what_computes(smollm2_dir, kv, close):
    """Wherever a prompt is cut into chunks. (What is left between two cuts are numbers on the border of a rounding.)"""
    rng = random.Random(2)
    prompt = [rng.randrange(20, 40_000) for _ in range(50)]
    scores = []
    for budget in (512, 7):
        core = build(smollm2_dir, dtype="float32", kv_cache_dtype=kv, max_num_batched_tokens=budget)
        core.add_request(EngineRequest("r", prompt, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)))
        outputs = []
        while core.has_work():
            outputs += core.step()
        scores.append(torch.tensor([entry.logprob for entry in outputs[0].prompt_logprobs[1:]]))
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=close)
    expected = logits(smollm2_dir, prompt).log_softmax(-1)[range(49), prompt[1:]]
    assert (scores[0] - expected).abs().mean() < 0.05


def test_float16_weights(smollm2_dir):
    llm = LLM(model=smollm2_dir, dtype="float16", device="cpu", max_model_len=256, kv_cache_memory_bytes=64 << 20)
    [output] = llm.chat([{"role": "user", "content": QUESTION}], SamplingParams(temperature=0, max_tokens=24),
                        use_tqdm=False)
    assert output.outputs[0].text == ANSWER
    assert llm.engine.info()["compute_dtype"] == "float32"


@pytest.mark.parametrize(("vendor", "family", "slow"), [
    ("AuthenticAMD", "25", True), ("AuthenticAMD", "26", False), ("GenuineIntel", "6", False),
])
def test_the_kind_of_cpu_decides_how_few_rows_are_computed(tmp_path, vendor, family, slow):
    one = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel name\t: a CPU\n\n"
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(one + one.replace(family, "99"))
    assert cpu_format.reads_bf16_slowly(cpuinfo) is slow
    assert not cpu_format.reads_bf16_slowly(tmp_path / "none")


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bf16 instructions")
@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="with AMX the number of rows decides the order of a sum")
def test_repeated_rows_change_no_bit(monkeypatch):
    torch.manual_seed(0)
    layer = Linear(600, 512)
    layer.weight = torch.nn.Parameter(torch.randn(512, 600).bfloat16(), requires_grad=False)
    layer.finalize()
    x = torch.randn(5, 600).bfloat16()
    found = {}
    for least in (2, 4):
        monkeypatch.setattr(cpu_format, "least_rows", lambda least=least: least)
        found[least] = [layer(x[:rows]) for rows in range(1, 6)]
    assert all(torch.equal(*pair) for pair in zip(found[2], found[4], strict=True))
