"""What a weight format decides for a layer.

    create    make the layer's parameters as a checkpoint stores them, without memory (on the `meta` device)
    tensors   name in the checkpoint -> the parameter, or the slice of it, that the loader fills
    finalize  after loading: convert the weights to their final form, and choose the GEMM

A `Format` has a method for linear layers and one for stacks of experts. `FORMATS` (__init__.py) names those that an
operator may choose with --quantization. Methods hold no tensors: the tensors live in the layer.

stored.py serves checkpoints that are quantised already: it reads packed weights and scales as they are on disk. fp8.py
reads 16-bit weights, and converts them in `finalize`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from engine.layers.gemm_inputs import QuantizedRows

Tensors = dict[str, torch.Tensor]
Inputs = Literal["fp8", "int8"] | None


class Sides(Protocol):
    in_features: int
    out_features: int


class Gemm(NamedTuple):
    """One way to compute x Wᵀ + b. `finalize` picks one for each layer."""

    run: Callable[[Any, torch.Tensor], torch.Tensor]  # (layer, x [T, in]) -> [T, out]
    run_fp8: Callable[[Any, QuantizedRows], torch.Tensor] | None = None  # set where many rows are read in fp8
    # As `run_fp8`, fused with what follows: `gate`, an activation, or `residual`, to which the result is added in
    # place. (layer, x, **...) -> the result, or None where separate kernels are faster.
    fused_fp8: Callable[..., torch.Tensor | None] | None = None
    gemv: Callable[..., torch.Tensor] | None = None  # a few rows, fused with norm, gate and residual: (layer, x, **...)
    gemv_rows: int | None = None  # the most of them; None: as the weight's size says
    # The weight and its scale, where the experts' kernels for a few rows (kernels/moe/decode.py) can read them, too.
    streamed: Callable[[Any], tuple[torch.Tensor, torch.Tensor | None]] | None = None
    library: bool = False  # many rows run on the GPU's library, whose algorithm gemm.autotune may choose


def plain_gemv(layer: "LinearLayer", x: torch.Tensor, **around: Any) -> torch.Tensor:
    """A few rows with a weight of one number an element, and a scale for each output if it is fp8."""
    from engine.kernels.gemm.small_batch import gemv

    return gemv(x, layer.weight, layer.scale, layer.bias, **around)


def plain_weight(layer: "LinearLayer") -> tuple[torch.Tensor, torch.Tensor | None]:
    return layer.weight, layer.scale


class LinearLayer(Sides, Protocol):
    """What a method reads and sets of a layer (engine/layers/linear.py)."""

    weight: nn.Parameter
    scale: nn.Parameter | None
    bias: nn.Parameter | None
    gemm: Gemm
    packed: Any       # the weight in the CPU library's own layout; replaces `weight`
    few_rows: Any     # of a CPU: a copy of the weight for few rows, or None (cpu_few_rows.py)
    threads: int      # of a CPU GEMM
    weight_t: torch.Tensor   # views of an fp8 weight and its scale, as the library takes them
    scale_row: torch.Tensor
    compute_dtype: torch.dtype | None
    batch_invariant: bool

    @property
    def vector_rows(self) -> int: ...


class LinearMethod(ABC):
    """A format of linear layers."""

    converts = False  # `finalize` replaces the loaded tensors: the loader may free their memory

    def supports(self, layer: Sides) -> bool:
        """Whether the format can hold a weight of this shape. Others keep their precision."""
        return True

    @abstractmethod
    def create(self, layer: LinearLayer) -> None: ...

    @abstractmethod
    def tensors(self, layer: LinearLayer, outputs: slice) -> Tensors:
        """The tensors to fill for these outputs of the layer, by the last part of their checkpoint names ("weight",
        ...)."""

    @abstractmethod
    def reorder(self, layer: LinearLayer, index: torch.Tensor) -> None:
        """After loading, before `finalize`: output i becomes what output index[i] was."""

    @abstractmethod
    def finalize(self, layer: LinearLayer, *, keep_weight: bool) -> None:
        """Idempotent. `keep_weight`: another module shares the weight as it was loaded."""

    def num_bytes(self, layer: LinearLayer) -> int:
        """GPU bytes of the weight and its scales after `finalize`. The memory plan asks before anything is loaded."""
        return layer.weight.nbytes

    def copy_bytes(self, layer: LinearLayer) -> int:
        """GPU bytes of a second copy of the weight, with which some steps multiply where memory allows it."""
        return 0


class ExpertLayer(Sides, Protocol):
    """As LinearLayer, of a stack of experts (engine/layers/moe.py)."""

    num_experts: int
    weight: nn.Parameter
    scale: nn.Parameter | None
    zero: nn.Parameter | None
    factor: nn.Parameter | None
    packed: list[Any]
    compute_dtype: torch.dtype | None


class ExpertMethod(ABC):
    """A format of the stacked weights [E, out, in] of a layer's experts."""

    converts = False
    inputs: Inputs = None  # what the checkpoint wants activations rounded to
    fused = False  # the kernels of moe/ read `weight` and `scale` as they are after `finalize`

    def supports(self, layer: Sides) -> bool:
        return True

    @abstractmethod
    def create(self, layer: ExpertLayer) -> None: ...

    @abstractmethod
    def tensors(self, layer: ExpertLayer, expert: int | slice, outputs: slice) -> Tensors:
        """As LinearMethod.tensors, of one expert or of a range of them."""

    @abstractmethod
    def finalize(self, layer: ExpertLayer) -> None: ...

    @abstractmethod
    def apply(self, layer: ExpertLayer, x: torch.Tensor, expert: int, *, quantize: bool) -> torch.Tensor:
        """On a CPU: one expert's GEMM, x [n, in] -> [n, out]. `quantize`: an fp8 weight meets fp8 activations."""

    def num_bytes(self, layer: ExpertLayer) -> int:
        return layer.weight.nbytes


class Format(NamedTuple):
    linear: LinearMethod
    experts: ExpertMethod
    head: LinearMethod | None = None  # of the output head; None: it keeps 16 bits
