"""Opens the GPU while modules load: the driver takes half a second, and does not hold the GIL.

Failures are ignored: PyTorch will try again and report why it cannot.
"""

import ctypes
import threading
from contextlib import suppress

import torch

from engine.capabilities import nvidia_driver_present


def open_gpu() -> threading.Thread | None:
    """Create the CUDA context of the first GPU, which PyTorch will use, in a thread that the caller joins. None if
    there is no GPU.

    Call it after PyTorch has loaded: loading libraries while the driver loads its own may block both.
    """
    if not nvidia_driver_present() or torch.version.cuda is None:
        return None
    thread = threading.Thread(target=_open_gpu, daemon=True)
    thread.start()
    return thread


def _open_gpu() -> None:
    with suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), 0):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
