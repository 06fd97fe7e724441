"""How far a kernel's result may differ from its reference's. Each row (last dimension) is judged by its own magnitude,
so that a large row does not hide errors in others.

    numbers   largest |a - b| / (|b| + rms of b's row): relative for large numbers, absolute for those near 0
    fp8       rms(a - b) / rms(b) of a row's dequantised numbers, because a number on the border between two steps of
              e4m3, 1/8 apart, may be rounded either way. Scales separately, each relative to itself
    int8      rms(a - b) / rms(b) of a row of a KV cache
    exact     share of unequal entries; none are allowed
"""

from dataclasses import dataclass

import torch

# The error that one rounding to the dtype and another order of summation may cause: the bound of `numbers`.
_BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
_SCALE_BOUND, _FP8_BOUND, _FP8_KV_BOUND, _INT8_KV_BOUND = 1e-2, 4e-2, 6e-2, 1e-2  # the rows of a KV cache are short
_TINY = 1e-30


@dataclass(frozen=True)
class Result:
    """One tensor that a check computes, and how far it may differ from its reference's."""

    tensor: torch.Tensor
    bound: float = 0.0
    kind: str = "exact"  # or "max", "rms"


@dataclass(frozen=True)
class Difference:
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # False for NaN

    @property
    def share(self) -> float:
        """The error as a share of what is allowed; the largest is shown."""
        if self.error != self.error:
            return float("inf")
        return self.error / self.bound if self.bound else self.error * float("inf") if self.error else 0.0


def numbers(tensor: torch.Tensor, roundings: float = 1) -> Result:
    """A result that was rounded to its dtype this many times."""
    return Result(tensor, roundings * _BOUNDS[tensor.dtype], "max")


def fp8_rows(quantised: tuple[torch.Tensor, torch.Tensor]) -> list[Result]:
    """The result of quantize_rows: e4m3 [T, N] and its scale [T]."""
    data, scale = quantised
    return [Result(scale[:, None], _SCALE_BOUND, "max"), Result(data.float() * scale[:, None], _FP8_BOUND, "rms")]


def fp8_kv(cache: torch.Tensor) -> Result:
    """fp8 keys or values with a given scale."""
    return Result(cache.float(), _FP8_KV_BOUND, "rms")


def int8_kv(cache: torch.Tensor, scale: torch.Tensor) -> Result:
    """int8 keys or values with a scale for each token and head."""
    return Result(cache.float() * scale[..., None], _INT8_KV_BOUND, "rms")


def fp8_products(tensor: torch.Tensor) -> Result:
    """A result computed from fp8 activations."""
    return Result(tensor, _FP8_BOUND, "rms")


def exact(tensor: torch.Tensor) -> Result:
    return Result(tensor)


def difference(ours: Result, reference: Result) -> Difference:
    """Compare two results, on any devices. NaN, infinity or another shape gives an error of NaN or infinity."""
    if ours.tensor.shape != reference.tensor.shape or ours.tensor.dtype != reference.tensor.dtype:
        return Difference(float("inf"), ours.bound)
    if ours.kind == "exact":
        return Difference(float((ours.tensor.cpu() != reference.tensor.cpu()).double().mean()), 0.0)
    a, b = ours.tensor.double(), reference.tensor.to(ours.tensor.device).double()
    rms = b.square().mean(-1, keepdim=True).sqrt()
    if ours.kind == "rms":
        error = (a - b).square().mean(-1, keepdim=True).sqrt() / rms.clamp_min(_TINY)
    else:
        error = (a - b).abs() / (b.abs() + rms).clamp_min(_TINY)
    return Difference(float(error.max()), ours.bound)
