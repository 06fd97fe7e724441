"""Layers whose weights are quantised in the checkpoint.

A `StoredFormat` (float8.py, float4.py, integers.py, gptq.py, awq.py) says how one matrix is stored: the names, types
and shapes of its tensors, and how to read them into the packed form (kernels/gemm/packed/weight.py). The methods here
create the tensors that the loader fills, and join the matrices of a layer: a fused layer has several (q, k and v), each
of which may have a format of its own, or none.

On a GPU the weights stay packed (packed_gpu.py). On a CPU that multiplies bytes, int8 with one scale for each output
stays int8. All others are dequantised to the model's dtype there, and unquantized.py chooses the library that
multiplies them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.errors import ModelError
from engine.kernels.gemm import cpu_int8
from engine.kernels.gemm.cpu_int8 import RoundedInt8Weight, SplitInt8Weight
from engine.kernels.gemm.packed.weight import MIDDLE, Packed, dequantize, joined
from engine.kernels.moe.tiles import SCALE_BLOCK, Form
from engine.layers.quant import fp8
from engine.layers.quant.base import ExpertLayer, ExpertMethod, LinearLayer, LinearMethod, Tensors
from engine.layers.quant.cpu_packed import use_on_cpu
from engine.layers.quant.packed_experts import stack
from engine.layers.quant.packed_gpu import use_packed
from engine.layers.quant.rounded_inputs import Inputs, round_rows, rounding_inputs
from engine.layers.quant.unquantized import UNQUANTIZED
from engine.layers.weight_memory import empty_parameter, for_good
from engine.message import msg


class Spec(NamedTuple):
    """One tensor of a matrix in the checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]


Found = Mapping[str, Spec]  # the tensors that a checkpoint has of a matrix; empty where no checkpoint is at hand


def scale_spec(found: Found, name: str, *shape: int, default: torch.dtype = torch.float32) -> Spec:
    """A scale is read as it is stored: no rounding. In a 16-bit checkpoint it is mostly stored in 16 bits."""
    dtype = found[name].dtype if name in found and found[name].dtype.is_floating_point else default
    return Spec(dtype, shape)


def scalar_spec(found: Found, name: str) -> Spec:
    """One number, stored without dimensions or with one."""
    shape = found[name].shape if name in found and found[name].shape in ((), (1,)) else (1,)
    return scale_spec(found, name, *shape)


def check_scale(name: str, tensor: str, scale: torch.Tensor) -> torch.Tensor:
    """Raises ModelError if some of it is no number. Returns it."""
    if (scale.isinf() | scale.isnan()).any():  # asked so, a tensor without content passes (prebuild/without_gpu.py)
        raise bad_values(name, tensor, msg("it holds infinite values or NaN"))
    return scale


