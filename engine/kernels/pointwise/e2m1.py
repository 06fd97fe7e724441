"""e2m1 numbers (fp4) and the scales of their groups, widened by bit operations: no GPU needs instructions for them.

    NVFP4   16 numbers have a scale in e4m3, and a matrix has one number more, which the caller applies
    MXFP4   32 numbers have a power of two in e8m0: 2^(bits - 127)

A product of code and scale has six significant bits at most: it is exact in 16 bits.
"""

import triton
import triton.language as tl

from engine.kernels.pointwise.e4m3 import widened


@triton.jit
def from_e2m1(codes):
    """Codes below 16 as float32. Their three lower bits fit into a float16's exponent and mantissa; the exponent is
    then 14 too small."""
    wide = codes.to(tl.uint16)
    bits = ((wide & 8) << 12) | ((wide & 7) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def group_scale(scale, E8M0: tl.constexpr):
    """Scales of groups as float32: powers of two, e4m3, or any wider type."""
    if E8M0:
        bits = scale.to(tl.uint32)
        return tl.where(bits == 0, 0x400000, bits << 23).to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        return widened(scale, tl.float32)
