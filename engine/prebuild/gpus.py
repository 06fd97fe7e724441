"""GPUs that kernels can be compiled for by name: those of NVIDIA's figures that choose kernels and defaults."""

from typing import NamedTuple

from engine.kernels.runtime.gpu_target import H100, Target

_GIB = 1 << 30


class Gpu(NamedTuple):
    """A GPU that need not be here."""

    target: Target
    total: int  # bytes of memory, about as the driver reports them


GPUS = {
    "a100": Gpu(Target((8, 0), 166_912, 108, "A100"), 79 * _GIB),
    "a10": Gpu(Target((8, 6), 101_376, 72, "A10"), 22 * _GIB),
    "l4": Gpu(Target((8, 9), 101_376, 58, "L4"), 22 * _GIB),
    "l40s": Gpu(Target((8, 9), 101_376, 142, "L40S"), 44 * _GIB),
    "rtx4090": Gpu(Target((8, 9), 101_376, 128, "RTX 4090"), 23 * _GIB),
    "h100": Gpu(H100._replace(name="H100"), 79 * _GIB),
    "h200": Gpu(H100._replace(name="H200"), 139 * _GIB),
    "b200": Gpu(Target((10, 0), 232_448, 148, "B200"), 178 * _GIB),
    "rtxpro6000": Gpu(Target((12, 0), 101_376, 188, "RTX PRO 6000"), 94 * _GIB),
}
