"""The output head beside quantised weights (`--quantization fp8 | int8 | int4 | int4-g32`).

One stream reads the whole head for every token. In 16 bits it is a quarter of all bytes of an 8B model in int4, and a
third of those that a token of a mixture of experts in fp8 reads. So it is rounded, too, where its products gain by it:

    GPU, beside int4                              int8
    GPU, beside fp8, where it is an eighth or     16 bits; steps of up to FEW_ROWS sequences read a second copy in int8
      more of what a token reads                  (kept where memory is left)
    CPU that multiplies bytes, beside int8, int4  int8 (kernels/gemm/cpu_int8.py)
    any other                                     16 bits

int8 has a scale for each token of the vocabulary, and an error of 0.8 % (root mean square). Activations stay in 16
bits, so logits lose only that. A tied head keeps the embedding in 16 bits, and takes a copy of it. (Measurements:
docs/performance/experts.md.)
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.kernels.gemm import cpu_int8
from engine.layers.quant.base import Gemm, LinearLayer, Sides
from engine.layers.quant.cpu_packed import use_on_cpu
from engine.layers.quant.fp8 import ON_WIDENED_WEIGHT, Fp8
from engine.layers.quant.online_integers import on_cpu, quantized, row_blocks
from engine.layers.quant.unquantized import ON_GPU, Unquantized
from engine.layers.weight_memory import for_good

log = logging.getLogger(__name__)

FEW_ROWS = 64     # up to here the copy is read faster; from 128 on the 16-bit head is
_LEAST_SHARE = 8  # a head of at least the eighth part of a token's bytes has a copy
_MOST_SHARE = 32  # of the memory that is left, the copy gets one part: 3 % of the pages for 4 to 6 % of speed
_MULTIPLE = 16    # numbers that a thread of the kernels reads at once


@dataclass(slots=True)
class Int8Rows:
    """A weight [N, K] in int8, with a scale [N] for each row."""

    values: torch.Tensor
    scale: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes

    @staticmethod
    def of(weight: torch.Tensor) -> "Int8Rows":
        rows, inner = weight.shape
        with for_good():
            values = torch.empty(rows, inner, dtype=torch.int8, device=weight.device)
            scale = torch.empty(rows, dtype=torch.float32, device=weight.device)
        for part in row_blocks(weight):
            q, scales = quantized(weight[part], 8, inner)
            values[part], scale[part] = q.bitwise_xor_(0x80).view(torch.int8), scales[:, 0]
        return Int8Rows(values, scale)


class HeadBesideFp8(Unquantized):
    def supports(self, layer: Sides) -> bool:
        return layer.in_features % _MULTIPLE == 0

    def copy_bytes(self, layer: LinearLayer) -> int:
        return layer.out_features * (layer.in_features + 4)


class HeadBesideInt8(Unquantized):
    def finalize(self, layer: LinearLayer, *, keep_weight: bool) -> None:
        if layer.weight.is_cuda or not cpu_int8.supports(layer.in_features):
            super().finalize(layer, keep_weight=keep_weight)
        elif layer.packed is None:
            use_on_cpu(layer, on_cpu(layer.weight.data, 8, layer.in_features, layer.bias), keep_weight=keep_weight)


class HeadBesideInt4(Fp8):
    def finalize(self, layer: LinearLayer, *, keep_weight: bool) -> None:
        if layer.weight.is_cuda:
            convert(layer)
        else:
            BESIDE_INT8.finalize(layer, keep_weight=keep_weight)


def convert(layer: LinearLayer) -> None:
    if layer.weight.dtype != torch.int8:
        rows = Int8Rows.of(layer.weight)
        layer.weight = nn.Parameter(rows.values, requires_grad=False)
        layer.scale = nn.Parameter(rows.scale, requires_grad=False)
        layer.gemm = ON_WIDENED_WEIGHT


BESIDE_FP8, BESIDE_INT8, BESIDE_INT4 = HeadBesideFp8(), HeadBesideInt8(), HeadBesideInt4()


# -- the copy beside fp8 -----------------------------------------------------------------------------------------------


def copied_head(model: nn.Module, token_bytes: int) -> Any:
    """The head, if its few rows should read a copy; else None. `token_bytes`: what a token reads without it."""
    head: Any = next((layer for layer in model.modules() if getattr(layer, "method", None) is BESIDE_FP8), None)
    if head is None or head.batch_invariant or head.weight.dtype.itemsize != 2:
        return None
    return head if head.loaded_bytes * _LEAST_SHARE >= token_bytes else None


def copy_kept(need: int, free: int) -> int:
    """Bytes of the copy, of `need`, beside weights that leave `free` bytes."""
    return need if need <= free // _MOST_SHARE else 0


def keep_copy(model: nn.Module, token_bytes: int, free: int) -> None:
    """After loading, on a GPU with so many bytes of memory left."""
    head = copied_head(model, token_bytes)
    if head is None or not copy_kept(head.method.copy_bytes(head), free):
        return
    head.few_rows, head.gemm = Int8Rows.of(head.weight), _WITH_COPY
    log.info("The output head is kept in int8, too (%.1f GiB): steps of up to %d sequences read it faster.",
             head.few_rows.nbytes / (1 << 30), FEW_ROWS)  # fmt: skip


def drop_copy(model: nn.Module) -> None:
    """Read the 16-bit head again, for any number of rows."""
    heads: list[Any] = [layer for layer in model.modules() if getattr(layer, "gemm", None) is _WITH_COPY]
    for head in heads:
        head.few_rows, head.gemm = None, ON_GPU


def _with_copy(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > FEW_ROWS:
        return ON_GPU.run(layer, x)
    if x.shape[0] <= layer.vector_rows:
        return _gemv_with_copy(layer, x)
    from engine.kernels.gemm.scaled_kernel import scaled_product

    return scaled_product(x, layer.few_rows.values, layer.few_rows.scale, layer.bias)


def _gemv_with_copy(layer: Any, x: torch.Tensor, **around: Any) -> torch.Tensor:
    from engine.kernels.gemm.small_batch import gemv

    return gemv(x, layer.few_rows.values, layer.few_rows.scale, layer.bias, **around)


_WITH_COPY = Gemm(_with_copy, gemv=_gemv_with_copy, library=True)
