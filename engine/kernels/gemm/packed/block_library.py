"""GEMM by the library (cuBLASLt) of fp8 activations with an fp8 weight that has a scale for each group of 128 columns.

    weight   e4m3 [N, K], scales for blocks of 128 x 128 numbers, or of 1 x 128
    x        e4m3 [M, K] with a scale for each row: the library wants one for each group, so a row's is repeated

Compute capability 9.0 with CUDA 12.9 or newer has it. Whether it works is tried once, before the first step.
"""

import functools

import torch
import torch.nn.functional as F

from engine.kernels.gemm.packed.group_scaled import GroupScaled

GROUP = 128
_ROW_MULTIPLE = 4  # of x; others are refused by the library
_SCALE_MULTIPLE = 4  # of the scales that a block of rows has in memory
_TOLERANCE = 2e-2  # relative to the largest result


@functools.cache
def refusal(capability: tuple[int, int], block_rows: int) -> str | None:
    """Why the library cannot multiply such weights on the current GPU; None if it can."""
    if capability != (9, 0) or not hasattr(F, "scaled_mm"):
        return "it needs compute capability 9.0 and PyTorch 2.10 or newer"
    device = torch.device("cuda", torch.cuda.current_device())
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 512, generator=random).to(torch.float8_e4m3fn) for n in (16, 256))
    x_scale = torch.rand(16, generator=random, dtype=torch.float32) + 0.5
    scale = torch.rand(256 // block_rows, 4, generator=random, dtype=torch.float32) + 0.5
    spread = scale.repeat_interleave(block_rows, 0).repeat_interleave(GROUP, 1)
    plain = (x.float() * x_scale[:, None]) @ (weight.float() * spread).t()
    x, x_scale, weight, scale = (tensor.to(device) for tensor in (x, x_scale, weight, scale))
    try:
        found = multiply(x, x_scale, weight, library_scale(scale, block_rows), block_rows, None, torch.bfloat16)
        off = float((found.float().cpu() - plain).abs().max() / plain.abs().max())
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None if off < _TOLERANCE else f"its result is off by {off:.1%}"


def fits(weight: GroupScaled) -> bool:
    """Whether the library has a form for a weight of this shape and these groups."""
    outputs, inner = weight.shape
    return weight.group == GROUP and inner % GROUP == 0 and outputs % GROUP == 0


def library_scale(scale: torch.Tensor, block_rows: int) -> torch.Tensor:
    """Scales [N / block_rows, groups], as the library reads them."""
    if block_rows == 1:
        return scale.float().t().contiguous().t()  # the outputs of a group side by side
    padding = -scale.shape[1] % _SCALE_MULTIPLE
    return F.pad(scale.float(), (0, padding)).contiguous().t()


def multiply(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    block_rows: int,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """x [M, K] with x_scale [M], weight [N, K], scale from `library_scale` -> [M, N] in `dtype`."""
    rows = x.shape[0]
    padding = -rows % _ROW_MULTIPLE
    if padding:
        x = F.pad(x.view(torch.uint8), (0, 0, 0, padding)).view(x.dtype)
        x_scale = F.pad(x_scale, (0, padding))
    kinds, plain = F.ScalingType, F.SwizzleType.NO_SWIZZLE  # type: ignore[attr-defined]
    y = F.scaled_mm(  # type: ignore[attr-defined]
        x, weight.t(), x_scale.expand(x.shape[1] // GROUP, -1).contiguous().t(), kinds.BlockWise1x128,
        scale, kinds.BlockWise1x128 if block_rows == 1 else kinds.BlockWise128x128, plain, plain, None, dtype,
    )  # fmt: skip
    y = y[:rows]
    return y if bias is None else y.add_(bias)
