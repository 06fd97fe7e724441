"""Weights in 16 or 32 bits, multiplied in the fastest way that the device has for them.

    GPU                              our kernels for few rows, the library for many; batch-invariant: one kernel for any
    CPU with bf16 units              oneDNN's blocked layout, which small batches read faster than plain rows
    CPU that computes in float32     16-bit weights widened in registers (kernels/gemm/fp16_weight.py)
    any other                        torch's own
"""

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.gemm import autotune, cpu_format
from engine.kernels.gemm.fp16_weight import Fp16Weight
from engine.kernels.runtime.cpu_threads import gemm_threads, num_threads
from engine.layers.quant.base import (
    ExpertLayer,
    ExpertMethod,
    Format,
    Gemm,
    LinearLayer,
    LinearMethod,
    Tensors,
    plain_gemv,
    plain_weight,
)
from engine.layers.repeatable import must_repeat
from engine.layers.weight_memory import empty_parameter

FEW_ROWS = 32          # up to here a GEMM is bound by reading its weight, and our kernel reads it faster
SOME_OUTPUTS = 4096    # fewer do not give every multiprocessor a program of our kernel
_GEMV_ALIGN = 16       # elements of a weight's row: our kernel reads them 16 bytes at a time
_PACK_ROWS = 1         # rows that oneDNN chooses its blocked layout for; larger batches run well on it too
_FEW_CPU_ROWS = 3      # up to here a copy in fp16 is faster (cpu_few_rows.py)


def _dtype_of(layer: LinearLayer | ExpertLayer) -> torch.dtype | None:
    """The dtype that the layer was built with; None while it is being built."""
    weight = getattr(layer, "weight", None)
    return None if weight is None else weight.dtype


class Unquantized(LinearMethod):
    def create(self, layer: LinearLayer) -> None:
        layer.weight = empty_parameter(layer.out_features, layer.in_features, dtype=_dtype_of(layer))

    def tensors(self, layer: LinearLayer, outputs: slice) -> Tensors:
        found = {"weight": layer.weight[outputs]}
        return found if layer.bias is None else {**found, "bias": layer.bias[outputs]}

    def reorder(self, layer: LinearLayer, index: torch.Tensor) -> None:
        assert layer.bias is None
        layer.weight = nn.Parameter(layer.weight.index_select(0, index), requires_grad=False)

    def finalize(self, layer: LinearLayer, *, keep_weight: bool) -> None:
        if layer.weight.is_cuda:
            aligned = layer.in_features % _GEMV_ALIGN == 0 and layer.weight.dtype in (torch.bfloat16, torch.float16)
            if aligned or layer.batch_invariant:
                layer.gemm = ON_GPU
        elif layer.packed is None:
            _pack(layer, keep_weight=keep_weight)


def _pack(layer: LinearLayer, *, keep_weight: bool) -> None:
    """On a CPU: convert the weight to the layout of a faster GEMM, where there is one."""
    if layer.compute_dtype == torch.float32:
        layer.packed, gemm = Fp16Weight.pack(layer.weight, layer.bias), Gemm(_on_fp16_weight)
    elif _can_pack(layer.weight):
        layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.data, _PACK_ROWS)
        gemm = ON_PACKED
    if layer.packed is None:
        return
    layer.threads = torch.get_num_threads()
    layer.gemm = gemm
    if not keep_weight:
        layer.weight = nn.Parameter(torch.empty(0, dtype=layer.weight.dtype), requires_grad=False)


def _can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _plain(layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, layer.weight, layer.bias)


def _on_packed(layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
    rows, least = x.shape[0], cpu_format.least_rows()
    with num_threads(threads_for(layer, x)):  # the rest of a small step runs on one
        if rows <= _FEW_CPU_ROWS and layer.few_rows is not None and not must_repeat():
            return layer.few_rows(x.float()).to(x.dtype)
        # A single row runs on another kernel, which sums in another order. Repeating it makes its result the same alone
        # and in a batch: from two rows on, a row's result does not depend on how many there are (except with AMX, where
        # oneDNN chooses the order of a sum by the number of rows).
        if rows < least:
            x = torch.cat((x, x[:1].expand(least - rows, -1)))
        y = torch.ops.mkldnn._linear_pointwise(x, layer.packed, layer.bias, "none", [], "")
    return y[:rows]


def _on_fp16_weight(layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
    with num_threads(threads_for(layer, x)):
        return layer.packed(x)


def threads_for(layer: LinearLayer, x: torch.Tensor) -> int:
    """How many CPU threads the layer's product with x gets."""
    return gemm_threads(layer.threads, layer.in_features * layer.out_features, x.shape[0])


def _on_gpu(layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
    if layer.batch_invariant:
        from engine.kernels.gemm import batch_invariant

        return batch_invariant.matmul(x, layer.weight, layer.bias)
    if x.shape[0] <= layer.vector_rows:
        return plain_gemv(layer, x)
    if x.shape[0] > FEW_ROWS or layer.out_features < SOME_OUTPUTS:
        chosen = autotune.chosen(x, layer.weight) if layer.bias is None else None
        return F.linear(x, layer.weight, layer.bias) if chosen is None else chosen(x, layer.weight)
    from engine.kernels.gemm.small_batch import small_batch_gemm

    return small_batch_gemm(x, layer.weight, layer.bias)


PLAIN = Gemm(_plain)
ON_PACKED = Gemm(_on_packed)
ON_GPU = Gemm(_on_gpu, gemv=plain_gemv, streamed=plain_weight, library=True)


class UnquantizedExperts(ExpertMethod):
    fused = True

    def create(self, layer: ExpertLayer) -> None:
        shape = layer.num_experts, layer.out_features, layer.in_features
        layer.weight = empty_parameter(*shape, dtype=_dtype_of(layer))

    def tensors(self, layer: ExpertLayer, expert: int | slice, outputs: slice) -> Tensors:
        return {"weight": layer.weight[expert, outputs]}

    def finalize(self, layer: ExpertLayer) -> None:
        """On a CPU that computes in float32: keep the weights in 16 bits, if these hold them all."""
        if layer.weight.device.type != "cpu" or layer.packed or layer.compute_dtype != torch.float32:
            return
        packed: list[Fp16Weight] = []
        for weight in layer.weight:
            found = Fp16Weight.pack(weight)
            if found is None:
                return
            packed.append(found)
        layer.packed = packed
        layer.weight = nn.Parameter(torch.empty(0, dtype=layer.weight.dtype), requires_grad=False)

    def apply(self, layer: ExpertLayer, x: torch.Tensor, expert: int, *, quantize: bool) -> torch.Tensor:
        return layer.packed[expert](x) if layer.packed else F.linear(x, layer.weight[expert])


UNQUANTIZED = Format(Unquantized(), UnquantizedExperts())
