"""Integer weights of compressed-tensors: packed into words, or as int8.

    pack-quantized   weight_packed      int32 [out, in * bits / 32]   q + 2^(bits-1), the first in the lowest bits
                     weight_scale       [out, groups]
                     weight_zero_point  int32 [out * bits / 32, groups], packed like the weight, but along the outputs
                     weight_shape       int64 [2]
                     weight_g_idx       int32 [in], the group of each column, where columns were ordered by importance

    int-quantized    weight             int8 [out, in]
                     weight_scale       [out, groups] or one number
                     weight_zero_point  int8, of the same shape

    W = (q - zero) * scale
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.kernels.gemm.packed.weight import Kind, Packed, pack_pairs
from engine.kernels.moe.tiles import Form, groups_fit
from engine.layers.quant.stored import (
    Found,
    Inputs,
    Spec,
    StoredFormat,
    bad_values,
    check_scale,
    scalar_spec,
    scale_spec,
)
from engine.message import msg

WORD = 32  # bits


def unpack_words(words: torch.Tensor, bits: int, shifts: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, C * 32 / bits]. `shifts`: of a word's numbers; by default the lowest bits first."""
    order = tuple(range(0, WORD, bits)) if shifts is None else shifts
    columns = [((words >> shift) & ((1 << bits) - 1)).to(torch.uint8) for shift in order]
    return torch.stack(columns, -1).flatten(1)


def as_packed(
    codes: torch.Tensor, bits: int, group: int, scale: torch.Tensor, zero: torch.Tensor | None,
    columns: torch.Tensor | None = None,
) -> Packed:  # fmt: skip
    """Codes uint8 [out, in] below 2^bits; a missing zero point is the middle one."""
    kind: Kind = "int8" if bits == 8 else "int4"
    middle = 1 << (bits - 1)
    if zero is None and bits < 4:
        zero = torch.full(scale.shape, middle, dtype=torch.uint8, device=scale.device)
    values = codes if bits == 8 else pack_pairs(codes, group)
    return Packed(kind, group, values, scale.contiguous(), None if zero is None else zero.contiguous(), columns)


def columns_of(g_idx: torch.Tensor, group: int, name: str, tensor: str) -> torch.Tensor | None:
    """From the group of each column: the order in which groups stand side by side; None if they do already. Some
    writers leave zeros where columns are in order."""
    if not g_idx.any():
        return None
    order = torch.argsort(g_idx, stable=True)
    expected = torch.arange(len(g_idx), device=g_idx.device) // group
    if not torch.equal(g_idx[order].long(), expected):
        raise bad_values(name, tensor, msg("it does not assign {group} columns to each group", group=group))
    return None if torch.equal(g_idx.long(), expected) else order


def sides_refusal(bits: int, group: int, out: int, inner: int, *, along: int) -> str | None:
    """`along`: the side along which weights are packed into words."""
    if along * bits % WORD:
        return msg("a side of {size}, which does not fill its words", size=along)
    if group != inner and (group < 16 or group % 16 or inner % group):
        return msg("groups of {group} in rows of {inner}", group=group, inner=inner)
    return None


def int4_form(bits: int, group: int, out: int, inner: int) -> Form | None:
    """That of experts whose columns are in order."""
    return "int4" if bits == 4 and out % 16 == 0 and groups_fit(group, inner) else None


