"""Formats whose activations are rounded, too: to fp8 or int8, with one scale for each token."""

import torch

from engine.layers.quant import fp8
from engine.layers.quant.base import Gemm, Inputs


def rounding_inputs(gemm: Gemm, inputs: Inputs) -> Gemm:
    """`gemm` of activations that are rounded first. For GEMMs that do not round them by themselves."""
    if inputs is None:
        return gemm
    return Gemm(lambda layer, x: gemm.run(layer, round_rows(x, inputs)))


def round_rows(x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """x [T, K], rounded as a format's activations are."""
    if inputs == "fp8":
        return fp8.dequantize(*fp8.quantize_rows(x), x.dtype)
    return _round_int8_rows(x) if inputs == "int8" else x


def _round_int8_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] as int8 would store it, with a scale for each row: round(x / scale) * scale. As in compressed-tensors,
    scale = max |row| / 127.5."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127.5).clamp_(min=1e-12)
    return (wide / scale).round_().clamp_(-128, 127).mul_(scale).to(x.dtype)