class StoredFormat(ABC):
    """How a matrix [out, in] is stored. Immutable; compares by value."""

    inputs: Inputs
    main: str  # the last part of the name of the tensor with the weight itself
    adds_biases = False  # whether writers give layers without a bias one of zeros

    @property
    def has_zeros(self) -> bool:
        """Whether the packed form has zero points."""
        return False

    def dummy_zero_word(self) -> int:
        """For random weights: a word of packed zero points, as four equal bytes that the format allows."""
        return 0x77777777

    @abstractmethod
    def specs(self, out: int, inner: int, found: Found) -> dict[str, Spec]:
        """The tensors to read, by the last part of their names."""

    @abstractmethod
    def refusal(self, out: int, inner: int) -> str | None:
        """Why a matrix of these sides cannot be stored so, or None."""

    @abstractmethod
    def read(self, stored: Mapping[str, torch.Tensor], name: str) -> Packed:
        """Raises ModelError that names the tensor whose values are impossible."""

    @abstractmethod
    def num_bytes(self, out: int, inner: int, found: Found) -> int:
        """Of the packed form."""

    def is_fp8_per_row(self, out: int, inner: int) -> bool:
        """Whether such a matrix is e4m3 with one scale for each output, as `--quantization fp8` makes it."""
        return False

    def stacks_as(self, out: int, inner: int, found: Found) -> Form | None:
        """The form in which experts of this format stay quantised on a GPU (packed_experts.py)."""
        return "rows" if self.is_fp8_per_row(out, inner) else None


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix of a layer: its name in the checkpoint, and the rows that it fills."""

    name: str
    start: int    # of a stack of experts: counted through all of them
    count: int
    format: StoredFormat | None  # None: not quantised
    found: Found
    has_zero_bias: bool = False  # in the checkpoint, and not in the architecture


def bad_values(name: str, tensor: str, problem: str) -> ModelError:
    return ModelError(
        msg("Tensor {name} is wrong: {problem}.", name=f"{name}.{tensor}", problem=problem),
        msg("Copy the model again, or use another quantisation of it."),
    )


class _Parts:
    """The tensors of a layer's matrices, as parameters of the layer."""

    def __init__(self, parts: Sequence[Part], inner: int, dtype: torch.dtype) -> None:
        self.parts = sorted(parts, key=lambda part: part.start)
        self.inner = inner
        self.dtype = dtype  # of the model: of weights that are not quantised, or no longer
        self._of_start = {part.start: i for i, part in enumerate(self.parts)}

    def create(self, layer: nn.Module) -> None:
        for i, part in enumerate(self.parts):
            for name, spec in self._specs(part).items():
                layer.register_parameter(f"part{i}_{name}", empty_parameter(*spec.shape, dtype=spec.dtype))

    def tensors(self, layer: nn.Module, start: int) -> Tensors:
        i = self._of_start[start]
        return {name: layer._parameters[f"part{i}_{name}"] for name in self._specs(self.parts[i])}  # type: ignore[misc]

    def take(self, layer: nn.Module) -> list[Packed | torch.Tensor]:
        """Read every matrix, and give up what it was stored in."""
        result: list[Packed | torch.Tensor] = []
        for i, part in enumerate(self.parts):
            stored = {name: layer._parameters.pop(f"part{i}_{name}") for name in self._specs(part)}
            tensors = {name: p.data for name, p in stored.items() if p is not None}
            if part.has_zero_bias and tensors.pop("bias").any():
                raise bad_values(part.name, "bias", msg("this architecture has no bias here, and it is not zero"))
            result.append(tensors["weight"] if part.format is None else part.format.read(tensors, part.name))
        return result

    def _specs(self, part: Part) -> dict[str, Spec]:
        if part.format is None:
            return {"weight": Spec(self.dtype, (part.count, self.inner))}
        specs = part.format.specs(part.count, self.inner, part.found)
        return specs | {"bias": Spec(part.found["bias"].dtype, (part.count,))} if part.has_zero_bias else specs

    @property
    def inputs(self) -> Inputs:
        kinds: set[Inputs] = {None if part.format is None else part.format.inputs for part in self.parts}
        return kinds.pop() if len(kinds) == 1 else None

    @property
    def is_fp8_per_row(self) -> bool:
        return all(p.format is not None and p.format.is_fp8_per_row(p.count, self.inner) for p in self.parts)

    @property
    def form(self) -> Form | None:
        """That of all matrices, as experts."""
        forms: set[tuple[Form | None, bool, type | None]] = {  # zero points: all have them, or none
            (None, False, None) if (f := p.format) is None
            else (f.stacks_as(p.count, self.inner, p.found), f.has_zeros, type(f))
            for p in self.parts
        }
        return forms.pop()[0] if len(forms) == 1 else None

    def num_bytes(self) -> int:
        total = 0
        for part in self.parts:
            if part.format is None:
                total += part.count * self.inner * self.dtype.itemsize
            else:
                total += part.format.num_bytes(part.count, self.inner, part.found)
        return total


class StoredLinear(LinearMethod):
    """A linear layer whose matrices are quantised in the checkpoint."""

    converts = True

    def __init__(self, parts: Sequence[Part], inner: int, dtype: torch.dtype) -> None:
        self._parts = _Parts(parts, inner, dtype)

    def create(self, layer: Any) -> None:
        layer.weight = empty_parameter(0, dtype=self._parts.dtype)
        layer.order = None
        self._parts.create(layer)

    def tensors(self, layer: Any, outputs: slice) -> Tensors:
        found = self._parts.tensors(layer, outputs.start or 0)
        return found if layer.bias is None else {**found, "bias": layer.bias[outputs]}

    def reorder(self, layer: Any, index: torch.Tensor) -> None:
        layer.order = index

    def finalize(self, layer: Any, *, keep_weight: bool) -> None:
        if not any(name.startswith("part") for name in layer._parameters):
            return
        on_gpu = layer.weight.is_cuda
        matrices = self._parts.take(layer)
        if on_gpu and self._parts.is_fp8_per_row:
            _use_fp8(layer, matrices)
        elif on_gpu:
            use_packed(layer, matrices, self._parts.inputs)
        elif (in_bytes := self._in_bytes(layer, matrices)) is not None:
            use_on_cpu(layer, in_bytes, keep_weight=keep_weight)
        else:
            weight = _plain(matrices, self._parts.dtype)
            if layer.order is not None:
                weight = weight[layer.order]
            layer.weight = nn.Parameter(weight, requires_grad=False)
            UNQUANTIZED.linear.finalize(layer, keep_weight=keep_weight)
            layer.gemm = rounding_inputs(layer.gemm, self._parts.inputs)
        layer.order = None

    def _in_bytes(self, layer: Any, matrices: Sequence[Packed | torch.Tensor]) -> SplitInt8Weight | None:
        """The weight as a CPU multiplies it in bytes. float32 models get float32 sums instead."""
        inputs, inner = self._parts.inputs, layer.in_features
        fitting = [m for m in matrices if isinstance(m, Packed) and m.kind == "int8" and m.group == inner
                   and m.zero is None and m.columns is None]  # fmt: skip
        if len(fitting) < len(matrices) or inputs == "fp8" or self._parts.dtype == torch.float32:
            return None
        if not cpu_int8.supports(inner):
            return None
        q, scale = torch.cat([m.values for m in fitting]), torch.cat([m.scale.flatten().float() for m in fitting])
        if layer.order is not None:
            q, scale = q[layer.order], scale[layer.order]
        kind = RoundedInt8Weight if inputs == "int8" else SplitInt8Weight
        return kind((q ^ MIDDLE["int8"]).view(torch.int8), scale, layer.bias)

    def num_bytes(self, layer: LinearLayer) -> int:
        return self._parts.num_bytes()

    @property
    def stays_fp8(self) -> bool:
        """Whether a GPU multiplies it as `--quantization fp8`."""
        return self._parts.is_fp8_per_row


