"""Layers with int4 and block-fp8 weights on a GPU, with every number of rows that takes another way: each against
float32 arithmetic with the dequantised weight and the activations as they are rounded."""

from functools import partial

import pytest
import torch
from torch import nn

from engine.kernels.gemm import small_batch
from engine.kernels.gemm.packed import block_few_rows, block_gemv, block_library, block_wgmma
from engine.kernels.gemm.packed.group_scaled import GroupScaled
from engine.kernels.gemm.packed.weight import dequantize
from engine.kernels.pointwise import fused
from engine.layers.gemm_inputs import UnnormedRows
from engine.layers.linear import Linear
from engine.layers.quant import FORMATS, packed_gpu
from engine.layers.quant.float8 import Float8
from engine.layers.quant.fp8 import FP8, quantize_rows
from engine.layers.quant.fp8 import dequantize as widened
from engine.layers.quant.stored import Part, Spec, StoredLinear

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("fp8 needs compute capability 8.9", allow_module_level=True)

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
ROWS = (1, 2, 3, 4, 8, 17, 40, 64, 100, 130, 300, 513, 1100)
LIMIT = 4e-3  # of which rounding the result to bf16 takes 1.7e-3
SHAPES = [(1024, 512), (4096, 4096), (24576, 1024)]


def int4(outputs: int, inner: int) -> Linear:
    layer = Linear(inner, outputs)
    layer.use(FORMATS["int4"].linear)
    layer.weight = nn.Parameter(torch.randn(outputs, inner, device=DEVICE, dtype=BF16), requires_grad=False)
    layer.finalize()
    return layer


def blocks(outputs: int, inner: int) -> Linear:
    layer, stored = Linear(inner, outputs), Float8("block", (128, 128), "weight_scale_inv")
    tensors = {
        "weight": torch.randn(outputs, inner, device=DEVICE).to(FP8),
        "weight_scale_inv": torch.rand(outputs // 128, inner // 128, device=DEVICE).add_(0.5).mul_(0.01),
    }
    specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    layer.use(StoredLinear([Part("part", 0, outputs, stored, specs)], inner, BF16))
    layer.weight = nn.Parameter(torch.empty(0, device=DEVICE, dtype=BF16), requires_grad=False)
    for name, tensor in tensors.items():
        setattr(layer, f"part0_{name}", nn.Parameter(tensor, requires_grad=False))
    layer.finalize()
    return layer


def off(found: torch.Tensor, due: torch.Tensor) -> float:
    return float((found.float() - due).norm() / due.norm())


@pytest.mark.parametrize(("outputs", "inner"), SHAPES)
@pytest.mark.parametrize("form", ["int4", "int4 with a copy", "blocks"])
@torch.inference_mode()
def test_every_number_of_rows(form: str, outputs: int, inner: int) -> None:
    torch.manual_seed(0)
    layer = blocks(outputs, inner) if form == "blocks" else int4(outputs, inner)
    if form == "int4 with a copy":
        packed_gpu.keep_int4_copies(layer, 1 << 40)
        assert (layer.packed.copy is None) == (layer.packed.library_scale is None)
    weight = dequantize(layer.packed.parts[0], torch.float32)
    assert layer.wants_fp8(8)
    for rows in ROWS:
        x = torch.randn(rows, inner, device=DEVICE, dtype=BF16)
        seen = x.float() if layer.in_vector_form(rows) else widened(*quantize_rows(x), torch.float32)
        assert off(layer(x), seen @ weight.T) < LIMIT, rows


@pytest.mark.parametrize("make", [int4, blocks])
@torch.inference_mode()
def test_one_row_with_what_surrounds_it(make) -> None:
    torch.manual_seed(0)
    layer = make(4096, 4096)
    weight = dequantize(layer.packed.parts[0], torch.float32)
    x, norm = torch.randn(1, 4096, device=DEVICE, dtype=BF16), torch.rand(4096, device=DEVICE, dtype=BF16) + 0.5
    normed = nn.functional.rms_norm(x.float(), (4096,), norm.float(), 1e-6)
    assert off(layer(UnnormedRows(x, norm, 1e-6)), normed @ weight.T) < LIMIT
    residual = torch.randn(1, 4096, device=DEVICE, dtype=BF16)
    due = residual.float() + x.float() @ weight.T
    assert layer.onto(residual, x) is None
    assert off(residual, due) < LIMIT


def test_hoppers_library_has_both_forms_of_blocks() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only on compute capability 9.0")
    assert block_library.refusal((9, 0), 1) is None
    assert block_library.refusal((9, 0), 128) is None


HOPPER = pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="these kernels are for Hopper")


