"""GPTQ (arXiv:2210.17323), as AutoGPTQ and GPTQModel write it: packed along the inputs, and the matrix transposed.

    qweight  int32 [in * bits / 32, out]      consecutive rows in a word, the first in the lowest bits
    qzeros   int32 [groups, out * bits / 32]  the zero points; format "gptq" (v1) stores them less one, "gptq_v2" as is
    scales   float16 [groups, out]
    g_idx    int32 [in]                       the group of each input; with `desc_act` not in order

    W[o, i] = (q[i, o] - zero[g_idx[i], o]) * scales[g_idx[i], o]
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.kernels.gemm.packed.weight import Packed
from engine.kernels.moe.tiles import Form
from engine.layers.quant.integers import (
    WORD,
    as_packed,
    columns_of,
    int4_form,
    packed_bytes,
    sides_refusal,
    unpack_words,
)
from engine.layers.quant.stored import Found, Inputs, Spec, StoredFormat, bad_values, check_scale, scale_spec
from engine.message import msg


@dataclass(frozen=True, slots=True)
class Gptq(StoredFormat):
    bits: int
    group: int        # 0: one scale for each output
    symmetric: bool
    zero_offset: int  # 1 in format v1
    inputs: Inputs = None
    main: str = "qweight"
    in_order: bool = True  # config.json says that the columns of a group stand side by side
    adds_biases = True

    def specs(self, out: int, inner: int, found: Found) -> dict[str, Spec]:
        groups = inner // self._group(inner)
        specs = {
            "qweight": Spec(torch.int32, (inner * self.bits // WORD, out)),
            "qzeros": Spec(torch.int32, (groups, out * self.bits // WORD)),
            "scales": scale_spec(found, "scales", groups, out, default=torch.float16),
        }
        if "g_idx" in found or not found:
            specs["g_idx"] = Spec(torch.int32, (inner,))
        return specs

    def refusal(self, out: int, inner: int) -> str | None:
        return sides_refusal(self.bits, self._group(inner), out, inner, along=inner) or sides_refusal(
            self.bits, inner, out, inner, along=out
        )

    def read(self, stored: Mapping[str, torch.Tensor], name: str) -> Packed:
        codes = unpack_words(stored["qweight"].T.contiguous(), self.bits)
        inner = codes.shape[1]
        zero = unpack_words(stored["qzeros"], self.bits).T
        if self.symmetric:
            self._check_symmetric(zero, name)
            zero = None
        else:
            zero = (zero + self.zero_offset) & ((1 << self.bits) - 1)
        group, columns = self._group(inner), None
        if "g_idx" in stored:
            columns = columns_of(stored["g_idx"], group, name, "g_idx")
            codes = codes if columns is None else codes[:, columns]
        scale = check_scale(name, "scales", stored["scales"]).T
        return as_packed(codes, self.bits, group, scale, zero, columns)

    def _check_symmetric(self, zero: torch.Tensor, name: str) -> None:
        """Writers disagree whether a symmetric file stores the middle or one less; anything else is not symmetric."""
        middle = 1 << (self.bits - 1)
        if not ((zero == middle) | (zero == middle - 1)).all():
            raise bad_values(name, "qzeros", msg("config.json says that the weights are symmetric, and it holds other "
                                                 "zero points"))

    def dummy_zero_word(self) -> int:
        return 0x7F7F7F7F if self.bits == 8 else 0x77777777  # the middle, less one

    def num_bytes(self, out: int, inner: int, found: Found) -> int:
        itemsize = self.specs(out, inner, found)["scales"].dtype.itemsize
        return packed_bytes(self.bits, self._group(inner), out, inner, itemsize, zero=not self.symmetric)

    @property
    def has_zeros(self) -> bool:
        return not self.symmetric

    def stacks_as(self, out: int, inner: int, found: Found) -> Form | None:
        return int4_form(self.bits, self._group(inner), out, inner) if self.in_order else None

    def _group(self, inner: int) -> int:
        return self.group or inner
