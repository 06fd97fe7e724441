"""Operands for a benchmark: random numbers with the shapes of one of a model's GEMMs."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.kernels.gemm.tiles import VectorTiles
from engine.kernels.tuning.step_gemms import Subject
from engine.layers.quant.fp8 import FP8

_TURNS_BYTES = 200 * 10**6  # total size of the weight's copies that take turns: more than caches hold
_EPS = 1e-6


class Operands:
    """Random numbers with a GEMM's shapes: a row, weights that take turns, and operands of fused operations."""

    def __init__(self, subject: Subject, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        gemm = subject.gemm
        self.gate, self.block = subject.gate, gemm.block
        outputs = gemm.outputs // 2 if gemm.gated else gemm.outputs

        def numbers(*shape: int, deviation: float = 1.0) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device).normal_(0, deviation)

        shape, small = (gemm.outputs, gemm.inner), gemm.inner**-0.5  # results with the variance of the row
        copies = max(2, -(-_TURNS_BYTES // subject.num_bytes))
        self.x = numbers(1, gemm.inner)
        if gemm.itemsize == 1:
            self.weights = [numbers(*shape).to(FP8) for _ in range(copies)]
            scales = (gemm.outputs // gemm.block, gemm.inner // gemm.block) if gemm.block else (gemm.outputs,)
            self.scale = torch.full(scales, small, device=device)
        else:
            self.weights = [numbers(*shape, deviation=small) for _ in range(copies)]
            self.scale = None
        self.bias = numbers(gemm.outputs) if subject.bias else None
        self.norm = (numbers(gemm.inner), _EPS) if gemm.normed else None
        self.residual = numbers(1, outputs).zero_() if subject.residual else None

    def steps(self, tiles: VectorTiles) -> Sequence[Callable[[], torch.Tensor]]:
        """The GEMM with one copy of the weight after the other."""
        return [partial(self._product, weight, tiles) for weight in self.weights]

    def result(self, tiles: VectorTiles) -> torch.Tensor:
        """The result with the first copy, in float32; the residual is zero."""
        if self.residual is not None:
            self.residual.zero_()
        return self._product(self.weights[0], tiles).to(torch.float32, copy=True)

    def _product(self, weight: torch.Tensor, tiles: VectorTiles) -> torch.Tensor:
        from engine.kernels.gemm.small_batch import gemv

        return gemv(
            self.x, weight, self.scale, self.bias, norm=self.norm, gate=self.gate, residual=self.residual,
            block=self.block, tiles=tiles,
        )  # fmt: skip
