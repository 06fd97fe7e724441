"""Which way products with fp8 weights go: what the library refuses, or computes wrongly, goes to our own kernel."""

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.gemm import scaled
from engine.kernels.pointwise import reference as pointwise_reference
from engine.kernels.runtime import launcher
from engine.kernels.runtime.gpu_target import H100, Target
from engine.layers.gemm_inputs import QuantizedRows
from engine.layers.linear import Linear
from engine.layers.moe import ExpertLinear
from engine.layers.quant import fp8
from engine.worker.startup.memory import arithmetic_notes

CPU = torch.device("cpu")
A100 = Target((8, 0), 166_912, 108)


def plain(x, weight_t, *, scale_a, scale_b, bias, out_dtype, use_fast_accum):
    y = (x.float() * scale_a) @ (weight_t.float() * scale_b)
    return (y if bias is None else y + bias.float()).to(out_dtype)


def unsupported(*args, **kwargs):
    raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic\nmore")


@pytest.fixture
def quantized(monkeypatch):
    """A layer as it is on a GPU after loading, and rows for it."""
    monkeypatch.setattr(fp8, "FEW_ROWS", 2)
    torch.manual_seed(0)
    layer = Linear(64, 48, bias=True)
    layer.use(fp8.FP8_PER_CHANNEL.linear)
    assert layer.bias is not None
    layer.bias = torch.nn.Parameter(torch.randn(48), requires_grad=False)
    layer.weight = torch.nn.Parameter(torch.randn(48, 64), requires_grad=False)
    layer.finalize()
    layer.gemm = fp8.ON_FP8_UNITS
    return layer, torch.randn(20, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_library_that_works_is_taken(monkeypatch, dtype):
    monkeypatch.setattr(torch, "_scaled_mm", plain)
    assert scaled.tried(CPU, dtype) is None


def test_a_refusal_is_found_out_before_any_step(monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", unsupported)
    said = scaled.tried(CPU, torch.bfloat16)
    assert said == "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic"
    monkeypatch.delattr(torch, "_scaled_mm")
    assert "_scaled_mm" in str(scaled.tried(CPU, torch.bfloat16))


def test_a_bias_that_is_refused_counts(monkeypatch):
    def without_bias(*args, bias, **options):
        return (plain if bias is None else unsupported)(*args, bias=bias, **options)

    monkeypatch.setattr(torch, "_scaled_mm", without_bias)
    assert "NOT_SUPPORTED" in str(scaled.tried(CPU, torch.bfloat16))


def test_scales_that_are_ignored_are_a_refusal(monkeypatch):
    def without(x, weight_t, *, scale_a, scale_b, **rest):
        return plain(x, weight_t, scale_a=scale_a, scale_b=torch.ones_like(scale_b), **rest)

    monkeypatch.setattr(torch, "_scaled_mm", without)
    assert "off by" in str(scaled.tried(CPU, torch.bfloat16))


def test_memory_that_ran_out_is_no_refusal(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "_scaled_mm", full)
    with pytest.raises(torch.OutOfMemoryError):
        scaled.tried(CPU, torch.bfloat16)


def test_a_layer_multiplies_by_our_kernel_where_the_library_raises(quantized, monkeypatch):
    layer, x = quantized
    monkeypatch.setattr(torch, "_scaled_mm", unsupported)
    monkeypatch.setattr(scaled, "refusal", lambda dtype: "refused")
    rows = QuantizedRows(*pointwise_reference.quantize_rows(x), x.dtype)
    expected = plain(
        rows.values, layer.weight.t(), scale_a=rows.scale[:, None], scale_b=layer.scale[None], bias=layer.bias,
        out_dtype=x.dtype, use_fast_accum=True,
    )  # fmt: skip
    torch.testing.assert_close(layer(rows), expected, rtol=1e-4, atol=1e-3)


def test_without_fp8_units_activations_stay_as_they_are(quantized):
    layer, x = quantized
    layer.gemm = fp8.ON_WIDENED_WEIGHT
    expected = x @ (layer.weight.float() * layer.scale[:, None]).t() + layer.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(layer(x[:3]), expected[:3], rtol=1e-4, atol=1e-3)
    assert not any(layer.wants_fp8(rows) for rows in (1, 5, 500))
    assert layer.in_vector_form(1)
    assert layer.by_library is None


def test_the_plan_says_how_fp8_weights_are_multiplied(monkeypatch):
    layer = Linear(64, 48)
    assert arithmetic_notes(layer, torch.bfloat16, CPU) == []
    expert = ExpertLinear(2, 64, 48)
    for module in (layer, expert):
        module.scale = torch.nn.Parameter(torch.ones(48), requires_grad=False)
    monkeypatch.setattr(launcher, "_target_of", lambda device: A100)
    [note] = arithmetic_notes(layer, torch.bfloat16, CPU)
    assert note.startswith("fp8 weights, bf16 activations: this GPU has no fp8 matrix units")
    monkeypatch.setattr(launcher, "_target_of", lambda device: H100)
    for why, said in ((None, "products by torch._scaled_mm"), ("no kernel", "torch._scaled_mm fails here: no kernel")):
        monkeypatch.setattr(scaled, "refusal", lambda dtype, why=why: why)
        [note] = arithmetic_notes(expert, torch.bfloat16, CPU)
        assert note.startswith("fp8 weights, fp8 activations: ")
        assert note.endswith(said)