def in_blocks(outputs: int, inner: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values, scales, the weight)"""
    values = torch.randn(outputs, inner, device=DEVICE).to(FP8)
    scale = torch.rand(outputs // 128, inner // 128, device=DEVICE).add_(0.5).mul_(0.01)
    return values, scale, values.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)


@HOPPER
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("outputs", "inner"), [(128, 384), (1152, 512), (5120, 6144)])
@torch.inference_mode()
def test_tiles_that_end_beyond_the_result(outputs: int, inner: int, dtype: torch.dtype) -> None:
    """Rows that fill no tile, outputs that end with half of one, more tiles than multiprocessors and fewer."""
    torch.manual_seed(0)
    values, scale, weight = in_blocks(outputs, inner)
    ratio = block_wgmma.ratios(scale)
    assert ratio is not None
    bias = torch.randn(outputs, device=DEVICE, dtype=dtype)
    for rows in (1, 63, 64, 191, 193, 400, 3001):
        x, x_scale = quantize_rows(torch.randn(rows, inner, device=DEVICE, dtype=dtype))
        for added in (None, bias):
            found = block_wgmma.gemm(x, x_scale, values, ratio, added, dtype=dtype)
            due = widened(x, x_scale, torch.float32) @ weight.T
            assert off(found, due if added is None else due + added.float()) < LIMIT, rows


@HOPPER
@torch.inference_mode()
def test_rows_that_stand_apart_and_the_same_result_each_time() -> None:
    torch.manual_seed(0)
    values, scale, weight = in_blocks(4096, 2048)
    ratio = block_wgmma.ratios(scale)
    x, x_scale = quantize_rows(torch.randn(2500, 4096, device=DEVICE, dtype=BF16))
    part = x[:, 1024:3072]
    first = block_wgmma.gemm(part, x_scale, values, ratio, dtype=BF16)
    assert off(first, (part.float() * x_scale.view(-1, 1)) @ weight.T) < LIMIT
    for _ in range(20):
        assert torch.equal(block_wgmma.gemm(part, x_scale, values, ratio, dtype=BF16), first)


@HOPPER
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(
    ("outputs", "inner"), [(128, 128), (128, 1024), (1152, 512), (5120, 6144), (16384, 2048), (34816, 512)]
)
@torch.inference_mode()
def test_few_rows(outputs: int, inner: int, dtype: torch.dtype) -> None:
    """One tile, few tiles cut into equal parts, tiles cut anywhere, and a whole tile for each program."""
    torch.manual_seed(0)
    values, scale, weight = in_blocks(outputs, inner)
    grouped = GroupScaled(values, scale, 128, 128, 0)
    assert block_few_rows.fits(grouped)
    bias = torch.randn(outputs, device=DEVICE, dtype=dtype)
    for rows in (1, 8, 9, 31, 64, 65, 128):
        whole, x_scale = quantize_rows(torch.randn(rows, inner + 256, device=DEVICE, dtype=dtype))
        x = whole[:, 128:-128]
        for added in (None, bias):
            found = block_few_rows.gemm(x, x_scale, grouped, added, dtype=dtype)
            due = widened(x, x_scale, torch.float32) @ weight.T
            assert off(found, due if added is None else due + added.float()) < LIMIT, rows
            for _ in range(10):
                assert torch.equal(block_few_rows.gemm(x, x_scale, grouped, added, dtype=dtype), found), rows
            for gate in ("silu", "gelu_tanh") if block_wgmma.gates(grouped) else ():
                halves = found.chunk(2, -1)
                separate = fused.gate_mul(halves[0], halves[1].clone(), gate)
                gated = block_few_rows.gemm(x, x_scale, grouped, added, dtype=dtype, gate=gate)
                assert off(gated, separate.float()) < LIMIT, rows  # whose tiles are cut elsewhere
                for _ in range(10):
                    again = block_few_rows.gemm(x, x_scale, grouped, added, dtype=dtype, gate=gate)
                    assert torch.equal(again, gated), rows


@HOPPER
@torch.inference_mode()
def test_few_rows_that_start_before_their_predecessor_ends() -> None:
    """Each product's kernel begins to read while the one before it still runs."""
    torch.manual_seed(0)
    chain = []
    for outputs, inner in [(1152, 512), (5120, 6144), (34816, 512), (16384, 2048), (128, 1024)] * 4:
        values, scale, _ = in_blocks(outputs, inner)
        x = quantize_rows(torch.randn(33, inner, device=DEVICE, dtype=BF16))
        chain.append((*x, GroupScaled(values, scale, 128, 128, 0)))

    gates = [None, None, "silu", "gelu_tanh", None] * 4

    def products() -> list[torch.Tensor]:
        return [block_few_rows.gemm(*each, dtype=BF16, gate=gate) for each, gate in zip(chain, gates, strict=True)]

    due = []
    for each, gate in zip(chain, gates, strict=True):
        due.append(block_few_rows.gemm(*each, dtype=BF16, gate=gate))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = products()
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(found, due, strict=True))
        assert all(torch.equal(*pair) for pair in zip(products(), due, strict=True))


