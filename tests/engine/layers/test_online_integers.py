"""`--quantization int8 | int4 | int4-g32`: weights that become integers while they load."""

import oracle
import pytest
import torch
import torch.nn.functional as F
from test_oracle import run

from engine.capabilities import ONLINE_INTEGERS
from engine.config import EngineConfig
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest
from engine.kernels.gemm import cpu_int8, cpu_integers
from engine.kernels.gemm.cpu_int8 import SplitInt8Weight, is_exact
from engine.kernels.gemm.packed.weight import dequantize
from engine.layers.linear import Linear
from engine.layers.moe import ExpertLinear, RoutedExperts
from engine.layers.quant import FORMATS
from engine.layers.quant.online_integers import group_of, packed, quantized
from engine.layers.quant.unquantized import UNQUANTIZED
from engine.models.loading.loader import quantize
from engine.models.registry import empty_model
from engine.plan import PlannedGpu, plan_engine
from engine.worker.startup.build import build_engine

ONLINE = sorted(ONLINE_INTEGERS)
H200 = PlannedGpu("H200", 139 << 30, (9, 0))
SCHEMES = [(8, 192), (4, 128), (4, 64), (4, 32)]
ERRORS = {(8, 192): 0.01, (4, 128): 0.105, (4, 64): 0.1, (4, 32): 0.09}  # relative, of normal numbers


def normal(outputs=128, inner=384, seed=0):
    return torch.randn(outputs, inner, generator=torch.Generator().manual_seed(seed)).bfloat16()


def linear(name, *, outputs=128, inner=384, bias=False, dtype=torch.bfloat16):
    layer = Linear(inner, outputs, bias=bias)
    layer.weight = torch.nn.Parameter(normal(outputs, inner).to(dtype), requires_grad=False)
    if bias:
        layer.bias = torch.nn.Parameter(torch.arange(outputs).to(dtype), requires_grad=False)
    layer.method = FORMATS[name].linear
    layer.finalize()
    return layer


@pytest.mark.parametrize(("bits", "group"), SCHEMES)
def test_the_error_is_the_one_that_is_stated(bits, group):
    weight = normal()
    q, scale = quantized(weight, bits, group)
    numbers = (q.float() - (1 << (bits - 1))) * scale.float().repeat_interleave(group, 1)
    assert q.max().item() < 1 << bits
    error = (numbers - weight.float()).norm() / weight.float().norm()
    assert error < ERRORS[bits, group]
    step = scale.float().abs().repeat_interleave(group, 1)
    slack = 0.501 if bits == 8 else 2.1  # half a step; of the largest numbers of a group, what is cut off
    assert ((numbers - weight.float()).abs() <= slack * step).all()


@pytest.mark.parametrize(("bits", "group"), SCHEMES)
def test_rows_are_quantised_alike_whatever_is_beside_them(bits, group):
    """Rows go by blocks, whose size must not show."""
    weight = normal(outputs=3000)
    whole = quantized(weight, bits, group)
    for rows in (slice(0, 5), slice(1990, 2001), slice(2995, 3000)):
        for all_rows, some in zip(whole, quantized(weight[rows], bits, group), strict=True):
            assert torch.equal(all_rows[rows], some)


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_stay_zeros(bits):
    q, scale = quantized(torch.zeros(64, 64, dtype=torch.bfloat16), bits, 32)
    assert (q == 1 << (bits - 1)).all()
    assert torch.isfinite(scale).all()


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 100])
@pytest.mark.parametrize("kernels", [True, False])
def test_products_are_those_of_the_dequantised_weight(name, bias, rows, kernels, monkeypatch):
    """Few rows on PyTorch's kernels, many by tiles; a PyTorch without the kernels has tiles only. A CPU that multiplies
    bytes: test_cpu_int8.py."""
    monkeypatch.setattr(cpu_int8, "is_exact", lambda: False)
    if not kernels:
        monkeypatch.setattr(cpu_integers, "_FEW_ROWS", {4: 0, 8: 0})
    layer = linear(name, bias=bias)
    assert layer.weight.numel() == 0
    weight, x = layer.packed.dequantized(), torch.randn(rows, 384).bfloat16()
    expected = F.linear(x.float(), weight, layer.bias if layer.bias is None else layer.bias.float())
    result = layer(x)
    assert result.dtype == torch.bfloat16
    assert (result.float() - expected).norm() < 0.006 * expected.norm()
    wide = layer(x.float())
    assert wide.dtype == torch.float32
    assert torch.equal(wide, result.float())


@pytest.mark.parametrize("name", ONLINE)
def test_a_gpu_gets_the_same_numbers(name):
    method = FORMATS[name].linear
    group = group_of(method.group, 384)
    ours = packed(normal(), method.bits, group)
    assert torch.equal(dequantize(ours, torch.float32), linear(name).packed.dequantized())
    layer = Linear(384, 128)
    assert ours.nbytes == method.num_bytes(layer)


@pytest.mark.parametrize(("inner", "group"), [(2048, 128), (576, 64), (96, 32)])
def test_groups_shrink_until_they_fit(inner, group):
    assert group_of(128, inner) == group


def test_a_weight_is_smaller():
    sizes = [linear(name, outputs=1024, inner=1024).packed.nbytes / (1024 * 1024) for name in ONLINE]
    assert sizes == pytest.approx([1 if name == "int8" else 0.5 for name in ONLINE], abs=0.13)


