"""Linear layers, and several of them with the same input fused into one."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from engine.kernels.gemm.trials import Weight
from engine.layers.gemm_inputs import Activations, QuantizedRows, UnnormedRows
from engine.layers.quant.base import Gemm, LinearMethod, Tensors, plain_weight
from engine.layers.quant.unquantized import PLAIN, UNQUANTIZED
from engine.layers.weight_memory import empty_parameter

_VECTOR_ROWS = 4  # the most rows of gemm.small_batch.gemv
# Elements of a weight. Above this, tensor cores win from the second row on (docs/performance/constants.md). The dense
# MLP of 26B-A4B must stay below (11.9 million), because it shares kernels with the experts.
_SMALL_WEIGHT = 12_500_000


class Linear(nn.Module):
    """y = x Wᵀ + b;  x [T, in], W [out, in]. Its format, `method`, stores W and chooses the GEMM after loading."""

    quantizable = True          # False: not quantised with the rest of the model (heads, routers, small gates)
    compute_dtype: torch.dtype | None = None  # set before loading: of activations on a CPU. None: the weight's dtype
    batch_invariant = False     # set before loading: one kernel for any number of rows (GPU)
    fp8_activations = True      # set before loading: many rows may be rounded to fp8 for packed weights (GPU)
    weight: nn.Parameter
    scale: nn.Parameter | None  # the scale of a quantised weight, if its format has one
    weight_t: torch.Tensor
    scale_row: torch.Tensor

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.bias = empty_parameter(out_features) if bias else None
        self.gemm: Gemm = PLAIN
        self.packed: Any = None
        self.few_rows: Any = None
        self.threads = 1
        self.use(UNQUANTIZED.linear)

    def use(self, method: LinearMethod) -> None:
        """Before loading: store the weight in this format."""
        self.method = method
        self.register_parameter("scale", None)
        method.create(self)

    def weights(self, prefix: str, outputs: slice = slice(None)) -> Tensors:
        """The tensors to fill, by their names in the checkpoint, in this layer's format: `{prefix}weight` and so on."""
        return {f"{prefix}{name}": tensor for name, tensor in self.method.tensors(self, outputs).items()}

    def finalize(self, *, keep_weight: bool = False) -> None:
        """After loading: convert the weight and choose the GEMM. Idempotent."""
        self.method.finalize(self, keep_weight=keep_weight)

    @property
    def loaded_bytes(self) -> int:
        """GPU bytes of the weight after `finalize`. The memory plan asks before anything is loaded."""
        return self.method.num_bytes(self)

    @property
    def packed_bytes(self) -> int:
        return sum(form.nbytes for form in (self.packed, self.few_rows) if form is not None)

    def forward(self, x: Activations) -> torch.Tensor:
        if isinstance(x, QuantizedRows):
            run_fp8 = self.gemm.run_fp8
            if run_fp8 is not None:
                return run_fp8(self, x)
            assert x.plain is not None, "this layer's GEMM reads no fp8 activations"
            return self.gemm.run(self, x.plain)
        if isinstance(x, UnnormedRows):
            return self._vector_gemm(x)
        return self.gemm.run(self, x)

    def onto(self, residual: torch.Tensor, x: torch.Tensor | QuantizedRows) -> torch.Tensor | None:
        """Add the result [T, out] to `residual` in place and return None if the kernel can do that; else return the
        result, which the caller must add."""
        if isinstance(x, torch.Tensor) and self.in_vector_form(x.shape[0]):
            self._vector_gemm(x, residual=residual)
            return None
        if (fused := self.gemm.fused_fp8) is not None:
            if isinstance(x, torch.Tensor) and self.wants_fp8(x.shape[0]):
                x = QuantizedRows.of(x)
            if isinstance(x, QuantizedRows) and fused(self, x, residual=residual) is not None:
                return None
        return self(x)

    def in_order(self, x: Activations) -> tuple[torch.Tensor, bool]:
        """The result, and whether the next kernel may read older results before it waits for this one."""
        if isinstance(x, QuantizedRows) or (isinstance(x, torch.Tensor) and not self.in_vector_form(x.shape[0])):
            return self(x), False
        return self._vector_gemm(x, in_order=True), True

    @property
    def vector_rows(self) -> int:
        """The most rows that run in vector form, in which activations are not quantised even if weights are fp8."""
        if self.batch_invariant:
            return 0
        if self.gemm.gemv_rows is not None:
            return self.gemm.gemv_rows
        return _VECTOR_ROWS if self.in_features * self.out_features <= _SMALL_WEIGHT else 1

    def wants_fp8(self, rows: int) -> bool:
        """Whether inputs of this many rows are read in fp8, so that the previous kernel may quantise them."""
        return self.gemm.run_fp8 is not None and rows > self.vector_rows

    def in_vector_form(self, rows: int) -> bool:
        """Whether this many rows run on the format's GEMV, which fuses the norm, gate or residual around it."""
        return self.gemm.gemv is not None and rows <= self.vector_rows

    @property
    def is_plain(self) -> bool:
        """Whether kernels can read `weight`: an element each, in fp8 with a scale for each output in `scale`."""
        return self.gemm.streamed is plain_weight

    def read_by_experts(self, rows: int) -> bool:
        """Whether the experts' kernel for this many rows (kernels/moe/decode.py) can read this weight, too."""
        return self.gemm.streamed is not None and rows <= self.vector_rows

    @property
    def streamed(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight and its scale, as that kernel reads them."""
        assert self.gemm.streamed is not None
        return self.gemm.streamed(self)

    @property
    def by_library(self) -> Weight | None:
        """The weight, if large batches use the library and its algorithm can be chosen; else None."""
        if self.batch_invariant or self.bias is not None or not self.gemm.library:
            return None
        return Weight(self.weight, self.scale)

    def _vector_gemm(self, x: torch.Tensor | UnnormedRows, **around: Any) -> torch.Tensor:
        if isinstance(x, UnnormedRows):
            around |= {"norm": (x.weight, x.eps), "wide_offset": x.offset}
            x = x.values
        assert self.gemm.gemv is not None
        return self.gemm.gemv(self, x, **around)


class MergedLinear(Linear):
    """Several layers with the same input, fused into one: their outputs are concatenated (QKV; gate and up)."""

    def __init__(self, in_features: int, out_sizes: list[int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(out_sizes), bias=bias)
        self.out_sizes = out_sizes

    def part_weights(self, prefix: str, names: Iterable[str]) -> Tensors:
        """Like `weights`, for checkpoints that store the layers separately: `{prefix}{name}.weight` and so on."""
        found, start = {}, 0
        for name, size in zip(names, self.out_sizes, strict=True):
            found |= self.weights(f"{prefix}{name}.", slice(start, start + size))
            start += size
        return found
