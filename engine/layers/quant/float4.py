"""e2m1 weights, two in a byte: NVFP4 and MXFP4. Activations stay in 16 bits.

    NVFP4   weight_packed U8 [out, in / 2], the first number in the low half; weight_scale F8_E4M3 [out, in / 16];
            weight_global_scale: one number, by which the scales are divided
            ModelOpt's names: weight, weight_scale, and weight_scale_2, by which they are multiplied
    MXFP4   weight_packed; weight_scale U8 [out, in / 32], a power of two: 2^(scale - 127)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.kernels.gemm.packed.weight import Packed, pack_pairs
from engine.kernels.moe.tiles import Form
from engine.layers.quant.stored import Found, Inputs, Spec, StoredFormat, bad_values, check_scale, scalar_spec
from engine.message import msg

_NAN = 255  # of a power of two (OCP Microscaling Formats v1.0, 5.4.1)


@dataclass(frozen=True, slots=True)
class Nvfp4(StoredFormat):
    main: str = "weight_packed"              # ModelOpt: "weight"
    global_scale: str = "weight_global_scale"  # ModelOpt: "weight_scale_2"
    input_scale: str = "input_global_scale"  # ModelOpt: "input_scale"; not used
    inputs: Inputs = None

    def specs(self, out: int, inner: int, found: Found) -> dict[str, Spec]:
        specs = {
            self.main: Spec(torch.uint8, (out, inner // 2)),
            "weight_scale": Spec(torch.float8_e4m3fn, (out, inner // 16)),
            self.global_scale: scalar_spec(found, self.global_scale),
        }
        if self.input_scale in found:
            specs[self.input_scale] = scalar_spec(found, self.input_scale)
        return specs

    def refusal(self, out: int, inner: int) -> str | None:
        return msg("groups of {group} in rows of {inner}", group=16, inner=inner) if inner % 16 else None

    def read(self, stored: Mapping[str, torch.Tensor], name: str) -> Packed:
        factor = check_scale(name, self.global_scale, stored[self.global_scale]).float().reshape(1)
        check_scale(name, "weight_scale", stored["weight_scale"].float())
        divides = self.global_scale != "weight_scale_2"
        if divides and factor.item() == 0:
            raise bad_values(name, self.global_scale, msg("it is zero, and scales are divided by it"))
        values, scale = _in_pairs(stored[self.main], 16), stored["weight_scale"]
        return Packed("fp4", 16, values, scale, factor=factor.repeat(len(values)), divides=divides)

    def num_bytes(self, out: int, inner: int, found: Found) -> int:
        return out * inner // 2 + out * inner // 16 + 4 * out

    def stacks_as(self, out: int, inner: int, found: Found) -> Form | None:
        return _form(out, inner)


def _in_pairs(values: torch.Tensor, group: int) -> torch.Tensor:
    """From neighbours in a byte to the pairs of the packed form."""
    return pack_pairs(torch.stack((values & 15, values >> 4), -1).flatten(1), group)


@dataclass(frozen=True, slots=True)
class Mxfp4(StoredFormat):
    inputs: Inputs = None
    main: str = "weight_packed"

    def specs(self, out: int, inner: int, found: Found) -> dict[str, Spec]:
        return {
            "weight_packed": Spec(torch.uint8, (out, inner // 2)),
            "weight_scale": Spec(torch.uint8, (out, inner // 32)),
        }

    def refusal(self, out: int, inner: int) -> str | None:
        return msg("groups of {group} in rows of {inner}", group=32, inner=inner) if inner % 32 else None

    def read(self, stored: Mapping[str, torch.Tensor], name: str) -> Packed:
        if (stored["weight_scale"] == _NAN).any():
            raise bad_values(name, "weight_scale", msg("it holds infinite values or NaN"))
        return Packed("fp4", 32, _in_pairs(stored["weight_packed"], 32), stored["weight_scale"])

    def num_bytes(self, out: int, inner: int, found: Found) -> int:
        return out * inner // 2 + out * inner // 32

    def stacks_as(self, out: int, inner: int, found: Found) -> Form | None:
        return _form(out, inner)


def _form(out: int, inner: int) -> Form | None:
    """That of experts."""
    return "fp4" if out % 16 == 0 and inner % 64 == 0 else None
