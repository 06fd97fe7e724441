"""Chooses cuBLASLt's algorithm for the GEMMs of common step sizes: measured once on this GPU, then remembered.

The library's first choice is often not its fastest (measurements: docs/performance.md). A choice holds for one number
of rows exactly, so only the row counts of captured graphs and of full steps get one; all others use PyTorch's choice.

Choices are stored next to the compiled kernels, so that the next start gives the same results, bit for bit.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.kernels.gemm import cublaslt, scaled
from engine.kernels.gemm.cublaslt import BoundMatmul, CublasLtError, Matmul, Shape
from engine.kernels.runtime.cache_dir import use_cache_dir

log = logging.getLogger(__name__)

_BETTER = 0.98     # gain relative to PyTorch's choice: less is noise
_CANDIDATES = 3    # version of the list of algorithms: increase it when the list changes, to measure everything again
_FINALISTS = 3
_TURNS = 4         # rounds of measurement for the finalists
_MOST_BYTES = 256 << 20  # total size of the weights that take turns: more than caches hold
_MANY_ROWS = 1024  # from here on a GEMM is compute-bound, and measuring with one weight is enough
_HEAD_START = 200_000  # clock cycles for which the GPU waits while the measured calls are being queued
_DTYPES = (torch.bfloat16, torch.float16)

_chosen: dict[Shape, BoundMatmul] = {}


class Weight(NamedTuple):
    values: torch.Tensor        # [out, in]
    scale: torch.Tensor | None  # [out] of an fp8 weight


def chosen(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None) -> BoundMatmul | None:
    """The algorithm for contiguous x [T, in] and W [out, in]; `dtype` is the result's if both are fp8. None if
    PyTorch's own choice is as good."""
    if not _chosen or not x.is_contiguous():
        return None
    outputs, inner = weight.shape
    return _chosen.get(Shape(x.shape[0], outputs, inner, dtype or x.dtype, dtype is not None))


def choose(
    weights: Mapping[tuple[int, int], Sequence[Weight]], rows: Iterable[int], dtype: torch.dtype, *, fp8: bool = False
) -> int:
    """Choose an algorithm for every shape in `weights` and every number of rows. Results have `dtype`, and so do
    weights unless they are fp8. Returns how many shapes were measured.

    Nothing changes if the library is missing or a measurement fails.
    """
    if not weights or dtype not in _DTYPES:
        return 0
    try:
        memory = _Memory.open()
        measured = 0
        for (outputs, inner), some in weights.items():
            for number in rows:
                shape = Shape(number, outputs, inner, dtype, fp8)
                if shape in _chosen:
                    continue
                if shape not in memory.known:
                    memory.known[shape] = _fastest(shape, some)
                    measured += 1
                if algorithm := memory.known[shape]:
                    bound = Matmul(shape).bind(algorithm)
                    x, x_scale = _inputs(shape, some[0])
                    bound(x, some[0].values, _scales(x_scale, some[0]))  # fails here if it does not work
                    _chosen[shape] = bound
    except (CublasLtError, OSError) as error:
        log.info("products keep PyTorch's algorithms: %s", error)
        return 0
    if measured:
        try:
            memory.save()
        except OSError as error:
            log.warning("algorithms of products cannot be kept: the next start measures them again: %s", error)
    return measured


def _fastest(shape: Shape, weights: Sequence[Weight]) -> bytes:
    """The best algorithm, or b"" for PyTorch's own. All are timed once, then the best ones against PyTorch's."""
    try:
        matmul = Matmul(shape)
        algorithms = matmul.algorithms()
    except CublasLtError as error:  # concerns this shape only: not every GPU has fp8 GEMMs with a scale per row
        log.info("no algorithms for %s: %s", shape, error)
        return b""
    size = weights[0].values.nbytes
    weights = weights[: 1 if shape.rows > _MANY_ROWS else max(4, _MOST_BYTES // size)]
    x, x_scale = _inputs(shape, weights[0])

    def seconds(algorithm: bytes, turns: int) -> float:
        bound = matmul.bind(algorithm)
        return _seconds(lambda weight: bound(x, weight.values, _scales(x_scale, weight)), weights, turns)

    tried: list[tuple[float, bytes]] = []
    for algorithm in algorithms:
        try:
            tried.append((seconds(algorithm, 1), algorithm))
        except CublasLtError:
            continue  # this GPU cannot run it
    best, least = b"", _BETTER * _seconds(partial(_by_pytorch, x, x_scale, shape.dtype), weights, _TURNS)
    for _, algorithm in sorted(tried)[:_FINALISTS]:
        if (time := seconds(algorithm, _TURNS)) < least:
            best, least = algorithm, time
    return best


def _inputs(shape: Shape, weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x and its scale. x is random, because a GPU that multiplies zeros draws less power and runs faster."""
    device = weight.values.device
    x = torch.randn(shape.rows, shape.inner, dtype=shape.dtype, device=device)
    if not shape.fp8:
        return x, None
    return (x * 100).to(weight.values.dtype), torch.full((shape.rows,), 0.01, dtype=torch.float32, device=device)


def _scales(x_scale: torch.Tensor | None, weight: Weight) -> tuple[torch.Tensor, torch.Tensor] | None:
    return None if x_scale is None or weight.scale is None else (x_scale, weight.scale)


def _by_pytorch(x: torch.Tensor, x_scale: torch.Tensor | None, dtype: torch.dtype, weight: Weight) -> torch.Tensor:
    if x_scale is None or weight.scale is None:
        return F.linear(x, weight.values)
    return scaled.multiply(x, weight.values.t(), x_scale, weight.scale.unsqueeze(0), None, dtype)


def _seconds(multiply: Callable[[Weight], torch.Tensor], weights: Sequence[Weight], turns: int) -> float:
    """Seconds per GEMM in the fastest round."""
    times = []
    for _ in range(turns):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_HEAD_START)
        multiply(weights[0])
        start.record()
        for weight in weights:
            multiply(weight)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times) / len(weights)


class _Memory:
    """Choices of earlier starts on this GPU with this library."""

    def __init__(self, path: Path, known: dict[Shape, bytes]) -> None:
        self._path, self.known = path, known

    @classmethod
    def open(cls) -> "_Memory":
        gpu = "".join(c if c.isalnum() else "-" for c in torch.cuda.get_device_name())
        path = use_cache_dir() / f"atoll-products-{gpu}-{cublaslt.version()}-{_CANDIDATES}.json"
        known = {}
        try:
            for rows, outputs, inner, dtype, fp8, algorithm in json.loads(path.read_text("utf-8")):
                known[Shape(rows, outputs, inner, getattr(torch, dtype), bool(fp8))] = bytes.fromhex(algorithm)
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, AttributeError):
            log.warning("%s cannot be read: products are measured again", path)
            known = {}
        return cls(path, known)

    def save(self) -> None:
        lines = [
            [s.rows, s.outputs, s.inner, str(s.dtype).removeprefix("torch."), s.fp8, algorithm.hex()]
            for s, algorithm in self.known.items()
        ]
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # at a first start it does not exist yet
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(lines), "utf-8")
        written.replace(self._path)