def _plain(matrices: Sequence[Packed | torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([dequantize(m, dtype) if isinstance(m, Packed) else m for m in matrices])


def _use_fp8(layer: Any, matrices: Sequence[Packed | torch.Tensor]) -> None:
    with for_good():
        (whole,) = joined([m for m in matrices if isinstance(m, Packed)])
        if layer.order is not None:
            whole = whole.rows(layer.order)
        scale = whole.scale.float().flatten().contiguous()
    fp8.use_weight(layer, whole.values, scale, layer.weight.dtype)


class StoredExperts(ExpertMethod):
    """A stack of experts with a quantised matrix each (or two: gate and up).

    `form`: how they stay quantised on a GPU; None: they are dequantised while they load.
    """

    converts = True

    def __init__(self, parts: Sequence[Part], inner: int, dtype: torch.dtype) -> None:
        self._parts = _Parts(parts, inner, dtype)
        self.form: Form | None = self._parts.form  # None, too, if the experts' other product has another form

    def create(self, layer: Any) -> None:
        layer.weight = empty_parameter(0, dtype=self._parts.dtype)
        self._parts.create(layer)

    def tensors(self, layer: Any, expert: int | slice, outputs: slice) -> Tensors:
        if isinstance(expert, slice):
            raise ModelError(
                msg("The experts of this checkpoint are quantised and stacked in one tensor ({name}); Atoll reads "
                    "quantised experts with a matrix for each.", name=self._parts.parts[0].name))
        return self._parts.tensors(layer, expert * layer.out_features + (outputs.start or 0))

    def finalize(self, layer: Any) -> None:
        if not any(name.startswith("part") for name in layer._parameters):
            return
        on_gpu = layer.weight.is_cuda
        shape = layer.num_experts, layer.out_features, layer.in_features
        matrices = self._parts.take(layer)
        if on_gpu and self.form is not None:
            packed = [m for m in matrices if isinstance(m, Packed)]
            for part, matrix in zip(self._parts.parts, packed, strict=True):
                if matrix.columns is not None:
                    raise bad_values(part.name, "g_idx", msg("it reorders columns, and config.json says nothing of it"))
            stack(layer, packed, self.form)
            return
        with for_good():
            weight = torch.empty(shape, dtype=self._parts.dtype, device=layer.weight.device)
        rows = weight.view(-1, layer.in_features)
        for part, matrix in zip(self._parts.parts, matrices, strict=True):
            target = rows[part.start : part.start + part.count]
            target.copy_(dequantize(matrix, weight.dtype) if isinstance(matrix, Packed) else matrix)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        UNQUANTIZED.experts.finalize(layer)

    def apply(self, layer: ExpertLayer, x: torch.Tensor, expert: int, *, quantize: bool) -> torch.Tensor:
        return UNQUANTIZED.experts.apply(layer, round_rows(x, self._parts.inputs), expert, quantize=quantize)

    def num_bytes(self, layer: ExpertLayer) -> int:
        if self.form is not None:
            if self.form == "blocks":  # the packed form has a scale for each row of a block
                blocks = sum(-(-part.count // SCALE_BLOCK) for part in self._parts.parts)
                weights = layer.num_experts * layer.out_features * layer.in_features
                return weights + 4 * blocks * -(-layer.in_features // SCALE_BLOCK)
            if self.form == "rows":
                return layer.num_experts * layer.out_features * (layer.in_features + 4)
            return self._parts.num_bytes()
        return layer.num_experts * layer.out_features * layer.in_features * self._parts.dtype.itemsize

    @property
    def fused(self) -> bool:  # type: ignore[override]
        return self.form in (None, "rows", "blocks") and self.inputs != "int8"

    @property
    def inputs(self) -> Inputs:  # type: ignore[override]
        return self._parts.inputs

    @property
    def stays_fp8(self) -> bool:
        """Whether a GPU multiplies them as `--quantization fp8`."""
        return self.form == "rows" and self._parts.is_fp8_per_row
