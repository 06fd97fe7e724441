"""Machine code in the CUDA driver: loaded, and launched with its arguments, without a C compiler."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine.kernels.runtime.prebuilt import MachineCode

_MAX_DYNAMIC_SHARED_SIZE = 8   # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_SHARED_LIMIT = 48 << 10
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_...
_CAPTURE_RELAXED = 2           # CU_STREAM_CAPTURE_MODE_RELAXED
_EARLY_SCRATCH = 1 << 18       # bytes: two TMA descriptors for each of 1,024 programs
_SLOTS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint64 * 8)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_LaunchAttribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


class KernelError(RuntimeError):
    """The CUDA driver refused a kernel."""


class Variant:
    """Loaded machine code, and the memory in which its arguments are passed."""

    def __init__(self, name: str, code: MachineCode, types: list[str], pdl: bool) -> None:
        self._binary = code.cubin  # kept, because the driver may read it lazily
        self._function = load_function(code, name)
        self.name = name
        self._slots = [_SLOTS.get(t.removesuffix("!"), ctypes.c_uint64)() for t in types]
        self._is_pointer = [t.startswith("*") for t in types]
        # Two hidden parameters come last: global and profile scratch.
        self._hidden = [ctypes.c_uint64(0), ctypes.c_uint64(0)]
        self._scratch = code.scratch
        self._early = pdl
        every = [*self._slots, *self._hidden]
        self._argv = (ctypes.c_void_p * len(every))(*[ctypes.addressof(s) for s in every])
        self._config = _LaunchConfig(block=(ctypes.c_uint * 3)(32 * code.num_warps, 1, 1), shared=code.shared)
        if pdl:
            self._attribute = _LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
            self._attribute.value[0] = 1
            self._config.attributes = ctypes.pointer(self._attribute)
            self._config.count = 1
        self._config_ref = ctypes.byref(self._config)
        self._launch = driver().cuLaunchKernelEx
        self._device = torch.cuda.current_device()

    def launch(self, grid: tuple[int, ...], args: tuple) -> None:
        slots = self._slots
        at = 0
        for value in args:
            if value is None:
                continue
            slots[at].value = value.data_ptr() if self._is_pointer[at] else value
            at += 1
        config = self._config
        config.grid[0] = grid[0]
        config.grid[1] = grid[1] if len(grid) > 1 else 1
        config.grid[2] = grid[2] if len(grid) > 2 else 1
        if self._scratch:
            size = self._scratch * config.grid[0] * config.grid[1] * config.grid[2]
            if self._early:
                scratch = _early_scratch(self._device, size)
            else:  # freed at once: what gets this memory next runs after this kernel, on the same stream
                scratch = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._hidden[0].value = scratch.data_ptr()
        config.stream = torch._C._cuda_getCurrentRawStream(self._device)
        result = self._launch(self._config_ref, self._function, self._argv, None)
        if result:
            check(result, self.name)


_early_scratches: dict[int, list[torch.Tensor]] = {}


def _early_scratch(device: int, size: int) -> torch.Tensor:
    """Memory for a kernel that writes to it before its predecessor has ended, so nothing else may ever use it.

    Two such kernels may overlap, but not three, if they call `wait_in_order`: so they take turns with two pieces.
    """
    if size > _EARLY_SCRATCH:
        raise KernelError(f"{size} bytes of scratch memory for a kernel that starts early, which has {_EARLY_SCRATCH}")
    if device not in _early_scratches:
        _early_scratches[device] = [torch.empty(_EARLY_SCRATCH, dtype=torch.uint8, device=device) for _ in range(2)]
    turns = _early_scratches[device]
    turns.reverse()
    return turns[0]


def load_function(code: MachineCode, name: str) -> ctypes.c_void_p:
    """The function that the driver makes of machine code. Raises KernelError if it refuses it."""
    library, module, function = driver(), ctypes.c_void_p(), ctypes.c_void_p()
    with _loading_allowed(library):
        check(library.cuModuleLoadData(ctypes.byref(module), code.cubin), name)
        check(library.cuModuleGetFunction(ctypes.byref(function), module, code.function.encode()), name)
        if code.shared > _STATIC_SHARED_LIMIT:
            check(library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE, code.shared), name)
    return function


@contextmanager
def _loading_allowed(library: ctypes.CDLL) -> Iterator[None]:
    """Inside, this thread may load code even while it records a graph."""
    mode = ctypes.c_int(_CAPTURE_RELAXED)
    library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


_loaded: ctypes.CDLL | None = None


def driver() -> ctypes.CDLL:
    global _loaded
    if _loaded is None:
        torch.cuda.current_stream()  # makes torch create the context
        _loaded = ctypes.CDLL("libcuda.so.1")
        _loaded.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return _loaded


def check(result: int, name: str) -> None:
    if result:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(result, ctypes.byref(text))
        raise KernelError(f"{name}: the CUDA driver says: {(text.value or b'unknown error').decode()} ({result}).")
