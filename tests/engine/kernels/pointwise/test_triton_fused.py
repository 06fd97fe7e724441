"""Norm, gate, RoPE + KV write, their fp8 forms, and small-batch GEMMs against their references, in the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.gemm import reference as gemm_reference
from engine.kernels.gemm import small_batch
from engine.kernels.pointwise import fused, quantize
from engine.kernels.pointwise import reference as pointwise_reference
from engine.kernels.pointwise.norm import rms_norm
from engine.layers.norm import WideRMSNorm

FP8 = torch.float8_e4m3fn
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def strided(rows, width, dtype=torch.float32):
    """Rows of a wider matrix, as the views of fused projections are."""
    return torch.randn(rows, width + 24).to(dtype)[:, :width]


def close(ours, reference, tol):
    torch.testing.assert_close(ours, reference, rtol=tol, atol=tol)


def close_fp8(ours, reference):
    """Same scales; numbers equal but where the division fell on the other side of a rounding: one step apart (1/8)."""
    close(ours[1], reference[1], 1e-5)
    a, b = ours[0].float(), reference[0].float()
    assert (a == b).float().mean() > 0.98
    torch.testing.assert_close(a, b, rtol=0.126, atol=2**-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [8, 576, 960, 2816, 5376])
def test_rms_norm(size, dtype):
    x, weight = strided(5, size, dtype), torch.randn(size).to(dtype)
    close(rms_norm(x, weight, 1e-5), pointwise_reference.rms_norm(x, weight, 1e-5), CLOSE[dtype])
    close(
        pointwise_reference.rms_norm(x, weight, 1e-5),
        torch.nn.functional.rms_norm(x, (size,), weight, 1e-5), CLOSE[dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rms_norm_adds_to_the_residual_in_place(dtype):
    x, weight, residual = strided(5, 576, dtype), torch.randn(576).to(dtype), torch.randn(5, 576).to(dtype)
    kept = residual.clone()
    ours = rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(residual, (kept.float() + x.float()).to(dtype))
    close(ours, pointwise_reference.rms_norm(x, weight, 1e-5, kept), CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_wide_rms_norm_is_rounded_once(dtype, offset):
    x, residual = strided(5, 576, dtype), torch.randn(5, 576).to(dtype)
    norm = WideRMSNorm(576, 1e-5, offset=offset)
    norm.weight = torch.nn.Parameter(torch.randn(576).to(dtype), requires_grad=False)
    close(rms_norm(x, norm.weight, 1e-5, wide_offset=offset), norm(x), 1e-6)
    kept = residual.clone()
    close(rms_norm(x, norm.weight, 1e-5, residual, wide_offset=offset), norm(x, kept), 1e-6)
    assert torch.equal(residual, kept)


def test_rms_norm_epsilon_counts():
    x, weight = torch.full((1, 64), 1e-3), torch.ones(64)
    close(rms_norm(x, weight, 1e-2), pointwise_reference.rms_norm(x, weight, 1e-2), 1e-6)
    assert rms_norm(x, weight, 1e-2).max() < 0.1


@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm_quantised(residual):
    x, weight = strided(5, 576), torch.randn(576)
    ours_residual, reference_residual = (torch.ones(5, 576) if residual else None for _ in range(2))
    ours = rms_norm(x, weight, 1e-5, ours_residual, quantize=True)
    close_fp8(ours, pointwise_reference.rms_norm(x, weight, 1e-5, reference_residual, quantize=True))
    if ours_residual is not None:
        assert torch.equal(ours_residual, reference_residual)


def test_rms_norm_quantised_and_plain():
    x, weight, plain = strided(5, 2816), torch.randn(2816), torch.empty(5, 2816)
    ours = rms_norm(x, weight, 1e-5, quantize=True, plain=plain, wide_offset=1.0)
    close(plain, pointwise_reference.rms_norm(x, weight, 1e-5, wide_offset=1.0), 1e-5)
    close_fp8(ours, pointwise_reference.quantize_rows(plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("inner", [16, 1000, 1536])
def test_silu_mul(inner, dtype):
    x = strided(5, 2 * inner, dtype) * 4
    close(fused.gate_mul(*x.chunk(2, -1), "silu"), pointwise_reference.gate_mul(*x.chunk(2, -1), "silu"), CLOSE[dtype])


def test_silu_of_large_numbers_is_no_nan():
    x = torch.tensor([[-1e4, 1e4, -200.0, 200.0, 1.0, 1.0, 1.0, 1.0]])
    close(fused.gate_mul(*x.chunk(2, -1), "silu"), torch.tensor([[0.0, 1e4, 0.0, 200.0]]), 1e-6)


@pytest.mark.parametrize("kind", ["gelu_tanh", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gate_mul_of_two_tensors(dtype, kind):
    gate, up = strided(5, 1000, dtype) * 4, strided(5, 1200, dtype)[:, :1000]
    close(fused.gate_mul(gate, up, kind), pointwise_reference.gate_mul(gate, up, kind), CLOSE[dtype])
    quantised = fused.gate_mul(gate, up, kind, quantize=True)
    close_fp8(quantised, pointwise_reference.gate_mul(gate, up, kind, quantize=True))


@pytest.mark.parametrize("inner", [16, 1000, 1536, 10240])
def test_silu_mul_quantised(inner):
    gate, up = (strided(5, 2 * inner) * 4).chunk(2, -1)
    ours = fused.gate_mul(gate, up, "silu", quantize=True)
    close_fp8(ours, pointwise_reference.gate_mul(gate, up, "silu", quantize=True))


@pytest.mark.parametrize("inner", [16, 576, 1000, 5120])
def test_quantize_rows(inner):
    x = strided(6, inner) * torch.tensor([1e-4, 1.0, 1e4, 3.0, 0.0, 50.0])[:, None]
    quantized, scale = quantize.quantize_rows(x)
    close_fp8((quantized, scale), pointwise_reference.quantize_rows(x))
    error = (quantized.float() * scale[:, None] - x).abs()
    assert (error <= x.abs() / 16 * 1.001 + scale[:, None] * 2**-10).all()  # half a step of e4m3
    assert (quantized.float().abs().amax(1) == torch.tensor([448.0, 448, 448, 448, 0, 448])).all()


@pytest.mark.parametrize("size", [300, 4100])
def test_softcap(size):
    x = strided(5, size) * torch.tensor([0.01, 1.0, 30.0, 1e3, 1e6])[:, None]
    ours = fused.softcap(x, 30.0)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, pointwise_reference.softcap(x, 30.0), rtol=1e-5, atol=3e-5)
    assert ours.abs().max() <= 30
    assert fused.softcap(x.half().clamp(-6e4, 6e4), 30.0).dtype == torch.float32


def rope_case(dim, heads, kv_heads, *, norm, dtype=torch.float32, cache=None, slots=torch.int64, **options):
    tokens, page = 6, 16
    qkv = strided(tokens, (heads + 2 * kv_heads) * dim, dtype)
    angle = torch.rand(100, 1, dim // 2) * 6
    positions = torch.tensor([0, 99, 7, 7, 41, 3])
    at = torch.tensor([17, 0, 63, 31, 32, 5], dtype=slots)
    weights = {}
    if norm:
        weights = {"q_norm": torch.randn(dim).to(dtype), "k_norm": torch.randn(dim).to(dtype), "eps": 1e-3}
    results = []
    for kernels in (fused, pointwise_reference):
        both = torch.zeros(4, 2, page, kv_heads, dim).to(cache or dtype)  # strided caches
        data = torch.empty_strided(qkv.shape, qkv.stride(), dtype=dtype).copy_(qkv)
        q = kernels.rope_and_write_kv(
            data, angle.cos(), angle.sin(), positions, at, both[:, 0], both[:, 1], heads, **weights, **options
        )
        assert q.data_ptr() == data.data_ptr()  # in place
        assert torch.equal(data[:, -kv_heads * dim :], qkv[:, -kv_heads * dim :])  # v of the projection stays
        results.append((q, both[:, 0], both[:, 1], data[:, heads * dim : (heads + kv_heads) * dim]))
    return *results, qkv


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dim, heads, kv_heads", [(64, 4, 2), (80, 2, 2), (96, 7, 1), (128, 2, 1), (256, 2, 1)])
def test_rope_and_write(dim, heads, kv_heads, norm):
    ours, reference, qkv = rope_case(dim, heads, kv_heads, norm=norm)
    for a, b in zip(ours, reference, strict=True):
        close(a, b, 1e-5)
    assert not torch.equal(ours[0].flatten(1), qkv[:, : heads * dim])
    # Slots 17 and 63: page 1 token 1, page 3 token 15. Values are stored as they come.
    values = qkv[:, (heads + kv_heads) * dim :].unflatten(1, (kv_heads, dim))
    assert torch.equal(ours[2][1, 1], values[0])
    assert torch.equal(ours[2][3, 15], values[2])
    assert ours[2].count_nonzero() == values.count_nonzero()  # and nothing else is written


def test_rope_and_write_float16_and_small_slot_numbers():
    ours, reference, _ = rope_case(64, 4, 2, norm=True, dtype=torch.float16, slots=torch.int32)
    for a, b in zip(ours, reference, strict=True):
        close(a, b, 4e-3)


def test_fp8_cache_holds_scaled_numbers_and_saturates():
    ours, reference, qkv = rope_case(64, 2, 1, norm=True, cache=FP8, k_scale=0.02, v_scale=0.004)
    close(ours[0], reference[0], 1e-5)
    for a, b in zip(ours[1:3], reference[1:3], strict=True):
        assert (a.float() == b.float()).float().mean() > 0.98
        torch.testing.assert_close(a.float(), b.float(), rtol=0.126, atol=2**-9)
    too_large = qkv[:, -64:].abs() > 448 * 0.004
    assert too_large.any()
    assert (ours[2].float().abs() == 448).sum() >= too_large.sum()


@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("out_features", [32, 34, 100])
@pytest.mark.parametrize("rows, inner", [(1, 960), (2, 256), (3, 3072), (4, 2576)])
def test_gemv(rows, inner, out_features, gate):
    # What stands behind x's rows must not count: NaN.
    x = torch.full((rows, inner + 200), float("nan"))
    x[:, :inner] = torch.randn(rows, inner)
    x = x[:, :inner]
    weight, bias = torch.randn(out_features, inner) * 0.1, torch.randn(out_features)
    ours = small_batch.gemv(x, weight, None, bias, gate=gate)
    close(ours, gemm_reference.gemv(x, weight, None, bias, gate=gate), 2e-4)


@pytest.mark.parametrize("rows, inner", [(1, 960), (2, 256), (3, 3072)])
def test_gemv_norm_before_and_residual_after(rows, inner):
    x = torch.full((rows, inner + 200), float("nan"))
    x[:, :inner] = torch.randn(rows, inner) * 3
    x, weight = x[:, :inner], torch.randn(70, inner) * 0.1
    norm = torch.rand(inner) + 0.5, 1e-2
    close(small_batch.gemv(x, weight, norm=norm), gemm_reference.gemv(x, weight, norm=norm), 1e-4)
    gated = {"norm": norm, "gate": "silu"}
    close(small_batch.gemv(x, weight, **gated), gemm_reference.gemv(x, weight, **gated), 2e-4)
    ours, reference = torch.ones(rows, 70), torch.ones(rows, 70)
    assert small_batch.gemv(x, weight, norm=norm, residual=ours) is ours
    close(ours, gemm_reference.gemv(x, weight, norm=norm, residual=reference), 1e-4)
    assert (ours - 1).abs().mean() > 0.3


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gemv_wide_norm_is_rounded_once(offset):
    x, norm, identity = torch.randn(2, 256).half(), (torch.randn(256).half(), 1e-2), torch.eye(256).half()
    ours = small_batch.gemv(x, identity, norm=norm, wide_offset=offset)
    reference = pointwise_reference.rms_norm(x, *norm, wide_offset=offset)
    close(ours, reference, 1e-3)
    assert (ours == reference).float().mean() > 0.99  # of a norm that rounds twice, a third would differ


@pytest.mark.parametrize("gate", [None, "gelu_tanh"])
def test_gemv_fp8_weight(gate):
    weight = torch.randn(70, 256) * 0.1
    x = strided(3, 256)
    quantized, scale = pointwise_reference.quantize_rows(weight)
    ours = small_batch.gemv(x, quantized, scale, gate=gate)
    close(ours, gemm_reference.gemv(x, quantized, scale, gate=gate), 1e-4)
    exact = gemm_reference.gemv(x, weight, gate=gate)
    assert (ours - exact).norm() < 0.06 * exact.norm()


@pytest.mark.parametrize("rows", [1, 3, 5, 16, 17, 100])
@pytest.mark.parametrize("out_features, inner", [(64, 256), (33, 192), (100, 1000)])
def test_few_rows(rows, out_features, inner):
    x, weight, bias = strided(rows, inner), torch.randn(out_features, inner), torch.randn(out_features)
    close(small_batch.small_batch_gemm(x, weight, bias), gemm_reference.small_batch_gemm(x, weight, bias), 2e-4)


def test_few_rows_float16():
    x, weight = strided(5, 256, torch.float16), torch.randn(70, 256).half()
    close(small_batch.small_batch_gemm(x, weight), gemm_reference.small_batch_gemm(x, weight), 5e-3)


def test_few_rows_fp8():
    x, weight, bias = strided(7, 512), torch.randn(70, 512), torch.randn(70)
    (x8, x_scale), (weight8, scale) = pointwise_reference.quantize_rows(x), pointwise_reference.quantize_rows(weight)
    ours = small_batch.small_batch_gemm(x8, weight8, bias, x_scale=x_scale, scale=scale, dtype=torch.float32)
    expected = gemm_reference.small_batch_gemm(x8, weight8, bias, x_scale=x_scale, scale=scale, dtype=torch.float32)
    close(ours, expected, 1e-4)
    exact = gemm_reference.small_batch_gemm(x, weight, bias)
    assert (ours - exact).norm() < 0.06 * exact.norm()
