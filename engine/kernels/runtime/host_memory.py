"""Page-locked host memory that kernels read directly: for tables of which a step needs only a few rows.

    anonymous pages ─► filled by the loader ─► page-locked and mapped for the GPU ─► read over the bus ─► released

The size is exact, while PyTorch's allocator of pinned buffers rounds up to a power of two (a table of 4.7 GB would take
8 GB). Pages are filled before they are locked: the loader's threads fault them in concurrently, so the driver finds
them all present. The memory is released when the last tensor in it is gone.
"""

import ctypes
import functools
import math
import mmap
import sys
from typing import Any
from weakref import WeakValueDictionary

import torch

from engine.message import msg, reason

_PORTABLE, _MAPPED = 1, 2  # CU_MEMHOSTREGISTER_...
# Huge pages are faster to lock and to look up. A fork, by whatever library, must not inherit or copy the table.
_ADVICE = ("MADV_HUGEPAGE", "MADV_DONTFORK", "MADV_DONTDUMP")


class HostMemoryError(Exception):
    """The system or the driver refused host memory; the text says why."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros in pages of its own, not locked yet. A page takes no memory until it is written to.

    Raises HostMemoryError if the system has no room for it.
    """
    count = math.prod(shape)
    try:
        pages = _Pages(count * dtype.itemsize)
    except OSError as error:
        raise HostMemoryError(msg("the system refused memory ({strerror})", strerror=reason(error))) from None
    flat = torch.frombuffer(pages, dtype=dtype, count=count)  # keeps `pages` alive
    _alive[flat.data_ptr()] = pages
    return flat.view(shape)


def lock(tensor: torch.Tensor) -> None:
    """Page-lock a tensor of `empty`, so that every kernel of this process can read it by `tensor.data_ptr()`.

    Raises HostMemoryError and leaves the memory unchanged.
    """
    _alive[tensor.data_ptr()].lock(tensor.data_ptr())


def is_locked(tensor: torch.Tensor) -> bool:
    pages = _alive.get(tensor.data_ptr())
    return pages is not None and pages.address is not None


class _Pages(mmap.mmap):
    """Anonymous memory that unlocks itself before it is unmapped: otherwise the driver would keep the pages."""

    address: int | None = None  # set while locked
    context: ctypes.c_void_p    # the CUDA context in which it was locked

    def __new__(cls, size: int) -> "_Pages":
        whole = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = super().__new__(cls, -1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for name in _ADVICE:
            try:
                pages.madvise(getattr(mmap, name))
            except (AttributeError, OSError):
                pass  # not supported by this system: slower, not wrong
        return pages

    def lock(self, address: int) -> None:
        if self.address is not None:
            return
        driver, context, seen = _driver(), ctypes.c_void_p(), ctypes.c_uint64()
        _check(driver, driver.cuCtxGetCurrent(ctypes.byref(context)))
        _check(driver, driver.cuMemHostRegister_v2(address, len(self), _PORTABLE | _MAPPED))
        self.address, self.context = address, context
        result = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(seen), address, 0)
        if result or seen.value != address:
            self.unlock()
            _check(driver, result)
            raise HostMemoryError(msg("the GPU would see it under another address"))

    def unlock(self) -> None:
        """Unlock after kernels that still read the memory have finished. An error means that the driver has shut down,
        which unlocks the memory, too."""
        if self.address is None:
            return
        driver, popped = _driver(), ctypes.c_void_p()
        inside = driver.cuCtxPushCurrent_v2(self.context) == 0
        driver.cuCtxSynchronize()
        driver.cuMemHostUnregister(self.address)
        if inside:
            driver.cuCtxPopCurrent_v2(ctypes.byref(popped))
        self.address = None

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at exit the system releases everything
            self.unlock()


_alive: WeakValueDictionary[int, _Pages] = WeakValueDictionary()  # by address


@functools.cache
def _driver() -> Any:
    """libcuda with the signatures of the functions used here. Raises HostMemoryError if there is none."""
    try:
        torch.cuda.synchronize()  # makes torch create its context and set it for this thread
        driver = ctypes.CDLL("libcuda.so.1")
    except (OSError, RuntimeError, AssertionError) as error:
        raise HostMemoryError(msg("there is no CUDA driver ({error})", error=reason(error))) from None
    pointer = ctypes.c_void_p
    driver.cuMemHostRegister_v2.argtypes = [pointer, ctypes.c_size_t, ctypes.c_uint]
    driver.cuMemHostGetDevicePointer_v2.argtypes = [pointer, pointer, ctypes.c_uint]
    driver.cuMemHostUnregister.argtypes = [pointer]
    driver.cuCtxPushCurrent_v2.argtypes = [pointer]
    for name in ("cuCtxGetCurrent", "cuCtxPopCurrent_v2"):
        getattr(driver, name).argtypes = [pointer]
    return driver


def _check(driver: Any, result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(text))
        raise HostMemoryError(msg("the CUDA driver says: {value} ({result})",
                                  value=(text.value or b"unknown error").decode(), result=result))
