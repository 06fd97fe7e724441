"""AWQ (arXiv:2306.00978), as AutoAWQ's version "gemm" writes it: packed along the outputs, in an order of its own.

    qweight  int32 [in, out / 8]      qzeros  int32 [groups, out / 8]      scales  float16 [groups, out]

Column j of the eight in a word is in bits 4 s to 4 s + 3 with s = (0, 4, 1, 5, 2, 6, 3, 7)[j].

    W[o, i] = (q[i, o] - zero[i / group, o]) * scales[i / group, o]
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.kernels.gemm.packed.weight import Packed
from engine.kernels.moe.tiles import Form
from engine.layers.quant.integers import WORD, as_packed, int4_form, packed_bytes, sides_refusal, unpack_words
from engine.layers.quant.stored import Found, Inputs, Spec, StoredFormat, check_scale, scale_spec

_BITS = 4
SHIFTS = tuple(4 * s for s in (0, 4, 1, 5, 2, 6, 3, 7))  # of column j


@dataclass(frozen=True, slots=True)
class Awq(StoredFormat):
    group: int  # 0: one scale for each output
    inputs: Inputs = None
    main: str = "qweight"
    adds_biases = True

    def specs(self, out: int, inner: int, found: Found) -> dict[str, Spec]:
        groups = inner // self._group(inner)
        return {
            "qweight": Spec(torch.int32, (inner, out * _BITS // WORD)),
            "qzeros": Spec(torch.int32, (groups, out * _BITS // WORD)),
            "scales": scale_spec(found, "scales", groups, out, default=torch.float16),
        }

    def refusal(self, out: int, inner: int) -> str | None:
        return sides_refusal(_BITS, self._group(inner), out, inner, along=out)

    def read(self, stored: Mapping[str, torch.Tensor], name: str) -> Packed:
        codes = unpack_words(stored["qweight"], _BITS, SHIFTS).T.contiguous()
        zero = unpack_words(stored["qzeros"], _BITS, SHIFTS).T
        scale = check_scale(name, "scales", stored["scales"]).T
        return as_packed(codes, _BITS, self._group(codes.shape[1]), scale, zero)

    def num_bytes(self, out: int, inner: int, found: Found) -> int:
        itemsize = self.specs(out, inner, found)["scales"].dtype.itemsize
        return packed_bytes(_BITS, self._group(inner), out, inner, itemsize, zero=True)

    @property
    def has_zeros(self) -> bool:
        return True

    def stacks_as(self, out: int, inner: int, found: Found) -> Form | None:
        return int4_form(_BITS, self._group(inner), out, inner)

    def _group(self, inner: int) -> int:
        return self.group or inner
