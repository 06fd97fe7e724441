"""Facts about the GPU from NVML: cheap, and available long before PyTorch is loaded."""

import ctypes
import os


def compute_capability() -> tuple[int, int] | None:
    """Compute capability of the first GPU that this process may use; None if unknown.

    If the GPUs differ, this is a guess, because CUDA may number them in another order. The library stays open: if no
    process used the GPU, the driver would shut it down, and CUDA would have to wait until it starts again.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    gpu, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    failed = (
        library.nvmlInit_v2()
        or library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(_first()), ctypes.byref(gpu))
        or library.nvmlDeviceGetCudaComputeCapability(gpu, ctypes.byref(major), ctypes.byref(minor))
    )
    return None if failed else (major.value, minor.value)


def _first() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return int(visible) if visible.isdecimal() else 0