@dataclass(frozen=True, slots=True)
class PackQuantized(StoredFormat):
    bits: int
    group: int          # 0: one scale for each output
    symmetric: bool
    inputs: Inputs = None
    main: str = "weight_packed"

    def specs(self, out: int, inner: int, found: Found) -> dict[str, Spec]:
        groups = inner // self._group(inner)
        specs = {
            "weight_packed": Spec(torch.int32, (out, inner * self.bits // WORD)),
            "weight_scale": scale_spec(found, "weight_scale", out, groups, default=torch.bfloat16),
        }
        if not self.symmetric:
            specs["weight_zero_point"] = Spec(torch.int32, (-(-out * self.bits // WORD), groups))
        if "weight_shape" in found:
            integer = found["weight_shape"].dtype
            specs["weight_shape"] = Spec(integer if integer == torch.int32 else torch.int64, (2,))
        if "weight_g_idx" in found:
            specs["weight_g_idx"] = Spec(torch.int32, (inner,))
        return specs

    def refusal(self, out: int, inner: int) -> str | None:
        return sides_refusal(self.bits, self._group(inner), out, inner, along=inner)

    def read(self, stored: Mapping[str, torch.Tensor], name: str) -> Packed:
        words = stored["weight_packed"]
        out, inner = words.shape[0], words.shape[1] * WORD // self.bits
        if "weight_shape" in stored and (shape := stored["weight_shape"].tolist()) != [out, inner]:
            raise bad_values(name, "weight_shape", msg("it says {shape}, and the weight is {actual}", shape=shape,
                                                       actual=[out, inner]))
        group = self._group(inner)
        zero = None
        if "weight_zero_point" in stored:
            zero = unpack_words(stored["weight_zero_point"].T, self.bits).T[:out]
        codes, columns = unpack_words(words, self.bits), None
        if "weight_g_idx" in stored:
            columns = columns_of(stored["weight_g_idx"], group, name, "weight_g_idx")
            codes = codes if columns is None else codes[:, columns]
        scale = check_scale(name, "weight_scale", stored["weight_scale"])
        return as_packed(codes, self.bits, group, scale, zero, columns)

    def num_bytes(self, out: int, inner: int, found: Found) -> int:
        itemsize = self.specs(out, inner, found)["weight_scale"].dtype.itemsize
        return packed_bytes(self.bits, self._group(inner), out, inner, itemsize, zero=not self.symmetric)

    @property
    def has_zeros(self) -> bool:
        return not self.symmetric

    def stacks_as(self, out: int, inner: int, found: Found) -> Form | None:
        if "weight_g_idx" in found or self.inputs is not None:
            return None
        return int4_form(self.bits, self._group(inner), out, inner)

    def _group(self, inner: int) -> int:
        return self.group or inner


def packed_bytes(bits: int, group: int, out: int, inner: int, scale_bytes: int, *, zero: bool) -> int:
    """Of what `as_packed` makes."""
    groups = inner // group
    zeros = out * groups if zero or bits < 4 else 0
    return out * inner // (1 if bits == 8 else 2) + out * groups * scale_bytes + zeros


@dataclass(frozen=True, slots=True)
class Int8(StoredFormat):
    group: int  # 0: one scale for each output; -1: one for the matrix
    symmetric: bool
    inputs: Inputs = None
    main: str = "weight"

    def specs(self, out: int, inner: int, found: Found) -> dict[str, Spec]:
        specs = {"weight": Spec(torch.int8, (out, inner))}
        groups = inner // self.group if self.group > 0 else 1
        if self.group < 0:
            specs["weight_scale"] = scalar_spec(found, "weight_scale")
        else:
            specs["weight_scale"] = scale_spec(found, "weight_scale", out, groups, default=torch.bfloat16)
        if not self.symmetric:
            specs["weight_zero_point"] = Spec(torch.int8, specs["weight_scale"].shape)
        if "input_scale" in found:
            specs["input_scale"] = scalar_spec(found, "input_scale")
        if "input_zero_point" in found:
            specs["input_zero_point"] = Spec(torch.int8, found["input_zero_point"].shape)
        return specs

    def refusal(self, out: int, inner: int) -> str | None:
        return sides_refusal(8, self.group if self.group > 0 else inner, out, inner, along=WORD)

    def read(self, stored: Mapping[str, torch.Tensor], name: str) -> Packed:
        weight = stored["weight"]
        out, inner = weight.shape
        scale, zero = check_scale(name, "weight_scale", stored["weight_scale"]), stored.get("weight_zero_point")
        if self.group < 0:
            scale = scale.reshape(1, 1).expand(out, 1)
            zero = None if zero is None else zero.reshape(1, 1).expand(out, 1)
        zero = None if zero is None else _plus_128(zero)
        return as_packed(_plus_128(weight), 8, self.group if self.group > 0 else inner, scale, zero)

    def num_bytes(self, out: int, inner: int, found: Found) -> int:
        itemsize = self.specs(out, inner, found)["weight_scale"].dtype.itemsize
        return packed_bytes(8, self.group if self.group > 0 else inner, out, inner, itemsize, zero=not self.symmetric)


def _plus_128(signed: torch.Tensor) -> torch.Tensor:
    """int8 -> uint8, with 128 for zero."""
    return signed.contiguous().view(torch.uint8) ^ 0x80