@HOPPER
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("outputs", "inner"), [(256, 1024), (768, 2048), (34816, 5120)])
@torch.inference_mode()
def test_one_row_of_gate_and_up(outputs: int, inner: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values, scale, weight = in_blocks(outputs, inner)
    grouped = GroupScaled(values, scale, 128, 128, 0)
    assert block_gemv.fits(grouped)
    assert not block_gemv.fits(GroupScaled(values[:, :512], scale[:, :4], 128, 128, 0))
    x = torch.randn(1, inner, device=DEVICE, dtype=dtype)
    for gate, function in (("silu", nn.functional.silu), ("sigmoid", torch.sigmoid)):
        left, right = (x.float() @ weight.T).to(dtype).float().chunk(2, 1)
        found = block_gemv.gated_row(x, grouped, gate)
        assert off(found, function(left).to(dtype).float() * right) < LIMIT
        assert off(found, small_batch.gemv(x, values, scale, gate=gate, block=128).float()) < LIMIT
        assert torch.equal(block_gemv.gated_row(x, grouped, gate), found)


@HOPPER
@pytest.mark.parametrize(
    ("outputs", "inner", "dtype", "kind"),
    [(256, 384, torch.float16, "silu"), (768, 2048, BF16, "gelu_tanh"), (34816, 5120, BF16, "silu")],
)
@torch.inference_mode()
def test_many_rows_fused_with_what_follows(outputs: int, inner: int, dtype: torch.dtype, kind: str) -> None:
    """The bits are those of the product and, after it, the gate or the residual stream."""
    torch.manual_seed(0)
    values, scale, _ = in_blocks(outputs, inner)
    ratio = block_wgmma.ratios(scale)
    assert ratio is not None
    for rows in (1, 63, 193, 400, 2561):
        x, x_scale = quantize_rows(torch.randn(rows, inner, device=DEVICE, dtype=dtype))
        residual = torch.randn(rows, outputs, device=DEVICE, dtype=dtype)
        for bias in (None, torch.randn(outputs, device=DEVICE, dtype=dtype)):
            product = partial(block_wgmma.gemm, x, x_scale, values, ratio, bias, dtype=dtype)
            y = product()
            assert torch.equal(product(gate=kind), fused.gate_mul(*y.chunk(2, 1), kind)), rows
            if bias is None:
                found = residual.clone()
                assert product(onto=found) is found
                assert torch.equal(found, residual + y), rows


@HOPPER
@torch.inference_mode()
def test_scales_that_differ_much_but_not_too_much() -> None:
    torch.manual_seed(0)
    values, scale, _ = in_blocks(256, 1024)
    scale *= 2.0 ** torch.randint(-25, 25, scale.shape, device=DEVICE)
    weight = values.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    x, x_scale = quantize_rows(torch.randn(500, 1024, device=DEVICE, dtype=BF16))
    ratio = block_wgmma.ratios(scale)
    assert ratio is not None
    found = block_wgmma.gemm(x, x_scale, values, ratio, dtype=BF16)
    assert off(found, widened(x, x_scale, torch.float32) @ weight.T) < LIMIT
    for wrong in (0.0, -0.01, 1e30):
        refused = scale.clone()
        refused[1, 3] = wrong
        assert block_wgmma.ratios(refused) is None
