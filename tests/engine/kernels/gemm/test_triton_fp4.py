"""NVFP4 and MXFP4 in Triton's interpreter: codes, scales and products of weights that stay packed."""

import pytest
import quantized_files as files
import torch
from torch import nn

pytest.importorskip("triton")

import triton.language as tl

from engine.kernels.gemm.packed import matmul as kernels
from engine.kernels.gemm.packed.matmul import PackedTiles
from engine.kernels.gemm.packed.weight import Packed, dequantize, joined, pack_pairs
from engine.kernels.pointwise.e2m1 import from_e2m1, group_scale
from engine.kernels.runtime.launcher import kernel
from engine.layers.linear import Linear
from engine.layers.quant import stored
from engine.layers.quant.float4 import Mxfp4, Nvfp4
from engine.layers.quant.stored import Part, Spec, StoredLinear

FP8, U8 = torch.float8_e4m3fn, torch.uint8


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@kernel
def _widen_kernel(x_ptr, y_ptr, SCALE: tl.constexpr, E8M0: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, group_scale(x, E8M0) if SCALE else from_e2m1(x))


def widened(x, *, is_scale=False):
    y = torch.empty(x.shape)
    _widen_kernel((1,), x, y, SCALE=is_scale, E8M0=x.dtype == U8, N=len(x))
    return y


def test_every_code():
    expected = torch.tensor([*files.E2M1, *(-x for x in files.E2M1)])
    found = widened(torch.arange(16, dtype=U8))
    assert torch.equal(found, expected)
    assert torch.signbit(found[8]), "-0 stays"


def test_every_scale():
    powers = widened(torch.arange(256, dtype=U8), is_scale=True)[:255]
    assert torch.equal(powers.double(), torch.exp2(torch.arange(255).double() - 127))
    numbers = torch.arange(127, dtype=U8).view(FP8)
    assert torch.equal(widened(numbers.repeat(2)[:128], is_scale=True)[:127], numbers.float())
    assert torch.equal(widened(numbers.repeat(2)[:128].view(U8).view(FP8), is_scale=True)[:127], numbers.float())


def packed(kind, outputs, inner):
    group = 16 if kind != "mxfp4" else 32
    values = pack_pairs(torch.randint(0, 16, (outputs, inner), dtype=U8), group)
    if kind == "mxfp4":
        return Packed("fp4", 32, values, torch.randint(118, 126, (outputs, inner // 32), dtype=U8))
    scale = torch.rand(outputs, inner // 16).mul_(400).to(FP8)
    factor = torch.rand(outputs).add_(0.5)
    divides = kind == "nvfp4"
    return Packed("fp4", 16, values, scale, factor=factor * 1000 if divides else factor / 1000, divides=divides)


KINDS = ["nvfp4", "modelopt", "mxfp4"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize(("outputs", "inner"), [(48, 128), (20, 96), (16, 320)])
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows(kind, outputs, inner, rows, dtype):
    """Codes times scales are exact in x's dtype: no more is lost than by rounding the result."""
    weight, x = packed(kind, outputs, inner), torch.randn(rows, inner + 8).to(dtype)[:, :inner]
    expected = (x.float() @ dequantize(weight, torch.float32).t()).to(dtype)
    ours = kernels.small_batch_gemm(x, weight, PackedTiles(16, 32, 4, 2))
    near = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2**-10, "atol": 2e-3}
    torch.testing.assert_close(ours, expected, **near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inner"), [(48, 128), (20, 96), (16, 320)])
@pytest.mark.parametrize("kind", KINDS)
def test_unpacking_is_exact(kind, outputs, inner, dtype):
    weight = packed(kind, outputs, inner)
    assert torch.equal(kernels.unpacked(weight, dtype), dequantize(weight, dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_joined_weights_keep_their_factors(kind):
    first, second = packed(kind, 16, 64), packed(kind, 32, 64)
    (whole,) = joined([first, second])
    both = torch.cat([dequantize(first, torch.float32), dequantize(second, torch.float32)])
    assert torch.equal(dequantize(whole, torch.float32), both)
    order = torch.randperm(48)
    assert torch.equal(dequantize(whole.rows(order), torch.float32), both[order])


def test_other_scales_do_not_join():
    assert len(joined([packed(kind, 16, 64) for kind in KINDS])) == 3


# -- layers ------------------------------------------------------------------------------------------------------------

OUT, INNER = 32, 64
MODELOPT = Nvfp4("weight", "weight_scale_2", "input_scale")
FORMATS = {"nvfp4": (Nvfp4(), files.float4("nvfp4")), "modelopt": (MODELOPT, files.float4("modelopt")),
           "mxfp4": (Mxfp4(), files.float4("mxfp4"))}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_fused_layers_stay_packed(name, rows):
    """Two matrices with a factor each, as gate and up have them."""
    form, writer = FORMATS[name]
    layer, parts, tensors, numbers = Linear(INNER, 2 * OUT), [], [], []
    for i in range(2):
        found, plain = writer((torch.randn(OUT, INNER) * (1 + 9 * i)).numpy())
        specs = {kind: Spec(tensor.dtype, tuple(tensor.shape)) for kind, tensor in found.items()}
        parts.append(Part(f"part{i}", i * OUT, OUT, form, specs))
        tensors.append(found)
        numbers.append(torch.tensor(plain.copy()))
    layer.use(method := StoredLinear(parts, INNER, torch.float32))
    planned = layer.loaded_bytes
    for i, found in enumerate(tensors):
        for kind, tensor in found.items():
            setattr(layer, f"part{i}_{kind}", nn.Parameter(tensor.contiguous(), requires_grad=False))
    stored.use_packed(layer, method._parts.take(layer), method._parts.inputs)
    assert len(layer.packed.parts) == 1
    assert layer.packed_bytes == planned < 0.65 * 2 * OUT * INNER + 4 * 2 * OUT
    x = torch.randn(rows, INNER)
    torch.testing.assert_close(layer(x), x @ torch.cat(numbers).t(), rtol=1e-4, atol=1e-3)
