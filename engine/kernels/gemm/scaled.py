"""How a GPU multiplies large batches with fp8 weights: decided once, before the first step.

    fp8 activations, by the library   torch._scaled_mm with a scale for each row of both, if it works here
    fp8 activations, by our kernel    where the library raises: its support for GPUs changes from version to version
    activations as they are           on GPUs without fp8 units (before compute capability 8.9): the weight is widened

So no GEMM of a step fails because a library is missing.
"""

import functools
import logging

import torch

log = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
_ROWS, _OUTPUTS, _INNER = 144, 256, 512  # shape of the trial GEMM
_TOLERANCE = 2e-2  # relative to the largest result: covers rounding to bfloat16, and bits lost by fast accumulation


def has_fp8_units(device: torch.device) -> bool:
    """Whether this GPU's tensor cores can multiply fp8 activations."""
    from engine.kernels.runtime.launcher import target_of

    return target_of(device).fp8_units


@functools.cache
def refusal(dtype: torch.dtype) -> str | None:
    """Why the library cannot multiply fp8 matrices with per-row scales and results in `dtype` here; None if it can.
    Tried once, on the current GPU. Without a GPU kernels are only recorded, and the library is assumed to work."""
    if not torch.cuda.is_available():
        return None
    return tried(torch.device("cuda", torch.cuda.current_device()), dtype)


def tried(device: torch.device, dtype: torch.dtype) -> str | None:
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, _INNER, generator=random).to(FP8) for n in (_ROWS, _OUTPUTS))
    x_scale, scale = (torch.rand(n, generator=random) + 0.5 for n in (_ROWS, _OUTPUTS))
    plain = (x.float() * x_scale[:, None]) @ (weight.float() * scale[:, None]).t()
    x, weight, x_scale, scale = (tensor.to(device) for tensor in (x, weight, x_scale, scale))
    for bias in (None, torch.ones(_OUTPUTS, dtype=dtype, device=device)):
        try:
            y = by_library(x, weight.t(), x_scale, scale.unsqueeze(0), bias, dtype).float().cpu()
            off = float((y - plain - (0 if bias is None else 1)).abs().max() / plain.abs().max())
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
            return (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not off < _TOLERANCE:
            return f"its result is off by {off:.1%}"
    return None


def by_library(
    x: torch.Tensor,
    weight_t: torch.Tensor,
    x_scale: torch.Tensor,
    scale_row: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    return torch._scaled_mm(
        x, weight_t, scale_a=x_scale.unsqueeze(1), scale_b=scale_row, bias=bias, out_dtype=dtype, use_fast_accum=True
    )


def multiply(
    x: torch.Tensor,
    weight_t: torch.Tensor,
    x_scale: torch.Tensor,
    scale_row: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """x [M, K] and weight_t [K, N] (a weight's transposed view), both e4m3, with their scales [M] and [1, N] -> [M, N]
    in `dtype`."""
    if refusal(dtype) is None:
        return by_library(x, weight_t, x_scale, scale_row, bias, dtype)
    from engine.kernels.gemm.scaled_kernel import scaled_product

    return scaled_product(x, weight_t.t(), scale_row[0], bias, x_scale=x_scale, dtype=dtype)


def explained(device: torch.device, dtype: torch.dtype) -> str:
    """One line for the memory plan of a model with fp8 weights."""
    name = str(dtype).removeprefix("torch.").replace("bfloat16", "bf16").replace("float16", "fp16")
    if not has_fp8_units(device):
        return f"fp8 weights, {name} activations: this GPU has no fp8 matrix units (compute capability 8.9 is needed)"
    why = refusal(dtype)
    if why is None:
        return "fp8 weights, fp8 activations: products by torch._scaled_mm"
    return f"fp8 weights, fp8 activations: products by Atoll's own kernel, because torch._scaled_mm fails here: {why}"
