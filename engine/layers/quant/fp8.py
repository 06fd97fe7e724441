"""`--quantization fp8`: 16-bit weights become e4m3 with one scale per output channel while they load.

A few rows multiply with the fp8 weight as they are. More are quantised too, one scale per token, and multiplied on the
GPU's fp8 units; a GPU without such units widens the weight instead (kernels/gemm/scaled.py says which way a GPU takes).

    weight [N, K]:  a scale for each output channel (row), computed once after loading
    input  [T, K]:  a scale for each token (row), computed in every step

    scale = max |row| / 448        stored = round_to_fp8(row / scale)        value = stored * scale

448 is the largest e4m3 number. On a GPU the activations' half is a kernel (kernels/pointwise/quantize.py).
"""

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.gemm import autotune, scaled
from engine.layers.gemm_inputs import QuantizedRows
from engine.layers.quant.base import ExpertLayer, Format, Gemm, LinearLayer, Sides, plain_gemv, plain_weight
from engine.layers.quant.unquantized import Unquantized, UnquantizedExperts
from engine.layers.weight_memory import for_good

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_SCALE = 1e-12  # a row of zeros has a scale too: 0 / 0 would be NaN
_CHUNK_ELEMENTS = 16 << 20
FEW_ROWS = 128         # up to here our kernel, on GPUs for whose library no algorithms can be chosen
_MANY_OUTPUTS = 16384  # with so many, up to half as many rows
_FEW_OUTPUTS = 4096    # with fewer, too, although few of our programs run then
_MULTIPLE = 16         # of both sides of a matrix on the fp8 units


def _fits_fp8_units(layer: Sides) -> bool:
    return layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0


class Fp8(Unquantized):
    converts = True

    def supports(self, layer: Sides) -> bool:
        return _fits_fp8_units(layer)

    def finalize(self, layer: LinearLayer, *, keep_weight: bool) -> None:
        if layer.weight.dtype == FP8:
            return
        dtype = layer.weight.dtype
        use_weight(layer, *quantize_weight(layer.weight), dtype)

    def num_bytes(self, layer: LinearLayer) -> int:
        return layer.weight.numel() + 4 * layer.out_features


def use_weight(layer: LinearLayer, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
    """Multiply with an e4m3 weight [N, K] and its scale [N]. `dtype`: of the activations."""
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.scale = nn.Parameter(scale, requires_grad=False)
    layer.weight_t, layer.scale_row = weight.t(), scale.unsqueeze(0)
    if not weight.is_cuda:
        layer.gemm = REFERENCE
    elif scaled.has_fp8_units(weight.device):
        scaled.refusal(dtype)  # tried now: not in a step, and not while a graph is being recorded
        layer.gemm = ON_FP8_UNITS
    else:
        layer.gemm = ON_WIDENED_WEIGHT


def _on_gpu(layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] <= layer.vector_rows:
        return plain_gemv(layer, x)
    return _on_fp8_units(layer, QuantizedRows.of(x))


def _on_fp8_units(layer: LinearLayer, x: QuantizedRows) -> torch.Tensor:
    assert layer.scale is not None
    if layer.batch_invariant:
        from engine.kernels.gemm import batch_invariant

        scales = x.scale, layer.scale
        return batch_invariant.matmul(x.values, layer.weight, layer.bias, scales=scales, dtype=x.dtype)
    chosen = autotune.chosen(x.values, layer.weight, x.dtype) if layer.bias is None else None
    if chosen is not None:
        return chosen(x.values, layer.weight, (x.scale, layer.scale))
    most = FEW_ROWS if _FEW_OUTPUTS <= layer.out_features < _MANY_OUTPUTS else FEW_ROWS // 2
    if x.values.shape[0] <= most:
        from engine.kernels.gemm.small_batch import small_batch_gemm

        return small_batch_gemm(x.values, layer.weight, layer.bias, x_scale=x.scale, scale=layer.scale, dtype=x.dtype)
    return scaled.multiply(x.values, layer.weight_t, x.scale, layer.scale_row, layer.bias, x.dtype)


def _on_widened_weight(layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
    """fp8 on GPUs without fp8 units, and int8 heads: activations stay in 16 bits."""
    assert layer.scale is not None
    if x.shape[0] <= layer.vector_rows:
        return plain_gemv(layer, x)
    from engine.kernels.gemm.scaled_kernel import scaled_product

    return scaled_product(x, layer.weight, layer.scale, layer.bias)


def _reference(layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
    """On a CPU: what the GPU's fp8 units compute, in plain torch."""
    assert layer.scale is not None
    if x.shape[0] > layer.vector_rows:
        x = dequantize(*quantize_rows(x), x.dtype)
    return F.linear(x, dequantize(layer.weight, layer.scale, x.dtype), layer.bias)


ON_FP8_UNITS = Gemm(_on_gpu, _on_fp8_units, gemv=plain_gemv, streamed=plain_weight, library=True)
ON_WIDENED_WEIGHT = Gemm(_on_widened_weight, gemv=plain_gemv, streamed=plain_weight)
REFERENCE = Gemm(_reference)


class Fp8Experts(UnquantizedExperts):
    converts = True

    def supports(self, layer: Sides) -> bool:
        return _fits_fp8_units(layer)

    def finalize(self, layer: ExpertLayer) -> None:
        if layer.weight.dtype == FP8:
            return
        weight, scale = quantize_weight(layer.weight.view(-1, layer.in_features))
        layer.weight = nn.Parameter(weight.view(layer.weight.shape), requires_grad=False)
        layer.scale = nn.Parameter(scale.view(layer.num_experts, layer.out_features), requires_grad=False)

    def apply(self, layer: ExpertLayer, x: torch.Tensor, expert: int, *, quantize: bool) -> torch.Tensor:
        assert layer.scale is not None
        if quantize:
            x = dequantize(*quantize_rows(x), x.dtype)
        return F.linear(x, dequantize(layer.weight[expert], layer.scale[expert], x.dtype))

    def num_bytes(self, layer: ExpertLayer) -> int:
        return layer.weight.numel() + 4 * layer.num_experts * layer.out_features


FP8_PER_CHANNEL = Format(Fp8(), Fp8Experts())


# -- arithmetic --------------------------------------------------------------------------------------------------------


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (fp8 [T, K], scale [T] float32)."""
    wide = x.float()
    scale = (wide.abs().amax(dim=-1) / FP8_MAX).clamp_(min=SMALLEST_SCALE)
    return (wide / scale.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a large matrix, some rows at a time: float32 copies of it all would double the peak memory."""
    rows, inner = weight.shape
    with for_good():
        quantized = torch.empty(rows, inner, dtype=FP8, device=weight.device)
        scale = torch.empty(rows, dtype=torch.float32, device=weight.device)
    step = rows if weight.is_meta else max(1, _CHUNK_ELEMENTS // inner)  # those on `meta` take no memory
    for at in range(0, rows, step):
        quantized[at : at + step], scale[at : at + step] = quantize_rows(weight[at : at + step])
    return quantized, scale


def dequantize(quantized: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp8 [R, K] and scale [R] -> [R, K] in `dtype`."""
    return (quantized.float() * scale.unsqueeze(-1)).to(dtype)
