"""GEMMs by cuBLASLt with an algorithm of our choice: its own first choice is often not the fastest one.

The library's heuristic suggests only some of the algorithms for a shape. On Hopper it only returns variants of a single
algorithm, which differ in the tile of the result and in the cluster of programs that share their loads. For fp8 GEMMs
with a scale per row it suggests one of 918 variants, so this file lists some more and requests them explicitly.

The library is the one that PyTorch has loaded. All GEMMs share one workspace, which is safe because they run one after
another on one stream.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint16, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch

_TYPES = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
_E4M3 = 28
_FLOAT32 = 0
_COMPUTE_32F = 68            # cublasComputeType_t
# cublasLtMatmulDescAttributes_t
_TRANSPOSE_A = 3
_SCALE_OF_A, _SCALE_OF_B = 17, 18  # pointers
_FAST_SUMS = 25              # fp8 fast accumulation: sums keep fewer bits, as is usual for fp8 GEMMs
_KIND_OF_SCALE_A, _KIND_OF_SCALE_B = 31, 32
_SCALE_EACH_ROW = 3          # cublasLtMatmulMatrixScale_t: a float32 for each row of x and of W
_MOST_WORKSPACE = 1          # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
_WORKSPACE = 32 << 20        # bytes: partial sums when the inner dimension is split
_LIMITS = (0, 4 << 20, _WORKSPACE)  # the workspace it may use decides which algorithms the heuristic suggests
_EACH = 16                   # algorithms requested for each workspace limit

# cublasLtMatmulAlgoConfigAttributes_t
_TILE, _STAGES, _CLUSTER = 1, 6, 8
_ON_HOPPER = 66              # the algorithm with tiles and clusters; on other GPUs the library refuses it
_STEPS = 36                  # 128 elements of the inner dimension a stage, as many stages as fit
# (cublasLtMatmulTile_t, cublasLtClusterShape_t). For the shapes of 8B and 31B models the best of these is within 2 % of
# the best of all variants (H200). gemm/autotune.py picks among them by measuring.
_FP8_FORMS = (
    (157, 4), (188, 3), (183, 6), (164, 2), (143, 4), (15, 2), (151, 2), (158, 4), (18, 2), (196, 2), (134, 7),
    (217, 2), (27, 2), (193, 5), (208, 2), (183, 8), (92, 4), (20, 5), (164, 7), (15, 4), (188, 2), (124, 4),
)  # fmt: skip


class CublasLtError(RuntimeError):
    """The library is missing, or refused a call."""


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t"""

    _fields_ = [("data", c_uint64 * 8)]

    def hold(self, algorithm: bytes) -> None:
        ctypes.memmove(byref(self), algorithm, ctypes.sizeof(self))


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", Algorithm), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    ]  # fmt: skip


class Shape(NamedTuple):
    """The shape of y [rows, outputs] = x [rows, inner] W [outputs, inner]ᵀ, all row-major and contiguous."""

    rows: int
    outputs: int
    inner: int
    dtype: torch.dtype  # dtype of y, and of x and W unless these are fp8
    fp8: bool = False   # x and W are fp8, with a scale per row


