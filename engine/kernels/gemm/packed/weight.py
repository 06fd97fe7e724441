"""Weights that stay packed in memory: a few bits a number, and a scale for each group of numbers in a row.

    W[n, k] = (q[n, k] - zero[n, k / group]) * scale[n, k / group]

On every device, the difference and the product are computed in float32 and rounded once, to the dtype of the
activations. Where fp4 has a factor for a whole row, products of few rows apply it to the sum instead, and round
nothing. Every checkpoint format (engine/layers/quant/) is read into this one form, so that the kernels beside this
file serve them all.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

Kind = Literal["int4", "int8", "fp4", "fp8"]

_CHUNK_ELEMENTS = 16 << 20
_FARTHEST = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDDLE = {"int4": 8, "int8": 128}  # the code that stands for zero in a symmetric format


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [N, K].

    values   int4, fp4: uint8 [N, K / 2], two columns of a group in a byte (`pack_pairs`)
             int8: uint8 [N, K], 128 stands for zero;   fp8: e4m3 [N, K]
    scale    float [N, groups]; of fp4 mostly in a byte: e4m3 or, as uint8, a power of two (pointwise/e2m1.py)
    factor   float32 [N]: it multiplies the scales of a row or, if `divides`, divides them
    zero     uint8 [N, groups] in an asymmetric integer format
    columns  int64 [K]: column k multiplies x[columns[k]]; for formats that reorder columns
    block    so many rows, one after another, have the same scales
    """

    kind: Kind
    group: int
    values: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    block: int = 1
    factor: torch.Tensor | None = None
    divides: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.values.shape
        return rows, width * (2 if self.kind in ("int4", "fp4") else 1)

    @property
    def nbytes(self) -> int:
        tensors = self.values, self.scale, self.zero, self.columns, self.factor
        return sum(t.nbytes for t in tensors if t is not None)

    def rows(self, index: torch.Tensor) -> "Packed":
        """The rows with these indices, in this order."""
        zero, factor = (None if t is None else t[index] for t in (self.zero, self.factor))
        values, scale = _rows_of(self.values, index), _rows_of(self.scale, index)
        block = self.block if _keeps_blocks(index, self.block) else 1
        return replace(self, values=values, scale=scale, zero=zero, block=block, factor=factor)

    def joins(self, other: "Packed") -> bool:
        """Whether one kernel can multiply both as one weight."""
        ours, theirs = ((p.kind, p.group, p.scale.dtype, p.factor is None, p.divides) for p in (self, other))
        if ours != theirs or (self.columns is None) != (other.columns is None):
            return False
        return self.columns is None or (other.columns is not None and torch.equal(self.columns, other.columns))


def joined(parts: list[Packed]) -> list[Packed]:
    """Join neighbours that can be multiplied as one weight, one above the other. If only some of them have a zero
    point, the others get one."""
    found: list[list[Packed]] = []
    for part in parts:
        if found and found[-1][0].joins(part):
            found[-1].append(part)
        else:
            found.append([part])
    return [_above_one_another(each) for each in found]


def _above_one_another(parts: list[Packed]) -> Packed:
    first = parts[0]
    zeros = None
    if any(part.zero is not None for part in parts):
        middle = MIDDLE[first.kind]
        zeros = torch.cat([
            torch.full(part.scale.shape, middle, dtype=torch.uint8, device=part.scale.device)
            if part.zero is None else part.zero for part in parts
        ])  # fmt: skip
    values, scale = joined_tensors([part.values for part in parts]), joined_tensors([part.scale for part in parts])
    factors = [part.factor for part in parts if part.factor is not None]
    block = min(part.block for part in parts)
    if any(part.block % block or part.shape[0] % block for part in parts):
        block = 1
    factor = torch.cat(factors) if factors else None
    return replace(first, values=values, scale=scale, zero=zeros, block=block, factor=factor)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Not every operation takes fp8."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _keeps_blocks(index: torch.Tensor, block: int) -> bool:
    """Whether rows of a block stay together, in their order, as where the heads of q and of its gate are sorted."""
    if len(index) % block:
        return False
    blocks = index.view(-1, block)
    first, within = blocks[:, :1], torch.arange(block, device=index.device)
    return bool(((first % block == 0) & (blocks == first + within)).all())


def _rows_of(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return _as_bytes(tensor)[index].view(tensor.dtype)


def joined_tensors(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([_as_bytes(tensor) for tensor in tensors]).view(tensors[0].dtype)


def pair_distance(group: int) -> int:
    """The distance between the two columns of a byte: as many columns as a kernel reads contiguously, of x and of W,
    but few enough that both belong to one group."""
    distance = _FARTHEST
    while group % (2 * distance):
        distance //= 2
    return distance


def pack_pairs(codes: torch.Tensor, group: int) -> torch.Tensor:
    """uint8 codes below 16 [N, K] -> two in a byte [N, K / 2]: column k in the low half, k + `pair_distance` in the
    other."""
    low, high = codes.unflatten(1, (-1, 2, pair_distance(group))).unbind(2)
    return (low | (high << 4)).flatten(1)


def unpack_pairs(values: torch.Tensor, group: int) -> torch.Tensor:
    """The inverse of `pack_pairs`."""
    apart = values.unflatten(1, (-1, pair_distance(group)))
    return torch.stack((apart & 15, apart >> 4), 2).flatten(1)


def dequantize(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """[N, K] in `dtype`, columns in the order of the activations."""
    rows, inner = packed.shape
    weight = torch.empty(rows, inner, dtype=dtype, device=packed.values.device)
    step = max(1, _CHUNK_ELEMENTS // inner)
    for at in range(0, rows, step):
        weight[at : at + step] = _numbers(packed, slice(at, at + step), inner)
    if packed.columns is not None:
        weight[:, packed.columns] = weight.clone()
    return weight


def _numbers(packed: Packed, rows: slice, inner: int) -> torch.Tensor:
    values = packed.values[rows]
    if packed.kind == "fp8":
        numbers = values.float()
    elif packed.kind == "fp4":
        codes = unpack_pairs(values, packed.group)
        table = torch.tensor((*_E2M1, *(-x for x in _E2M1)), device=values.device)
        numbers = table[codes.int()]
    else:
        numbers = (unpack_pairs(values, packed.group) if packed.kind == "int4" else values).float()
        zero = MIDDLE[packed.kind] if packed.zero is None else _spread(packed.zero[rows], packed.group, inner)
        numbers = numbers - zero
    return numbers * _spread(_scales(packed, rows), packed.group, inner)


def _scales(packed: Packed, rows: slice) -> torch.Tensor:
    scale = packed.scale[rows]
    if scale.dtype == torch.uint8:
        return torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - 127)
    if packed.factor is None:
        return scale.float()
    factor = packed.factor[rows, None]
    return scale.float() / factor if packed.divides else scale.float() * factor


def _spread(of_groups: torch.Tensor, group: int, inner: int) -> torch.Tensor:
    """[N, groups] -> float32 [N, K] or, with one group, [N, 1]."""
    wide = of_groups.float()
    return wide if of_groups.shape[1] == 1 else wide.repeat_interleave(group, 1)[:, :inner]
