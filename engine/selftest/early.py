"""Opens the GPU while modules load: the driver takes half a second for it, without Python's lock.

Where it fails nothing is said: PyTorch tries again, and says why it cannot.
"""

import ctypes
import threading
from contextlib import suppress

import torch

from engine.capabilities import nvidia_driver_present


def open_gpu() -> threading.Thread | None:
    """Make the context of the first GPU, which PyTorch will use; to be joined. None where there can be none.

    Call it once PyTorch is loaded: libraries that are loaded and a driver that loads its own may wait for one another.
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