class Matmul:
    """A GEMM of one shape, and the algorithms available for it. Raises CublasLtError."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._library, self._handle = _library(), _handle()
        self._result = _TYPES[shape.dtype]
        self._operand = _E4M3 if shape.fp8 else self._result
        self._description = self.description()
        # cuBLAS matrices are column-major: to it, W is [inner, outputs], to be transposed, and x is [inner, rows].
        self._w = self._layout(self._operand, shape.inner, shape.outputs)
        self._x = self._layout(self._operand, shape.inner, shape.rows)
        self._y = self._layout(self._result, shape.outputs, shape.rows)
        self._one, self._zero = c_float(1), c_float(0)

    def description(self, scales: tuple[torch.Tensor, torch.Tensor] | None = None) -> c_void_p:
        """A description of the GEMM for the library; it does not depend on the number of rows. The library checks the
        pointers to fp8 scales before any are known: without `scales` they point to the workspace."""
        description = c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(description), c_int(_COMPUTE_32F), c_int(_FLOAT32))
        self._describe(description, _TRANSPOSE_A, c_int32(1))
        if self.shape.fp8:
            self._describe(description, _FAST_SUMS, c_int8(1))
            workspace = _workspace(torch.cuda.current_device())
            x_scale, scale = scales or (workspace, workspace)
            self._describe(description, _KIND_OF_SCALE_A, c_int32(_SCALE_EACH_ROW))
            self._describe(description, _KIND_OF_SCALE_B, c_int32(_SCALE_EACH_ROW))
            self._describe(description, _SCALE_OF_A, c_void_p(scale.data_ptr()))
            self._describe(description, _SCALE_OF_B, c_void_p(x_scale.data_ptr()))
        return description

    def launch(
        self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, algorithm: Algorithm, description: c_void_p
    ) -> Callable[[], int]:
        """A function that launches the GEMM with all arguments prepared, and returns the library's status. It reads
        `algorithm` when it is called. The caller keeps the tensors alive."""
        return functools.partial(
            self._library.cublasLtMatmul, *self._arguments(x, weight, y, description), byref(algorithm),
            *self._resources(x),
        )  # fmt: skip

    def algorithms(self) -> list[bytes]:
        """The library's suggestions, best guess first, then the variants listed here."""
        found: dict[bytes, None] = {}
        for limit in _LIMITS:
            found |= dict.fromkeys(self._named(limit))
        for tile, cluster in _FP8_FORMS if self.shape.fp8 else ():
            if (algorithm := self._form(tile, cluster)) is not None:
                found[algorithm] = None
        return list(found)

    def bind(self, algorithm: bytes) -> "BoundMatmul":
        """The GEMM with this algorithm, ready to be called with tensors."""
        return BoundMatmul(self, Algorithm.from_buffer_copy(algorithm))

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        y: torch.Tensor,
        algorithm: Algorithm,
        scales: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        if scales is not None:
            self._describe(self._description, _SCALE_OF_A, c_void_p(scales[1].data_ptr()))
            self._describe(self._description, _SCALE_OF_B, c_void_p(scales[0].data_ptr()))
        self._call(
            "cublasLtMatmul", *self._arguments(x, weight, y, self._description), byref(algorithm), *self._resources(x)
        )

    def _arguments(self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, description: c_void_p) -> tuple:
        result = c_void_p(y.data_ptr())
        return (
            self._handle, description, byref(self._one), c_void_p(weight.data_ptr()), self._w, c_void_p(x.data_ptr()),
            self._x, byref(self._zero), result, self._y, result, self._y,
        )  # fmt: skip

    @staticmethod
    def _resources(x: torch.Tensor) -> tuple[c_void_p, c_size_t, c_void_p]:
        workspace, stream = _workspace(x.get_device()), torch.cuda.current_stream().cuda_stream
        return c_void_p(workspace.data_ptr()), c_size_t(_WORKSPACE), c_void_p(stream)

    def _named(self, limit: int) -> list[bytes]:
        """What the library's heuristic suggests for this many bytes of workspace."""
        preference = c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        try:
            most = c_uint64(limit)
            self._call(
                "cublasLtMatmulPreferenceSetAttribute", preference, c_int(_MOST_WORKSPACE), byref(most), c_size_t(8)
            )
            results, count = (_Found * _EACH)(), c_int(0)
            self._call(
                "cublasLtMatmulAlgoGetHeuristic", self._handle, self._description, self._w, self._x, self._y, self._y,
                preference, c_int(_EACH), results, byref(count),
            )  # fmt: skip
        finally:
            self._library.cublasLtMatmulPreferenceDestroy(preference)
        return [bytes(r.algorithm) for r in results[: count.value] if r.state == 0 and r.workspace <= limit]

    def _form(self, tile: int, cluster: int) -> bytes | None:
        """The algorithm with this tile and cluster, or None if the GPU or the shape does not allow it."""
        algorithm = Algorithm()
        types = (self._operand, self._operand, self._result, self._result)
        if self._library.cublasLtMatmulAlgoInit(
            self._handle, c_int(_COMPUTE_32F), c_int(_FLOAT32), *map(c_int, types), c_int(_ON_HOPPER), byref(algorithm)
        ):
            return None
        for name, value in (
            (_TILE, c_int32(tile)), (_STAGES, c_int32(_STEPS)), (_CLUSTER, c_uint16(cluster))
        ):  # fmt: skip
            size = c_size_t(ctypes.sizeof(value))
            if self._library.cublasLtMatmulAlgoConfigSetAttribute(byref(algorithm), c_int(name), byref(value), size):
                return None
        found = _Found()
        if self._library.cublasLtMatmulAlgoCheck(
            self._handle, self._description, self._w, self._x, self._y, self._y, byref(algorithm), byref(found)
        ):
            return None
        return bytes(algorithm) if found.state == 0 and found.workspace <= _WORKSPACE else None

    def _describe(self, description: c_void_p, name: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._call("cublasLtMatmulDescSetAttribute", description, c_int(name), byref(value), size)

    def _layout(self, kind: int, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate", byref(layout), c_int(kind), c_uint64(rows), c_uint64(columns), c_int64(rows)
        )
        return layout

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise CublasLtError(f"{name} for {self.shape}: status {status}")


class BoundMatmul:
    """x [rows, inner], W [outputs, inner] -> [rows, outputs], by one algorithm. fp8 tensors have float32 scales: x's
    [rows] and W's [outputs]."""

    def __init__(self, matmul: Matmul, algorithm: Algorithm) -> None:
        self._matmul, self._algorithm = matmul, algorithm

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        shape = self._matmul.shape
        y = torch.empty(shape.rows, shape.outputs, dtype=shape.dtype, device=x.device)
        self._matmul.run(x, weight, y, self._algorithm, scales)
        return y


@functools.cache
def has_forms() -> bool:
    """Whether this GPU can run the listed fp8 variants: asks the library about a GEMM whose shape suits all of them."""
    try:
        matmul = Matmul(Shape(64, 4096, 4096, torch.bfloat16, fp8=True))
    except CublasLtError:
        return False
    return any(matmul._form(tile, cluster) is not None for tile, cluster in _FP8_FORMS)


def version() -> int:
    """The library's version: algorithm ids may mean something else in another version."""
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
def _workspace(device: int) -> torch.Tensor:
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=torch.device("cuda", device))


@functools.cache
def _handle() -> c_void_p:
    handle = c_void_p()
    if status := _library().cublasLtCreate(byref(handle)):
        raise CublasLtError(f"cublasLtCreate: status {status}")
    return handle
