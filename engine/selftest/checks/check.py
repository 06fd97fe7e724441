"""A check of the self-test, and the two sides of its comparison: the Triton kernels and their plain references."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from engine.kernels.attention import kernel_reference as attention_reference
from engine.kernels.gemm import reference as gemm_reference
from engine.kernels.gemm.packed import reference as packed_reference
from engine.kernels.moe import reference as moe_reference
from engine.kernels.pointwise import reference as pointwise_reference
from engine.selftest.compare import Result

_NAN = float("nan")


@dataclass
class Side:
    """One of the two sides of a comparison: its device, and its kernels or references.

    The first side draws `numbers` on the CPU, and the second side gets the same. With `dry` they are uninitialised, for
    a pass that only compiles."""

    device: torch.device
    dtype: torch.dtype
    attention: ModuleType = attention_reference
    single: ModuleType = attention_reference  # attention of sequences with one token
    prefix: ModuleType = attention_reference  # and of those that share a prefix
    fused: ModuleType = pointwise_reference
    gemv: ModuleType = gemm_reference
    inputs: ModuleType = pointwise_reference
    quant: ModuleType = pointwise_reference
    moe: ModuleType = moe_reference
    heads: ModuleType = attention_reference
    norm: ModuleType = pointwise_reference
    packed: ModuleType = packed_reference
    int4: ModuleType = packed_reference
    grouped: ModuleType = packed_reference
    blocks: ModuleType = packed_reference
    dry: bool = False
    ms: float = 0.0  # spent in kernels
    numbers: list[torch.Tensor] = field(default_factory=list)
    _used: int = 0
    _generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    @property
    def is_reference(self) -> bool:
        return self.attention is attention_reference

    def randn(self, *shape: int) -> torch.Tensor:
        if self.dry:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return self._draw(lambda: torch.randn(*shape, generator=self._generator).to(self.dtype))

    def randint(self, high: int, *shape: int) -> torch.Tensor:
        return self._draw(lambda: torch.randint(0, high, shape, generator=self._generator, dtype=torch.int32))

    def _draw(self, draw: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._used == len(self.numbers):
            self.numbers.append(draw())
        self._used += 1
        return self.numbers[self._used - 1].to(self.device, copy=True)

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device)

    def strided(self, rows: int, width: int, spare: int = 64) -> torch.Tensor:
        """Rows of a wider matrix, like views of fused projections; the columns after them hold NaN."""
        whole = torch.full((rows, width + spare), _NAN, dtype=self.dtype, device=self.device)
        whole[:, :width] = self.randn(rows, width)
        return whole[:, :width]

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Add the time of the block, until the device is done, to `ms`."""
        self._wait()
        began = time.perf_counter()
        yield
        self._wait()
        self.ms += (time.perf_counter() - began) * 1000

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def kernel_side(device: torch.device, dtype: torch.dtype, *, dry: bool = False) -> Side:
    """The side of the Triton kernels; with TRITON_INTERPRET=1 also on a CPU, in float32 or float16."""
    from engine.kernels.attention import chunks as attention_chunks
    from engine.kernels.attention import decode as attention_decode
    from engine.kernels.attention import heads as attention_heads
    from engine.kernels.attention import shared_prefix
    from engine.kernels.gemm import small_batch
    from engine.kernels.gemm.packed import block_few_rows, group_scaled, int4_gemv, matmul
    from engine.kernels.moe import experts as moe_experts
    from engine.kernels.pointwise import fused as pointwise_fused
    from engine.kernels.pointwise import inputs as pointwise_inputs
    from engine.kernels.pointwise import norm as pointwise_norm
    from engine.kernels.pointwise import quantize as pointwise_quantize

    return Side(
        device, dtype, attention_chunks, attention_decode, shared_prefix, pointwise_fused, small_batch,
        pointwise_inputs, pointwise_quantize, moe_experts, attention_heads, pointwise_norm, matmul, int4_gemv,
        group_scaled, block_few_rows if block_few_rows.runs_on(device) else group_scaled, dry,
    )  # fmt: skip


@dataclass(frozen=True)
class Check:
    name: str
    compute: Callable[[Side], list[Result]]
    needs_fp8: bool = False
