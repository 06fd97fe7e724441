"""Matrix products with a weight, and several of them fused into one."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.gemm import autotune, scaled
from engine.kernels.gemm.fp16_weight import Fp16Weight
from engine.kernels.runtime.cpu_threads import num_threads
from engine.layers.quant import FP8, dequantize, quantize_rows, quantize_weight

_VECTOR_ROWS = 4  # as in gemm.small_batch; of small weights
# Numbers: of a larger weight a second row's arithmetic takes longer than the matrix units' way. 26B-A4B's dense MLP, of
# 11.9 million, stays below: it shares kernels with the experts. (With 2.3 million here, steps of two sequences took 24
# percent longer in 26B-A4B, 18 in 35B-A3B, 10 in 0.6B.)
_SMALL_WEIGHT = 12_500_000
_FEW_ROWS = 32    # up to here a product is bound by reading its weight, and our own kernel reads it faster
_FEW_FP8_ROWS = 128  # half as many where there are many outputs; fewer where an algorithm is chosen
_SOME_OUTPUTS = 4096  # fewer do not fill a card with our kernel's programs
_MANY_OUTPUTS = 16384
_GEMV_ALIGN = 16  # of a weight's rows, in numbers: our kernel reads them 16 bytes at a time
_PACK_ROWS = 1    # rows that oneDNN's blocked layout is chosen for; larger batches run well on it too


def empty_parameter(*shape: int) -> nn.Parameter:
    """A parameter of the default dtype without memory: the loader gives it some, and its values (models/loader.py)."""
    return nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)


class QuantizedRows(NamedTuple):
    """Activations in fp8: what a norm or a gate gives a product that would quantise them anyway."""

    values: torch.Tensor  # [T, K] e4m3
    scale: torch.Tensor   # [T] float32
    dtype: torch.dtype    # of the activations, and of the product
    plain: torch.Tensor | None = None  # [T, K] before, where a product that keeps its precision reads them too


class UnnormedRows(NamedTuple):
    """Activations that still have to pass an RMS norm: a product in vector form does it in passing."""

    values: torch.Tensor  # [T, K]
    weight: torch.Tensor  # [K] of the norm
    eps: float
    offset: float | None = None  # of a WideRMSNorm, which multiplies by offset + weight


Activations = torch.Tensor | QuantizedRows | UnnormedRows  # what a product reads


class Linear(nn.Module):
    """y = x Wᵀ + b;  x [T, in], W [out, in]. After loading, `finalize` chooses the fastest form of the product:

    CPU with bf16 units: the weight is re-ordered once into oneDNN's blocked layout; small batches then read it at about
        1.7 times the speed of the plain layout (measured on Zen 5, 1-16 rows, 30 against 17 GB/s).
    CPU that computes in float32 (`compute_dtype`, set before loading): the weight stays in 16 bits if they hold it
        (kernels/fp16_weight.py).
    GPU: our kernels for few rows, cuBLAS for many. One row goes in vector form, of a small weight up to four do.
    fp8 (`quantization = "fp8"`, set before loading): W in fp8, a scale per output channel. In vector form activations
        multiply with it as they are; else they are quantised as well, and the product runs on the fp8 units, if the
        GPU has some (kernels/scaled.py).
    `batch_invariant` (GPU, set before loading): one kernel for any number of rows; fp8 activations always.
    """

    few_rows = _FEW_ROWS        # more than these, and the product on a GPU may be the library's
    few_fp8_rows = _FEW_FP8_ROWS  # the same of fp8, on cards whose algorithms were not compared with our kernel
    compute_dtype: torch.dtype | None = None  # of activations and results on a CPU; None: the weight's, as loaded
    quantizable = True          # False: keeps its precision when a model is quantised (heads, routers, small gates)
    batch_invariant = False
    scale: nn.Parameter | None  # [out] float32 of an fp8 weight

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None
        self.quantization: str | None = None
        self.register_parameter("scale", None)
        self._product: Callable[[Linear, torch.Tensor], torch.Tensor] = Linear._plain
        self._packed: torch.Tensor | Fp16Weight | None = None
        self._threads = 1

    def finalize(self, *, keep_weight: bool = False) -> None:
        """After loading: choose the form, and drop the loaded weight where the form has its own (unless it is shared).

        Calling it again changes nothing.
        """
        if self.quantization == "fp8" and can_quantize(self):
            self._quantize()
        elif self.weight.is_cuda:
            aligned = self.in_features % _GEMV_ALIGN == 0 and self.weight.dtype in (torch.bfloat16, torch.float16)
            if aligned or self.batch_invariant:
                self._product = Linear._on_gpu
        elif self._packed is None:
            self._pack(keep_weight=keep_weight)

    def _pack(self, *, keep_weight: bool) -> None:
        """On a CPU: give the product a weight in a layout of its own, where there is one."""
        if self.compute_dtype == torch.float32:
            self._packed, product = Fp16Weight.pack(self.weight, self.bias), Linear._on_fp16_weight
        elif can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, _PACK_ROWS)
            product = Linear._on_packed
        if self._packed is None:
            return
        self._threads = torch.get_num_threads()
        self._product = product
        if not keep_weight:
            self.weight = nn.Parameter(torch.empty(0, dtype=self.weight.dtype), requires_grad=False)

    @property
    def packed_bytes(self) -> int:
        return 0 if self._packed is None else self._packed.nbytes

    def forward(self, x: Activations) -> torch.Tensor:
        if isinstance(x, QuantizedRows):
            if x.plain is not None and self._product is not Linear._on_fp8:
                return self._product(self, x.plain)
            return self._on_fp8_units(x)
        if isinstance(x, UnnormedRows):
            return self._in_vector_form(x)
        return self._product(self, x)

    def onto(self, residual: torch.Tensor, x: torch.Tensor | QuantizedRows) -> torch.Tensor | None:
        """The product on its way into the residual stream [T, out]: what is still to be added to `residual`, or None
        if that has been done, in place."""
        if isinstance(x, torch.Tensor) and self.in_vector_form(x.shape[0]):
            self._in_vector_form(x, residual=residual)
            return None
        return self(x)

    def in_order(self, x: Activations) -> tuple[torch.Tensor, bool]:
        """The product, and whether the kernel after it may read all that is older before it waits for the product."""
        if isinstance(x, QuantizedRows) or (isinstance(x, torch.Tensor) and not self.in_vector_form(x.shape[0])):
            return self(x), False
        return self._in_vector_form(x, in_order=True), True

    @property
    def vector_rows(self) -> int:
        """Up to so many rows the product is in vector form, and an fp8 weight multiplies activations as they are."""
        if self.batch_invariant:
            return 0
        return _VECTOR_ROWS if self.in_features * self.out_features <= _SMALL_WEIGHT else 1

    def wants_fp8(self, rows: int) -> bool:
        """Whether a product of so many rows reads fp8 activations: who makes them can do so in passing."""
        return rows > self.vector_rows and self._product is Linear._on_fp8

    def in_vector_form(self, rows: int) -> bool:
        """Whether a product of so many rows runs on our kernel for a few vectors, which can also do what stands around
        it: norm, gate, residual."""
        return rows <= self.vector_rows and self._product in (Linear._on_gpu, Linear._on_fp8, Linear._on_fp8_weight)

    @property
    def by_library(self) -> autotune.Weight | None:
        """The weight, if products of many rows are the library's, by an algorithm that may be chosen."""
        if self.batch_invariant or self.bias is not None or self._product not in (Linear._on_gpu, Linear._on_fp8):
            return None
        return autotune.Weight(self.weight, self.scale)

    def _in_vector_form(self, x: torch.Tensor | UnnormedRows, **around: Any) -> torch.Tensor:
        from engine.kernels.gemm.small_batch import gemv

        if isinstance(x, UnnormedRows):
            around |= {"norm": (x.weight, x.eps), "wide_offset": x.offset}
            x = x.values
        return gemv(x, self.weight, self.scale, self.bias, **around)

    def _on_fp8_units(self, x: QuantizedRows) -> torch.Tensor:
        if self.batch_invariant:
            from engine.kernels.gemm import batch_invariant as gemm_batch_invariant

            assert self.scale is not None
            scales = x.scale, self.scale
            return gemm_batch_invariant.product(x.values, self.weight, self.bias, scales=scales, dtype=x.dtype)
        product = autotune.chosen(x.values, self.weight, x.dtype) if self.bias is None else None
        if product is not None:
            assert self.scale is not None
            return product(x.values, self.weight, (x.scale, self.scale))
        most = _FEW_FP8_ROWS if self.out_features < _MANY_OUTPUTS else _FEW_FP8_ROWS // 2
        if x.values.shape[0] <= most and self.out_features >= _SOME_OUTPUTS:
            from engine.kernels.gemm.small_batch import few_rows

            return few_rows(x.values, self.weight, self.bias, x_scale=x.scale, scale=self.scale, dtype=x.dtype)
        return scaled.multiply(x.values, self._weight_t, x.scale, self._scale_row, self.bias, x.dtype)

    def _quantize(self) -> None:
        if self.weight.dtype == FP8:
            return
        dtype = self.weight.dtype
        weight, scale = quantize_weight(self.weight)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self._weight_t, self._scale_row = weight.t(), scale.unsqueeze(0)
        if not weight.is_cuda:
            self._product = Linear._on_fp8_reference
        elif scaled.has_fp8_units(weight.device):
            scaled.refusal(dtype)  # found out now: not in a step, nor while a graph is recorded
            self._product = Linear._on_fp8
        else:
            self._product = Linear._on_fp8_weight

    # The forms. Each is called as self._product(self, x).

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def _on_packed(self, x: torch.Tensor) -> torch.Tensor:
        # A single row would take a kernel of its own that sums in another order; from two rows on, a row's result
        # does not depend on how many there are. Doubled, it is the same alone and in a batch.
        rows = x if x.shape[0] > 1 else torch.cat((x, x))
        with num_threads(self._threads):  # the rest of a small step runs on one
            y = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return y[: x.shape[0]]

    def _on_fp16_weight(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self._packed, Fp16Weight)
        with num_threads(self._threads):
            return self._packed(x)

    def _on_gpu(self, x: torch.Tensor) -> torch.Tensor:
        if self.batch_invariant:
            from engine.kernels.gemm import batch_invariant as gemm_batch_invariant

            return gemm_batch_invariant.product(x, self.weight, self.bias)
        if x.shape[0] <= self.vector_rows:
            return self._in_vector_form(x)
        if x.shape[0] > _FEW_ROWS or self.out_features < _SOME_OUTPUTS:
            product = autotune.chosen(x, self.weight) if self.bias is None else None
            return F.linear(x, self.weight, self.bias) if product is None else product(x, self.weight)
        from engine.kernels.gemm.small_batch import few_rows

        return few_rows(x, self.weight, self.bias)

    def _on_fp8(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= self.vector_rows:
            return self._in_vector_form(x)
        from engine.kernels.gemm.quantize import quantize_rows

        return self._on_fp8_units(QuantizedRows(*quantize_rows(x), x.dtype))

    def _on_fp8_weight(self, x: torch.Tensor) -> torch.Tensor:
        """On GPUs without fp8 units: activations stay as they are."""
        if x.shape[0] <= self.vector_rows:
            return self._in_vector_form(x)
        from engine.kernels.gemm.triton_scaled import scaled_product

        assert self.scale is not None
        return scaled_product(x, self.weight, self.scale, self.bias)

    def _on_fp8_reference(self, x: torch.Tensor) -> torch.Tensor:
        """What the form above computes, in plain torch."""
        assert self.scale is not None
        if x.shape[0] > self.vector_rows:
            x = dequantize(*quantize_rows(x), x.dtype)
        return F.linear(x, dequantize(self.weight, self.scale, x.dtype), self.bias)


class MergedLinear(Linear):
    """Several products with the same input as one: their weights stand below each other (QKV; gate and up)."""

    def __init__(self, in_features: int, out_sizes: list[int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(out_sizes), bias=bias)
        self.out_sizes = out_sizes

    def part(self, index: int, kind: str = "weight") -> torch.Tensor:
        """The slice of the weight (or bias) that belongs to output `index`; a view to load into."""
        start = sum(self.out_sizes[:index])
        return getattr(self, kind)[start : start + self.out_sizes[index]]


class _Sides(Protocol):
    in_features: int
    out_features: int


def can_quantize(linear: _Sides) -> bool:
    """The fp8 units take matrices whose sides are multiples of 16; others keep their precision."""
    return linear.in_features % 16 == 0 and linear.out_features % 16 == 0


def can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
