"""e4m3 weights with a scale for the matrix, for each output, or for each block of 128 x 128 numbers.

    weight        F8_E4M3 [out, in]
    weight_scale  one number | [out, 1] | [ceil(out / 128), ceil(in / 128)]     W = weight * scale
    input_scale   one number, where activations were to have a fixed scale

Qwen and DeepSeek call the block scale `weight_scale_inv`, and multiply by it nevertheless.

Activations. With a scale for the matrix or for outputs they are rounded to e4m3 with a scale for each token, which is
at least as fine as a fixed one: `input_scale` is read and not used. With block scales they stay in 16 bits on a
CPU; a GPU with fp8 units rounds those of more than a few tokens (packed_gpu.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from engine.kernels.gemm.packed.weight import Packed
from engine.kernels.moe.tiles import SCALE_BLOCK, Form
from engine.layers.quant.stored import Found, Inputs, Spec, StoredFormat, check_scale, scalar_spec, scale_spec
from engine.message import msg

_MULTIPLE = 16  # of both sides of a matrix on the fp8 units


@dataclass(frozen=True, slots=True)
class Float8(StoredFormat):
    strategy: Literal["tensor", "channel", "block"]
    block: tuple[int, int] = (0, 0)     # outputs, inputs
    scale: str = "weight_scale"
    inputs: Inputs = None
    main: str = "weight"

    def specs(self, out: int, inner: int, found: Found) -> dict[str, Spec]:
        specs = {"weight": Spec(torch.float8_e4m3fn, (out, inner))}
        if self.strategy == "tensor":
            specs[self.scale] = scalar_spec(found, self.scale)
        elif self.strategy == "channel":
            flat = self.scale in found and found[self.scale].shape == (out,)
            specs[self.scale] = scale_spec(found, self.scale, *((out,) if flat else (out, 1)))
        else:
            specs[self.scale] = scale_spec(found, self.scale, -(-out // self.block[0]), -(-inner // self.block[1]))
        if "input_scale" in found:
            specs["input_scale"] = scalar_spec(found, "input_scale")
        return specs

    def refusal(self, out: int, inner: int) -> str | None:
        if self.strategy == "block" and (self.block[0] < 1 or self.block[1] % 16 or not self.block[1]):
            return msg("blocks of {block} numbers", block=" x ".join(map(str, self.block)))
        return None

    def read(self, stored: Mapping[str, torch.Tensor], name: str) -> Packed:
        weight = stored["weight"]
        out, inner = weight.shape
        scale = check_scale(name, self.scale, stored[self.scale].float())
        if self.strategy == "tensor":
            return Packed("fp8", inner, weight, scale.reshape(1, 1).expand(out, 1).contiguous())
        if self.strategy == "channel":
            return Packed("fp8", inner, weight, scale.reshape(out, 1))
        rows = scale.repeat_interleave(self.block[0], 0)[:out]
        narrow = stored[self.scale].dtype
        rows = rows if narrow.itemsize == 1 else rows.to(narrow)
        return Packed("fp8", self.block[1], weight, rows, block=self.block[0])

    def num_bytes(self, out: int, inner: int, found: Found) -> int:
        if self.strategy != "block":
            return out * inner + 4 * out
        dtype = self.specs(out, inner, found)[self.scale].dtype
        itemsize = 4 if dtype.itemsize == 1 else dtype.itemsize
        return out * inner + out * -(-inner // self.block[1]) * itemsize

    def is_fp8_per_row(self, out: int, inner: int) -> bool:
        return self.strategy != "block" and self.inputs == "fp8" and out % _MULTIPLE == 0 and inner % _MULTIPLE == 0

    def stacks_as(self, out: int, inner: int, found: Found) -> Form | None:
        if self.block == (SCALE_BLOCK, SCALE_BLOCK) and out % _MULTIPLE == 0 and inner % _MULTIPLE == 0:
            return "blocks"
        return "rows" if self.is_fp8_per_row(out, inner) else None
