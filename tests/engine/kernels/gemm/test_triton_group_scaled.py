"""GEMMs of fp8 activations with int4 and block-fp8 weights, in Triton's interpreter, against plain arithmetic."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from engine.kernels.gemm import small_batch
from engine.kernels.gemm.packed import group_scaled
from engine.kernels.gemm.packed.group_scaled import GroupTiles
from engine.kernels.gemm.packed.weight import Packed, dequantize, joined, pack_pairs
from engine.layers.linear import Linear
from engine.layers.quant import FORMATS, packed_gpu
from engine.layers.quant.fp8 import dequantize as widened
from engine.layers.quant.fp8 import quantize_rows

FP8 = torch.float8_e4m3fn


def int4(outputs, inner, group=128):
    codes = torch.randint(0, 16, (outputs, inner), dtype=torch.uint8)
    scale = torch.randn(outputs, inner // group).mul_(0.05)  # also negative, as --quantization int4 makes them
    return codes, Packed("int4", group, pack_pairs(codes, group), scale)


def fp8(outputs, inner, *, blocks=False):
    groups = -(-inner // 128)
    scale = torch.rand(outputs // 128 if blocks else outputs, groups).add_(0.1)
    weight = torch.randn(outputs, inner).to(FP8)
    if blocks:
        return Packed("fp8", 128, weight, scale.repeat_interleave(128, 0), block=128)
    return Packed("fp8", 128, weight, scale)


def expected(x, scale, packed):
    return (x.float() * scale[:, None]) @ dequantize(packed, torch.float32).T


@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize(("rows", "block_m"), [(1, 16), (17, 16), (40, 32)])
@pytest.mark.parametrize("make", [
    lambda: int4(64, 256)[1], lambda: int4(80, 384)[1], lambda: int4(48, 512, group=512)[1], lambda: fp8(80, 384),
    lambda: fp8(48, 304), lambda: fp8(256, 256, blocks=True),
], ids=["int4", "int4-ragged", "int4-rows", "fp8", "fp8-tail", "fp8-blocks"])  # fmt: skip
def test_products(make, rows, block_m, split):
    torch.manual_seed(0)
    packed = make()
    weight = group_scaled.group_scaled(packed)
    x, scale = quantize_rows(torch.randn(rows, packed.shape[1]))
    bias = torch.randn(packed.shape[0])
    y = group_scaled.gemm(x, scale, weight, bias, dtype=torch.float32, tiles=GroupTiles(32, block_m, split, 4, 3))
    torch.testing.assert_close(y, expected(x, scale, packed) + bias, rtol=1e-4, atol=1e-4)
    chosen = group_scaled.gemm(x, scale, weight, bias, dtype=torch.float32)
    torch.testing.assert_close(chosen, y, rtol=1e-4, atol=1e-4)


def test_partial_sums_of_the_last_program_leave_the_counters_at_zero():
    torch.manual_seed(0)
    packed = int4(64, 512)[1]
    weight, (x, scale) = group_scaled.group_scaled(packed), quantize_rows(torch.randn(20, 512))
    for _ in range(2):
        y = group_scaled.gemm(x, scale, weight, dtype=torch.float32, tiles=GroupTiles(64, 16, 4, 4, 3))
        torch.testing.assert_close(y, expected(x, scale, packed), rtol=1e-4, atol=1e-4)
    assert not group_scaled.arrivals(x.device).any()


def test_every_code_is_exact_in_e4m3():
    codes = torch.arange(16, dtype=torch.uint8).repeat(64, 16)
    weight = group_scaled.group_scaled(Packed("int4", 128, pack_pairs(codes, 128), torch.ones(64, 2)))
    found = group_scaled.as_e4m3(weight).float() * group_scaled.E4M3_UNIT
    assert torch.equal(found, codes.float() - 8)


@pytest.mark.parametrize(("packed", "why"), [
    (Packed("int4", 32, torch.zeros(64, 64, dtype=torch.uint8), torch.ones(64, 4)), "groups of 32"),
    (Packed("int4", 128, torch.zeros(64, 64, dtype=torch.uint8), torch.ones(64, 1),
            zero=torch.zeros(64, 1, dtype=torch.uint8)), "zero points"),
    (Packed("int8", 128, torch.zeros(64, 128, dtype=torch.uint8), torch.ones(64, 1)), "int8"),
    (Packed("fp8", 128, torch.zeros(63, 128, dtype=FP8), torch.ones(63, 1)), "63 outputs"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_stays_with_16_bit_activations(packed, why):
    assert group_scaled.group_scaled(packed) is None, why


def test_joined_blocks_stay_blocks_if_they_stay_aligned():
    whole = joined([fp8(256, 256, blocks=True), fp8(128, 256, blocks=True)])[0]
    assert group_scaled.group_scaled(whole).block_rows == 128
    torch.testing.assert_close(group_scaled.group_scaled(whole).scale, whole.scale[::128])
    short = fp8(256, 256, blocks=True)
    short = replace(short, values=short.values[:144], scale=short.scale[:144])
    assert group_scaled.group_scaled(joined([short, fp8(256, 256, blocks=True)])[0]).block_rows == 1


def test_rows_in_another_order_stay_in_blocks_if_whole_blocks_move():
    whole = joined([fp8(256, 256, blocks=True), fp8(128, 256, blocks=True)])[0]
    sorted_heads = whole.rows(torch.arange(384).view(3, 128)[[2, 0, 1]].flatten())
    assert group_scaled.group_scaled(sorted_heads).block_rows == 128
    torch.testing.assert_close(group_scaled.group_scaled(sorted_heads).scale, whole.scale[[256, 0, 128]])
    for torn in (torch.arange(384).roll(64), torch.arange(384).flip(0), torch.arange(320)):
        assert group_scaled.group_scaled(whole.rows(torn)).block_rows == 1


@pytest.mark.parametrize(("inner", "rows", "with_norm"), [(512, 1, False), (640, 2, True), (384, 4, True)])
def test_gemv_of_blocks(inner, rows, with_norm):
    torch.manual_seed(0)
    weight = torch.randn(256, inner).to(FP8)
    scale = torch.rand(2, inner // 128).add_(0.5).mul_(0.05)
    x, norm = torch.randn(rows, inner), torch.rand(inner) + 0.5
    around = {"norm": (norm, 1e-6)} if with_norm else {}
    wide = weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    normed = nn.functional.rms_norm(x, (inner,), norm, 1e-6) if with_norm else x
    y = small_batch.gemv(x, weight, scale, None, block=128, tiles=(8, 256, 4), **around)
    torch.testing.assert_close(y, normed @ wide.T, rtol=1e-4, atol=1e-4)
    gate, up = (normed @ wide.T).chunk(2, 1)
    y = small_batch.gemv(x, weight, scale, None, block=128, tiles=(8, 256, 4), gate="silu", **around)
    torch.testing.assert_close(y, nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-4)


def packed_layer(packed, dtype=torch.float32, **attributes):
    outputs, inner = packed.shape
    layer = Linear(inner, outputs)
    layer.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
    for name, value in attributes.items():
        setattr(layer, name, value)
    packed_gpu.use_packed(layer, [packed], None)
    return layer


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("make", [lambda: int4(128, 256)[1], lambda: fp8(128, 256, blocks=True)], ids=["int4", "fp8"])
def test_layers_round_the_activations_of_many_rows_only(make, rows):
    torch.manual_seed(0)
    packed = make()
    layer, x = packed_layer(packed), torch.randn(rows, 256)
    exact = not layer.wants_fp8(rows)
    assert exact == (rows <= layer.vector_rows)
    seen = x if exact else widened(*quantize_rows(x), torch.float32)
    torch.testing.assert_close(layer(x), seen @ dequantize(packed, torch.float32).T, rtol=1e-4, atol=1e-4)
    plain = packed_layer(packed, fp8_activations=False)
    assert not plain.wants_fp8(rows)
    torch.testing.assert_close(plain(x), x @ dequantize(packed, torch.float32).T, rtol=1e-4, atol=1e-4)


def test_a_layer_keeps_the_models_dtype_until_it_is_quantised():
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = Linear(128, 128)
    finally:
        torch.set_default_dtype(torch.float32)
    for name in FORMATS:
        layer.use(FORMATS[name].linear)
        assert layer.weight.dtype == torch.bfloat16
