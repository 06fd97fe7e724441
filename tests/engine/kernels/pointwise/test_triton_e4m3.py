"""e4m3 numbers as bytes: each is widened and rounded as torch does it; and the kernels that read weights so."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from engine.kernels.attention import decode as attention_decode
from engine.kernels.gemm import reference as gemm_reference
from engine.kernels.gemm import small_batch
from engine.kernels.gemm.scaled_kernel import ScaledTiles, scaled_product, scaled_tiles
from engine.kernels.moe import experts as moe_experts
from engine.kernels.moe import tiles as moe_tiles
from engine.kernels.pointwise import fused
from engine.kernels.pointwise import reference as pointwise_reference
from engine.kernels.pointwise.e4m3 import narrowed, widened
from engine.kernels.runtime import launcher
from engine.kernels.runtime.gpu_target import H100, Target
from engine.kernels.runtime.launcher import kernel

FP8, U8 = torch.float8_e4m3fn, torch.uint8
A100 = Target((8, 0), 166_912, 108)


@kernel
def _widen_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, widened(tl.load(x_ptr + i), y_ptr.dtype.element_ty, True))


@kernel
def _narrow_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = fused.saturated(tl.load(x_ptr + i, mask=i < N, other=0.0))
    tl.store(y_ptr + i, narrowed(x, y_ptr.dtype.element_ty), mask=i < N)


@pytest.fixture
def on_a100(monkeypatch):
    """Kernels and tiles are chosen as on a GPU without fp8 units; its e4m3 tensors are bytes."""
    monkeypatch.setattr(launcher, "_target_of", lambda device: A100)


def as_bytes(x):
    return x.view(U8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_number_widens_exactly(dtype):
    x = torch.arange(256, dtype=U8)
    y = torch.empty(256, dtype=dtype)
    _widen_kernel((1,), x, y, N=256)
    torch.testing.assert_close(y, x.view(FP8).to(dtype), rtol=0, atol=0, equal_nan=True)
    assert torch.signbit(y[128]), "-0 stays"


def test_numbers_round_as_torch_rounds_them():
    """All of e4m3, what lies halfway between two of them, the numbers next to that, and what is out of range."""
    exact = torch.arange(127, dtype=U8).view(FP8).float()
    halfway = (exact[1:] + exact[:-1]) / 2
    near = [torch.nextafter(halfway, torch.full_like(halfway, end)) for end in (0.0, 1000.0)]
    x = torch.cat([exact, halfway, *near, torch.tensor([1e-30, 449.0, 1e9, float("inf")]), torch.rand(5000)])
    x = torch.cat([x, -x, torch.tensor([float("nan")])])
    y = torch.empty(x.shape, dtype=U8)
    _narrow_kernel((triton.cdiv(len(x), 1024),), x, y, len(x), BLOCK=1024)
    expected = x.clamp(-448, 448).to(FP8).float()
    torch.testing.assert_close(y.view(FP8).float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_vector_form_reads_a_weight_of_bytes(rows):
    torch.manual_seed(0)
    x, (weight, scale) = torch.randn(rows, 80), pointwise_reference.quantize_rows(torch.randn(20, 80))
    ours = small_batch.gemv(x, as_bytes(weight), scale)
    torch.testing.assert_close(ours, gemm_reference.gemv(x, weight, scale), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("form", ["wide", "bytes", "fp8"])
@pytest.mark.parametrize(
    "rows, inner, outputs, tiles",
    [
        (5, 64, 48, ScaledTiles(16, 32, 32, 4, 2)),
        (70, 80, 100, ScaledTiles(32, 32, 32, 4, 2)),  # no side is a multiple of its block
        (300, 32, 40, ScaledTiles(16, 32, 32, 4, 2)),  # three groups of blocks, the last of three
    ],
)
def test_scaled_products(rows, inner, outputs, tiles, form, with_bias):
    torch.manual_seed(0)
    x, (weight, scale) = torch.randn(rows, inner), pointwise_reference.quantize_rows(torch.randn(outputs, inner))
    bias, x_scale = torch.randn(outputs) if with_bias else None, None
    wide = x
    if form == "fp8":
        x, x_scale = pointwise_reference.quantize_rows(x)
        wide = x.float() * x_scale[:, None]
    expected = wide @ (weight.float() * scale[:, None]).t() + (0 if bias is None else bias)
    given = as_bytes(weight) if form == "bytes" else weight
    ours = scaled_product(x, given, scale, bias, x_scale=x_scale, dtype=torch.float32, tiles=tiles)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("x_bytes", [1, 2])
@pytest.mark.parametrize("outputs", [4096, 151936])
def test_tiles_of_scaled_products_fit(shared, x_bytes, outputs):
    for rows in (1, 5, 16, 17, 64, 100, 128, 129, 8192):
        tiles = scaled_tiles(rows, outputs, x_bytes, shared)
        assert tiles.stages * tiles.block_k * (tiles.block_n + tiles.block_m * x_bytes) <= shared - 1024
        padded = max(16, triton.next_power_of_2(rows))
        assert scaled_tiles(padded, outputs, x_bytes, shared) == tiles, "one for a power of two"


@pytest.mark.parametrize("tokens", [2, 9])
def test_experts_of_bytes_keep_activations_as_they_are(tokens, on_a100):
    torch.manual_seed(0)
    experts, top_k, hidden, inner = 4, 2, 32, 16
    x, logits = torch.randn(tokens, hidden), torch.randn(tokens, experts)
    w13, w2 = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
    (q13, s13), (q2, s2) = (pointwise_reference.quantize_rows(w.view(-1, w.shape[2])) for w in (w13, w2))
    wide13, wide2 = ((q.float() * s[:, None]).view(w.shape) for q, s, w in ((q13, s13, w13), (q2, s2, w2)))
    routing = moe_experts.choose_experts(logits, top_k)
    ours = moe_experts.routed_experts(
        x, *routing, as_bytes(q13).view(w13.shape), as_bytes(q2).view(w2.shape), s13.view(experts, -1),
        s2.view(experts, -1),
    )  # fmt: skip
    plain = moe_experts.routed_experts(x, *routing, wide13, wide2)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_experts_tiles_leave_room_for_wide_activations():
    for shape in (moe_tiles.Shape(128, 8, 2816, 704, 1, True), moe_tiles.Shape(256, 8, 2048, 512, 1, True)):
        for gpu in (A100, Target((8, 6), 101_376, 84)):
            for tokens in (5, 64, 300, 5000):
                tiles = moe_tiles.tiles_for(shape, tokens, gpu.shared_memory, gpu)
                assert moe_tiles.shared_bytes(tiles, shape) <= gpu.shared_memory
    entry = moe_tiles.Measured(shape, None, 64, tiles)
    assert entry.as_json()["shape"] == shape[:6]
    assert entry._replace(shape=shape._replace(widened=False)).as_json()["shape"] == shape[:5]


def test_a_cache_of_bytes_is_written_and_read_like_one_of_e4m3():
    torch.manual_seed(0)
    batch, kv_heads, dim = 2, 2, 32
    caches = [torch.zeros(3, 16, kv_heads, dim, dtype=dtype) for dtype in (FP8, U8)]
    angle = torch.rand(32, 1, dim // 2)
    positions, slots = torch.tensor([5, 7]), torch.tensor([16 + 5, 32 + 7])
    qkv = torch.randn(batch, 8 * dim) * 3
    results = []
    for cache in caches:
        k, v = cache.clone(), cache.clone()
        q = fused.rope_and_write_kv(qkv.clone(), angle, angle, positions, slots, k, v, 4, k_scale=0.5)
        table = torch.tensor([[0], [1], [2]], dtype=torch.int32)
        numbers = [torch.tensor(n, dtype=torch.int32) for n in ([1, 2], [6, 8])]
        out = attention_decode.decode(q, k, v, *numbers, table, torch.empty(batch, 4, dim), splits=1, scale=0.2)
        results.append((k.view(U8), v.view(U8), out))
    for e4m3, of_bytes in zip(*results, strict=True):
        torch.testing.assert_close(of_bytes, e4m3, rtol=1e-5, atol=1e-5)
    assert results[0][0].any()


def test_gpus_without_the_instructions_get_bytes():
    assert not A100.fp8_units
    assert H100.fp8_units
    assert Target((8, 9), 101_376, 142).fp8_units