@pytest.fixture
def wide_llama(tiny_llama_dir):
    return tiny_llama_dir("gqa", hidden_size=192, intermediate_size=320, num_attention_heads=4, num_key_value_heads=2,
                          head_dim=32, initializer_range=0.1)  # fmt: skip


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_engine_runs_on_them(wide_llama, name, dtype):
    core = build_engine(EngineConfig(wide_llama, device="cpu", dtype=dtype, max_model_len=128, quantization=name))
    packs = [m for m in core.runner.model.modules() if isinstance(m, Linear) and m.packed_bytes and m.quantizable]
    assert packs
    kind = cpu_integers.Int4Weight if name != "int8" else SplitInt8Weight if is_exact() else cpu_integers.Int8Weight
    assert all(isinstance(m.packed, kind) for m in packs)
    assert name in core.info()["memory_plan"]
    prompts = [tuple(range(5, 5 + n)) for n in (3, 70)]
    requests = [EngineRequest(str(i), list(p), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
                for i, p in enumerate(prompts)]  # fmt: skip
    tokens, _ = run(core, requests)
    assert [len(tokens[str(i)]) for i in range(2)] == [8, 8]
    if name == "int8":
        assert tokens["0"][0] == oracle.greedy(wide_llama, prompts[0], 1)[0]


@pytest.mark.parametrize(("name", "width", "methods"), [
    ("int4", 64, ("int4", "int4")), ("int4", 96, (None, None)), ("int8", 96, ("int8", "int8")),
    ("int8", 72, (None, None)), ("int8", 48, (None, None)),
])  # fmt: skip
def test_experts_are_quantised_where_the_kernels_read_them(name, width, methods):
    """int4: both products, or none."""
    model = torch.nn.Module()
    model.experts = RoutedExperts(128, width, 2)
    quantize(model, name)
    expected = [UNQUANTIZED.experts if each is None else FORMATS[each].experts for each in methods]
    assert [model.experts.gate_up_proj.method, model.experts.down_proj.method] == expected


@pytest.mark.parametrize("name", ONLINE)
def test_experts_on_a_cpu(name):
    stack = ExpertLinear(3, 96, 64)
    weight = torch.stack([normal(64, 96, seed) for seed in range(3)])
    stack.weight = torch.nn.Parameter(weight, requires_grad=False)
    stack.method = FORMATS[name].experts
    stack.finalize()
    x = torch.randn(5, 96).bfloat16()
    for expert in range(3):
        expected = x.float() @ stack.packed[expert].dequantized().T
        result = stack.apply_on_cpu(x, expert, quantize=False)
        assert (result.float() - expected).norm() < 0.006 * expected.norm()
        assert (expected - x.float() @ weight[expert].float().T).norm() < 0.12 * expected.norm()


def test_the_memory_plan_of_a_gpu_counts_them(wide_llama):
    plain, int8, int4 = (
        plan_engine(EngineConfig(wide_llama, quantization=name, dtype="bfloat16"), H200).numbers()["parts"]["weights"]
        for name in (None, "int8", "int4")
    )
    layers = [m for m in empty_model(wide_llama, torch.bfloat16).modules() if isinstance(m, Linear)]
    linears, head = (sum(m.in_features * m.out_features for m in layers if m.quantizable is each)
                     for each in (True, False))  # fmt: skip
    assert plain - int8 == pytest.approx(linears, rel=0.05)
    assert plain - int4 == pytest.approx(1.47 * linears + head, rel=0.03)  # beside int4 the head is in fp8


def test_the_memory_plan_counts_a_tied_heads_copy(tiny_llama_dir):
    """The embedding keeps 16 bits, so the head in fp8 comes on top, and only on a GPU."""
    tied, untied = (
        tiny_llama_dir("gqa", hidden_size=192, intermediate_size=320, vocab_size=4096, tie_word_embeddings=each)
        for each in (True, False)
    )

    def weights(directory, name):
        config = EngineConfig(directory, quantization=name, dtype="bfloat16")
        return plan_engine(config, H200).numbers()["parts"]["weights"]

    head = 4096 * 192
    assert weights(untied, None) - weights(tied, None) == 2 * head
    assert weights(untied, "int4") == weights(tied, "int4")
    layers = weights(tied, None) - 2 * head
    assert 3 * head < weights(tied, "int4") < 3 * head + 0.4 * layers


@pytest.mark.parametrize("multiplies_bytes", [True, False])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_cpu_that_multiplies_bytes_has_the_head_in_int8(tiny_llama_dir, monkeypatch, name, multiplies_bytes):
    """Beside the embedding, which keeps every bit. Others keep it in 16 bits."""
    if multiplies_bytes and not is_exact():
        pytest.skip("this CPU does not multiply bytes")
    monkeypatch.setattr(cpu_int8, "is_exact", lambda: multiplies_bytes)
    directory = tiny_llama_dir("gqa", hidden_size=192, intermediate_size=320, tie_word_embeddings=True)
    plain, rounded = (
        build_engine(EngineConfig(directory, device="cpu", dtype="bfloat16", max_model_len=128, quantization=each))
        .runner.model for each in (None, name)
    )  # fmt: skip
    assert torch.equal(rounded.embed_tokens.weight, plain.embed_tokens.weight)
    assert rounded.lm_head.scale is None
    assert isinstance(rounded.lm_head.packed, SplitInt8Weight) is multiplies_bytes
    x = torch.randn(3, 192).bfloat16()
    with torch.inference_mode():
        exact, found = plain.lm_head(x), rounded.lm_head(x)
        if not multiplies_bytes:
            assert torch.equal(found, exact)
        weight = plain.embed_tokens.weight.float()
        assert (found.float() - x.float() @ weight.T).norm() < 0.015 * exact.float().norm()
