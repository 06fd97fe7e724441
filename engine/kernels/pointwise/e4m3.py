"""e4m3 numbers (fp8) on every GPU: by instructions from compute capability 8.9 on, by bit operations before that.

A GPU without the instructions gets e4m3 tensors as bytes (launcher.py): inside a kernel, `dtype == uint8` means such a
tensor. e4m3's exponent and mantissa fit into the upper bits of a bfloat16's or a float16's, but the exponent bias
differs. So they are shifted into place, then multiplied by a power of two. Both steps are exact, and subnormal numbers
need no special case.
"""

import triton
import triton.language as tl

from engine.kernels.runtime.launcher import interpreted

_INTERPRETED = tl.constexpr(interpreted())
# Four numbers at a time, two per register: five instructions for a pair. Each byte goes to the upper half of 16 bits;
# then all but the sign is shifted right, by 4 for a bfloat16 (whose exponent is then 120 too small) or by 1 for a
# float16 (8 too small).
_TO_BFLOAT16 = tl.constexpr("""
{
    .reg .b32 a, b, s, t, e, z;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    and.b32 s, a, 0x80008000;
    and.b32 t, b, 0x80008000;
    shr.u32 a, a, 4;
    shr.u32 b, b, 4;
    lop3.b32 a, a, 0x07f007f0, s, 0xea;
    lop3.b32 b, b, 0x07f007f0, t, 0xea;
    mov.b32 e, 0x7b807b80;
    mov.b32 z, 0x80008000;
    fma.rn.bf16x2 $0, a, e, z;
    fma.rn.bf16x2 $1, b, e, z;
}
""")
_TO_FLOAT16 = tl.constexpr("""
{
    .reg .b32 a, b, s, t, e;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    and.b32 s, a, 0x80008000;
    and.b32 t, b, 0x80008000;
    shr.u32 a, a, 1;
    shr.u32 b, b, 1;
    lop3.b32 a, a, 0x3f803f80, s, 0xea;
    lop3.b32 b, b, 0x3f803f80, t, 0xea;
    mov.b32 e, 0x5c005c00;
    mul.rn.f16x2 $0, a, e;
    mul.rn.f16x2 $1, b, e;
}
""")


@triton.jit
def _from_bits(x, dtype: tl.constexpr):
    if _INTERPRETED:
        bits = ((x & 0x80).to(tl.uint16) << 8) | ((x & 0x7F).to(tl.uint16) << 7)
        return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
    elif dtype == tl.float16:
        return tl.inline_asm_elementwise(_TO_FLOAT16, "=r,=r,r", [x], tl.float16, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(_TO_BFLOAT16, "=r,=r,r", [x], tl.bfloat16, is_pure=True, pack=4).to(dtype)


@triton.jit
def widened(x, dtype: tl.constexpr, NAN: tl.constexpr = False):
    """x, e4m3 or int8, in a wider `dtype`. With NAN, an e4m3 NaN stays NaN. Weights do not need that: if they hold NaN,
    so does their scale."""
    if x.dtype == tl.uint8:
        wide = _from_bits(x, dtype)
        if NAN:
            wide = tl.where((x & 0x7F) == 0x7F, float("nan"), wide)
        return wide
    else:
        return x.to(dtype)


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """float32 x, within ±448 or NaN, as e4m3 numbers, rounded to nearest, ties to even. `dtype`: the cache's."""
    if dtype == tl.uint8:
        bits = x.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Normal numbers: round the mantissa to three bits, and change the exponent's bias.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Subnormal numbers are multiples of 2^-9, as are all float32 numbers from 2^14 to 2^15: adding 2^14 rounds
        # them.
        shifted = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        rounded = tl.where(size < (121 << 23), shifted, normal)
        rounded = tl.where(size > 0x7F800000, 0x7F, rounded)
        return (((bits >> 24) & 0x80) | rounded).to(tl.uint8)
    else:
        return x.to(dtype)
