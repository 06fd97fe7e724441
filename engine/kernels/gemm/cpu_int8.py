"""int8 weights on a CPU that multiplies bytes (VNNI): y [M, N] = x [M, K] Wᵀ, W = q * scale[n], q int8 [N, K].

The instructions multiply bytes by bytes, four products at a time, and are two to four times as fast as those for bf16;
a few rows are bound by reading the weight, which is half as long. Activations keep 16 bits in spite of that: each row
is split into two rows of bytes,

    x = step * (high + low / 254)      step = max |x| / 127; high, low whole numbers of at most 127

and both are multiplied: y = step * scale[n] * (Σ high q + Σ low q / 254). The error of x is at most max |x| / 64516,
where bfloat16 loses up to 1/512 of each number.

Integers are summed exactly, so a row's result depends neither on the other rows nor on threads or tiles.
(Measurements: docs/performance/cpu.md.)
"""

import warnings
from functools import cache
from typing import Any, Protocol

import torch

_LARGEST = 127             # of high and low
_BASE = 2 * _LARGEST       # lows in a high
_MIDDLE = 128              # the byte that stands for zero: the instructions want activations without a sign
_LONGEST = 1 << 16         # rows shorter than this: int32 holds 255 * 128 * (2^16 - 1)


class _Product(Protocol):
    """A packed weight. Rounds numbers of -128 to 127, [M, K] in float32; -> their sums with q, times scale, [M, N]."""

    def __call__(self, numbers: torch.Tensor) -> torch.Tensor: ...


class SplitInt8Weight:
    """q int8 [N, K] and scale [N]; an optional bias [N]. Ask `is_exact` first."""

    def __init__(self, q: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.shape = q.shape
        self._product = _pack(q, scale.float())
        self._bias = None if bias is None else bias.detach().float()

    @property
    def nbytes(self) -> int:
        outputs, inner = self.shape
        return outputs * (inner + 8)  # a scale and a sum for each output

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] -> [M, N] in x's dtype."""
        wide = x.float()
        step = wide.abs().amax(-1, keepdim=True).div_(_LARGEST)
        # A row of zeros becomes NaN, which multiplies as some byte; its step, which is zero, makes zeros of the result.
        low = wide / step
        high = low.round()
        low.sub_(high).mul_(_BASE)
        of_high, of_low = self._product(torch.cat((high, low))).chunk(2)
        return self._finish(torch.add(of_high, of_low, alpha=1 / _BASE), step, x.dtype)

    def _finish(self, sums: torch.Tensor, step: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        y = sums.mul_(step)
        return (y if self._bias is None else y.add_(self._bias)).to(dtype)

    def dequantized(self) -> torch.Tensor:
        """W [N, K] in float32."""
        return self._product(torch.eye(self.shape[1])).T


class RoundedInt8Weight(SplitInt8Weight):
    """The same with activations of 8 bits, as W8A8 checkpoints want them (layers/quant/rounded_inputs.py):
    x = step * number, step = max |x| / 127.5."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        step = wide.abs().amax(-1, keepdim=True).div_(_LARGEST + 0.5)
        numbers = (wide / step).round_().clamp_(-_MIDDLE, _LARGEST)
        return self._finish(self._product(numbers), step, x.dtype)


@cache
def is_exact() -> bool:
    """Whether this PyTorch and CPU multiply bytes, and exactly: without VNNI, sums of two products are cut off at 16
    bits."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-_LARGEST, _LARGEST + 1, (64, 128), dtype=torch.int8, generator=generator)
    q[:2] = torch.tensor([[_LARGEST], [-_MIDDLE]])
    numbers = torch.randint(-_LARGEST, _LARGEST + 1, (3, 128), generator=generator).float()
    numbers[:2] = torch.tensor([[_LARGEST], [-_MIDDLE]])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # quantised tensors are deprecated, and said to be once in a process
            product = _pack(q, torch.ones(64))
        return torch.equal(product(numbers), numbers @ q.float().T)
    except (RuntimeError, AttributeError):
        return False


def supports(inner: int) -> bool:
    return inner < _LONGEST and is_exact()


def _pack(q: torch.Tensor, scale: torch.Tensor) -> _Product:
    return _OneDnn(q, scale) if _has_amx() else _Fbgemm(q, scale)


def _has_amx() -> bool:
    """FBGEMM reads a weight faster for few rows, and oneDNN knows the matrix units, which multiply many."""
    return torch.cpu._is_amx_tile_supported()


class _Fbgemm:
    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        tensor = torch._make_per_channel_quantized_tensor(q.contiguous(), scale.double(), zeros, 0)
        self._packed: Any = torch.ops.quantized.linear_prepack(tensor, None)
        self._multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default

    def __call__(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._multiply(numbers, 1.0, _MIDDLE, self._packed)


class _OneDnn:
    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(q.contiguous(), None)
        self._scale, self._zeros = scale, torch.zeros(len(scale), dtype=torch.int64)
        self._multiply = torch.ops.onednn.qlinear_pointwise.default

    def __call__(self, numbers: torch.Tensor) -> torch.Tensor:
        codes = numbers.add(_MIDDLE).round_().to(torch.uint8)
        return self._multiply(codes, 1.0, _MIDDLE, self._packed, self._scale, self._zeros, None, 1.0, 0, torch.float32,
                              "none", [], "")  # fmt: skip
