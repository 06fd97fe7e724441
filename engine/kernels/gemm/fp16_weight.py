"""A weight stored in 16 bits and multiplied in float32: for CPUs that would have to emulate bf16.

FBGEMM, a part of PyTorch on x86-64, keeps a matrix as fp16 in the blocks that its kernel reads, and widens them in
registers. fp16 has more bits of mantissa than bf16 but fewer of exponent, so a bf16 weight fits once it is scaled by a
power of two:

    w = 2^-k * fp16(2^k w)        k: such that the largest weight becomes just less than 2^15

Weights down to 2^-32 of the largest one are exact; smaller ones lose less than a float32 sum does by rounding.

A row's result depends neither on the other rows nor on the number of threads. FBGEMM cuts the rows into blocks of 120
and these into kernels of a few rows each. All of these kernels sum in the same order except AVX2's kernel for a single
row, so row counts that would use it are padded.
"""

import math
from functools import cache
from typing import Any

import torch

_TOP = 15                  # weights are scaled to just below 2^15; fp16 ends at 65504
_NEGLIGIBLE = 2.0**-38     # error relative to the largest weight: float32 rounds products with that weight by 2^-24
_CHECKED = 8 << 20         # elements compared at a time: bounds the memory of the copies
_MAGNITUDE, _INFINITE = 0x7FFF, 0x7F80  # bf16: the bits below the sign, and those of infinity
_SMALLEST, _LARGEST = (127 - 17) << 7, 0x477F  # bf16 between 2^-17 and 65280 has no more bits than fp16
_BLOCK = (512, 32)         # FBGEMM pads a weight to multiples of these numbers of inputs and outputs
_ROWS = 120                # rows in a block of FBGEMM's


@cache
def is_available() -> bool:
    """Whether PyTorch has FBGEMM and it supports this CPU (AVX2 with F16C, or AVX-512)."""
    return "fbgemm" in torch.backends.quantized.supported_engines and hasattr(
        torch.ops.quantized, "linear_dynamic_fp16"
    )


class Fp16Weight:
    """A packed weight W [out, in] and an optional bias [out]."""

    def __init__(self, packed: Any, unscale: float, num_bytes: int) -> None:
        self._packed = packed
        self._unscale = unscale  # 2^-k
        self.nbytes = num_bytes

    @classmethod
    def pack(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> "Fp16Weight | None":
        """None if fp16 cannot hold the weight (float32 with more bits, NaN), or there is no FBGEMM."""
        if weight.device.type != "cpu" or not is_available():
            return None
        exponent = _exponent(weight)
        if exponent is None:
            return None
        scale = math.ldexp(1.0, exponent)
        wide = weight.detach().float()
        if exponent:
            wide = wide * scale
            bias = None if bias is None else bias.detach().float() * scale
        elif bias is not None:
            bias = bias.detach().float()
        packed = torch.ops.quantized.linear_prepack_fp16(wide.contiguous(), bias)
        outputs, inputs = weight.shape
        return cls(packed, 1 / scale, 2 * _padded(inputs, _BLOCK[0]) * _padded(outputs, _BLOCK[1]))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x Wᵀ + b in float32; x [T, in] float32."""
        rows = x.shape[0]
        if short := _padding()[rows % _ROWS]:
            x = torch.cat((x, x.new_zeros(short, x.shape[1])))
        y = _product(x, self._packed)[:rows]
        return y if self._unscale == 1 else y.mul_(self._unscale)


def _product(x: torch.Tensor, packed: Any) -> torch.Tensor:
    return torch.ops.quantized.linear_dynamic_fp16(x, packed)


@cache
def _padding() -> list[int]:
    """How many rows to add, by the number of rows modulo 120, so that each row is summed as in any other batch.

    Found by trying: equal rows must give equal results, the same as in a batch of six, which never uses the single-row
    kernel.
    """
    generator = torch.Generator().manual_seed(0)
    packed = torch.ops.quantized.linear_prepack_fp16(torch.randn(64, 600, generator=generator), None)
    x = torch.randn(1, 600, generator=generator).repeat(_ROWS, 1)
    expected = _product(x[:6], packed)[:1]
    fits = [bool((_product(x[:rows], packed) == expected).all()) for rows in range(1, _ROWS)] + [True]
    return [0, *(fits.index(True, rows - 1) - (rows - 1) for rows in range(1, _ROWS))]


def _exponent(weight: torch.Tensor) -> int | None:
    """The k of the module docstring: 0 if fp16 can hold the weight unscaled, None if it cannot hold it at all."""
    parts = weight.detach().reshape(-1).split(_CHECKED)
    if weight.dtype == torch.bfloat16:
        return _exponent_of_bf16(parts)
    largest = max(float(part.abs().max()) for part in parts)
    if not math.isfinite(largest):
        return None
    if all(_loss(part.float()) == 0 for part in parts):
        return 0
    exponent = _TOP - math.frexp(largest)[1]
    scale = math.ldexp(1.0, exponent)
    fits = all(_loss(part.float() * scale) <= _NEGLIGIBLE * largest * scale for part in parts)
    return exponent if fits else None


def _exponent_of_bf16(parts: tuple[torch.Tensor, ...]) -> int | None:
    """By the bits alone, three times as fast. Scaled, every bf16 fits: what becomes subnormal loses 2^-25 at most."""
    largest, has_small = 0, False
    for part in parts:
        magnitude = part.view(torch.int16) & _MAGNITUDE
        largest = max(largest, int(magnitude.max()))
        has_small = has_small or bool(((magnitude > 0) & (magnitude < _SMALLEST)).any())
    if largest >= _INFINITE:
        return None
    if largest <= _LARGEST and not has_small:
        return 0
    return _TOP - math.frexp(torch.tensor(largest, dtype=torch.int16).view(torch.bfloat16).item())[1]


def _loss(numbers: torch.Tensor) -> float:
    """The largest error of rounding these float32 numbers to fp16."""
    return float((numbers.half().float() - numbers).abs().max())


def _padded(count: int, block: int) -> int:
    return -(-count // block) * block
