"""`--quantization int8 | int4 | int4-g32`: 16-bit weights become integers while they load; activations stay in 16 bits.

    int8       one scale for each output                    scale = max |row| / 127
    int4       one scale for each 128 numbers of a row      scale = -m / 8, m the number of largest size: it is exact
    int4-g32   one scale for each 32 numbers of a row

A row whose length 128 does not divide has groups of 64 or 32. int4 also tries each scale times 0.88, which cuts the
largest number off and leaves the others finer, and keeps what has the smaller squared error.

Error relative to the weights (root mean square), SmolLM2-135M and normal numbers alike: int8 0.8 %, int4 9.8 % (groups
of 128), int4-g32 8.3 %.

On a GPU the weights then are what published W8A16 and W4A16 checkpoints are (packed_gpu.py). On a CPU see
kernels/gemm/cpu_int8.py and cpu_integers.py. The output head: head.py.
"""

from collections.abc import Iterator

import torch
from torch import nn

from engine.kernels.gemm import cpu_int8
from engine.kernels.gemm.cpu_int8 import SplitInt8Weight
from engine.kernels.gemm.cpu_integers import Int4Weight, Int8Weight
from engine.kernels.gemm.packed.weight import Packed, pack_pairs
from engine.kernels.moe.tiles import groups_fit
from engine.layers.quant.base import ExpertLayer, LinearLayer, Sides
from engine.layers.quant.cpu_packed import use_on_cpu
from engine.layers.quant.integers import packed_bytes
from engine.layers.quant.packed_experts import stack
from engine.layers.quant.packed_gpu import use_packed
from engine.layers.quant.unquantized import Unquantized, UnquantizedExperts

_CPU_BLOCK = 1 << 18       # elements quantised at a time: float32 copies that stay in a core's cache
_GPU_BLOCK = 1 << 22       # ... that keep a GPU busy, and take little of its memory
_OUTPUTS = 64              # a multiple of this many: the blocks that a CPU's int4 kernel reads
_COPIED_GROUP = 128        # kernels/gemm/packed/block_library.py
_CUT = 0.88
_SMALLEST = 1e-12          # a group of zeros has a scale, too

OnCpu = SplitInt8Weight | Int8Weight | Int4Weight


class OnlineIntegers(Unquantized):
    converts = True

    def __init__(self, bits: int, group: int = 0) -> None:
        """`group`: 0 is one scale for each output."""
        self.bits, self.group = bits, group

    def supports(self, layer: Sides) -> bool:
        return layer.out_features % _OUTPUTS == 0 and layer.in_features % 32 == 0

    def finalize(self, layer: LinearLayer, *, keep_weight: bool) -> None:
        if layer.packed is not None:
            return
        weight = layer.weight.data
        if not weight.is_cuda:
            use_on_cpu(layer, on_cpu(weight, self.bits, self._group(layer), layer.bias), keep_weight=keep_weight)
            return
        use_packed(layer, [packed(weight, self.bits, self._group(layer))], None)
        if not keep_weight:
            layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    def num_bytes(self, layer: LinearLayer) -> int:
        return packed_bytes(self.bits, self._group(layer), layer.out_features, layer.in_features, 2, zero=False)

    def copy_bytes(self, layer: LinearLayer) -> int:
        sides = layer.out_features, layer.in_features
        wanted = self.bits == 4 and self._group(layer) == _COPIED_GROUP and not any(n % _COPIED_GROUP for n in sides)
        return sides[0] * sides[1] if wanted else 0

    def _group(self, layer: Sides) -> int:
        return group_of(self.group, layer.in_features)


