"""fp8 (e4m3) numbers with one scale a row: the arithmetic of `--quantization fp8`, in plain torch.

    weight [N, K]:  a scale for each output channel (row), found once after loading
    input  [T, K]:  a scale for each token (row), found in every step

    scale = max |row| / 448        stored = round_to_fp8(row / scale)        value = stored * scale

448 is e4m3's largest number. On a GPU the activations' half is a kernel (engine/kernels/gemm/quantize.py); this is its
twin.
"""

import torch

from engine.layers.weight_memory import for_good

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_SCALE = 1e-12  # a row of zeros has a scale too: 0 / 0 would be NaN
_CHUNK_ELEMENTS = 16 << 20


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (fp8 [T, K], scale [T] float32)."""
    wide = x.float()
    scale = (wide.abs().amax(dim=-1) / FP8_MAX).clamp_(min=SMALLEST_SCALE)
    return (wide / scale.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for a large matrix, some rows at a time: float32 copies of all of it would double the peak memory."""
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
