"""Matrix products by cuBLASLt with an algorithm of our choice: its own first choice is often not the fastest one.

The library is the one that PyTorch has loaded. Products share one workspace: they follow one another on one stream.
"""

import ctypes
import functools
import os
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch

_TYPES = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
_FLOAT32 = 0
_COMPUTE_32F = 68            # cublasComputeType_t
_TRANSPOSE_A = 3             # CUBLASLT_MATMUL_DESC_TRANSA
_MOST_WORKSPACE = 1          # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
_WORKSPACE = 32 << 20        # bytes: where the inner side is split, the parts' sums
_LIMITS = (0, 4 << 20, _WORKSPACE)  # what it is told it may use decides which algorithms it thinks of
_EACH = 16                   # algorithms that are asked for under each of them


class CublasLtError(RuntimeError):
    """The library is not there, or refused a call."""


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", _Algorithm), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    ]  # fmt: skip


class Shape(NamedTuple):
    """Of y [rows, outputs] = x [rows, inner] W [outputs, inner]ᵀ, all row by row without gaps."""

    rows: int
    outputs: int
    inner: int
    dtype: torch.dtype


class Product:
    """A shape, and the algorithms that there are for it. Raises CublasLtError."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._library, self._handle = _library(), _handle()
        kind = _TYPES[shape.dtype]
        self._description = c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(self._description), c_int(_COMPUTE_32F), c_int(_FLOAT32))
        transposed = c_int32(1)
        self._call(
            "cublasLtMatmulDescSetAttribute", self._description, c_int(_TRANSPOSE_A), byref(transposed), c_size_t(4)
        )
        # cuBLAS counts column by column: it multiplies W [inner, outputs], transposed, with x [inner, rows].
        self._w = self._layout(kind, shape.inner, shape.outputs)
        self._x = self._layout(kind, shape.inner, shape.rows)
        self._y = self._layout(kind, shape.outputs, shape.rows)
        self._one, self._zero = c_float(1), c_float(0)

    def algorithms(self) -> list[bytes]:
        """Likely ones first."""
        found: dict[bytes, None] = {}
        for limit in _LIMITS:
            preference = c_void_p()
            self._call("cublasLtMatmulPreferenceCreate", byref(preference))
            try:
                most = c_uint64(limit)
                self._call(
                    "cublasLtMatmulPreferenceSetAttribute", preference, c_int(_MOST_WORKSPACE), byref(most), c_size_t(8)
                )
                results, count = (_Found * _EACH)(), c_int(0)
                self._call(
                    "cublasLtMatmulAlgoGetHeuristic", self._handle, self._description, self._w, self._x, self._y,
                    self._y, preference, c_int(_EACH), results, byref(count),
                )  # fmt: skip
            finally:
                self._library.cublasLtMatmulPreferenceDestroy(preference)
            for result in results[: count.value]:
                if result.state == 0 and result.workspace <= limit:
                    found[bytes(result.algorithm)] = None
        return list(found)

    def bind(self, algorithm: bytes) -> "BoundProduct":
        """To be called with tensors."""
        return BoundProduct(self, _Algorithm.from_buffer_copy(algorithm))

    def run(self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, algorithm: _Algorithm) -> None:
        workspace = _workspace(x.device)
        self._call(
            "cublasLtMatmul", self._handle, self._description, byref(self._one), c_void_p(weight.data_ptr()), self._w,
            c_void_p(x.data_ptr()), self._x, byref(self._zero), c_void_p(y.data_ptr()), self._y,
            c_void_p(y.data_ptr()), self._y, byref(algorithm), c_void_p(workspace.data_ptr()), c_size_t(_WORKSPACE),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip

    def _layout(self, kind: int, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate", byref(layout), c_int(kind), c_uint64(rows), c_uint64(columns), c_int64(rows)
        )
        return layout

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise CublasLtError(f"{name} for {self.shape}: status {status}")


class BoundProduct:
    """x [rows, inner], W [outputs, inner] -> [rows, outputs], by one algorithm."""

    def __init__(self, product: Product, algorithm: _Algorithm) -> None:
        self._product, self._algorithm = product, algorithm

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shape = self._product.shape
        y = torch.empty(shape.rows, shape.outputs, dtype=shape.dtype, device=x.device)
        self._product.run(x, weight, y, self._algorithm)
        return y


def version() -> int:
    """Of the library: algorithms are known by numbers that another version may read otherwise."""
    return int(_library().cublasLtGetVersion())


@functools.cache
def _library() -> ctypes.CDLL:
    cuda = (torch.version.cuda or "").split(".")[0]
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{cuda}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)  # never another one
    except OSError as error:
        raise CublasLtError(f"PyTorch has loaded no libcublasLt.so.{cuda}: {error}") from None
    library.cublasLtGetVersion.restype = c_size_t
    return library


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)


@functools.cache
def _handle() -> c_void_p:
    handle = c_void_p()
    if status := _library().cublasLtCreate(byref(handle)):
        raise CublasLtError(f"cublasLtCreate: status {status}")
    return handle