class OnlineIntegerExperts(UnquantizedExperts):
    converts = True

    def __init__(self, bits: int, group: int = 0) -> None:
        self.bits, self.group = bits, group
        self.fused = bits == 8  # int4 has kernels of its own

    def supports(self, layer: Sides) -> bool:
        inner = layer.in_features
        fits = self.bits == 8 or groups_fit(group_of(self.group, inner), inner)
        return fits and layer.out_features % _OUTPUTS == 0 and inner % 32 == 0

    def finalize(self, layer: ExpertLayer) -> None:
        if layer.packed or layer.scale is not None:
            return
        group, weight = group_of(self.group, layer.in_features), layer.weight.data
        if weight.is_cuda:
            whole = packed(weight.view(-1, layer.in_features), self.bits, group)
            stack(layer, [whole], "rows" if self.bits == 8 else "int4")
            return
        layer.packed = [on_cpu(each, self.bits, group) for each in weight]
        layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    def apply(self, layer: ExpertLayer, x: torch.Tensor, expert: int, *, quantize: bool) -> torch.Tensor:
        return layer.packed[expert](x)

    def num_bytes(self, layer: ExpertLayer) -> int:
        outputs, inner = layer.num_experts * layer.out_features, layer.in_features
        scale_bytes = 4 if self.bits == 8 else 2
        return packed_bytes(self.bits, group_of(self.group, inner), outputs, inner, scale_bytes, zero=False)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def group_of(wanted: int, inner: int) -> int:
    """The group of rows of `inner` numbers: half as large until it fits. 0 wanted: the whole row."""
    while wanted and inner % wanted:
        wanted //= 2
    return wanted or inner


def packed(weight: torch.Tensor, bits: int, group: int) -> Packed:
    """[N, K] in the form that the GPU's kernels read."""
    q, scale = quantized(weight, bits, group)
    if bits == 8:
        return Packed("int8", group, q, scale)
    return Packed("int4", group, pack_pairs(q, group), scale)


def on_cpu(weight: torch.Tensor, bits: int, group: int, bias: torch.Tensor | None = None) -> OnCpu:
    q, scale = quantized(weight, bits, group)
    if bits == 4:
        return Int4Weight(q, scale, group, bias)
    kind = SplitInt8Weight if cpu_int8.supports(weight.shape[1]) else Int8Weight
    return kind((q ^ 0x80).view(torch.int8), scale.flatten(), bias)


def quantized(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scale): uint8 [N, K], 2^(bits - 1) stands for zero, and bfloat16 [N, K / group]."""
    rows, inner = weight.shape
    q = torch.empty(rows, inner, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(rows, inner // group, dtype=torch.bfloat16, device=weight.device)
    for part in row_blocks(weight):
        groups = weight[part].float().view(-1, group)
        numbers, steps = _int8(groups) if bits == 8 else _int4(groups)
        q[part] = numbers.add_(1 << (bits - 1)).view(-1, inner)  # type: ignore[assignment]
        scale[part] = steps.view(-1, inner // group)  # type: ignore[assignment]
    return q, scale


def _int8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _rounded(groups.abs().amax(1, keepdim=True).div_(127))
    return (groups / scale).round_().clamp_(-127, 127), scale


def _int4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    whole = torch.where(low.abs() > high, low, high).div_(-8)
    scale, cut = _rounded(whole), _rounded(whole * _CUT)
    q, q_cut = ((groups / s).round_().clamp_(-8, 7) for s in (scale, cut))
    is_better = _error(groups, q_cut, cut) < _error(groups, q, scale)
    return torch.where(is_better, q_cut, q), torch.where(is_better, cut, scale)


def _rounded(scale: torch.Tensor) -> torch.Tensor:
    """As bfloat16 stores it, so that numbers are rounded with the scale that multiplies them later."""
    return torch.where(scale == 0, _SMALLEST, scale).bfloat16().float()


def _error(groups: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(groups, q, scale, value=-1).square_().sum(1, keepdim=True)


def row_blocks(weight: torch.Tensor) -> Iterator[slice]:
    rows, inner = weight.shape
    step = max(1, (_CPU_BLOCK if weight.device.type == "cpu" else _GPU_BLOCK) // inner)
    for at in range(0, rows, step):
        yield slice(at, min(at + step, rows))
