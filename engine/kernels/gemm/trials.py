"""Times cuBLASLt's algorithms for the GEMMs of one weight shape, for several numbers of rows.

A start waits for this, and most of the time would go to the host: so launches are prepared calls, the host queues a
whole round of them, and reads the events between them at the end. Before each measurement the GPU sleeps until its
launches are queued.

Weights take turns, so that each is read from memory and not from a cache, as in a step.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_void_p
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.kernels.gemm import scaled
from engine.kernels.gemm.cublaslt import Algorithm, Matmul, Shape

_MANY_ROWS = 1024          # from here on a GEMM is compute-bound, and one weight and one launch are enough
_MOST_BYTES = 256 << 20    # total size of the weights that take turns: more than caches hold
_LEAST_WEIGHTS = 4
_SCREENED = 4              # launches in the round that all algorithms run
_SCREENED_LARGE = 2        # of a weight that takes long enough to tell them apart:
_LARGE = 32 << 20          # bytes
_MOST_LAUNCHES = 16        # of a finalist in one round
_TURNS = 4                 # rounds of the finalists
_HEAD_START = 20_000       # clock cycles of the GPU, for each launch that is to be queued
_PYTORCH_HEAD_START = 40_000  # PyTorch's call takes the host longer


Launch = Callable[[], int]  # returns the library's status: 0 if it took the launch


class Weight(NamedTuple):
    values: torch.Tensor        # [out, in]
    scale: torch.Tensor | None  # [out] of an fp8 weight


class Trials:
    """`shapes` differ in their rows only."""

    def __init__(self, shapes: Sequence[Shape], weights: Sequence[Weight]) -> None:
        most = max(shape.rows for shape in shapes)
        shape = shapes[0]
        self._weights = weights[: max(_LEAST_WEIGHTS, _MOST_BYTES // weights[0].values.nbytes)]
        self.x, self.x_scale = inputs(shape._replace(rows=most), weights[0])
        self._y = torch.empty(most, shape.outputs, dtype=shape.dtype, device=self.x.device)
        self._descriptions: list[c_void_p] = []
        self._algorithm = Algorithm()
        self._loaded: set[bytes] = set()  # algorithms that have run: the library loads its kernels at their first call

    def screen(self, matmul: Matmul, algorithms: Iterable[bytes]) -> "Queued":
        """A round of few launches of each."""
        few = _SCREENED_LARGE if self._weights[0].values.nbytes >= _LARGE else _SCREENED
        count = 1 if matmul.shape.rows > _MANY_ROWS else few
        launches = self._launches(matmul)
        queued = Queued()
        for algorithm in algorithms:
            self._queue(queued, launches, algorithm, count)
        return queued

    def finals(self, matmul: Matmul, algorithms: Sequence[bytes]) -> "Queued":
        """Several rounds of these and of PyTorch's own choice (b""), in turn."""
        many = matmul.shape.rows > _MANY_ROWS
        count = 1 if many else min(_MOST_LAUNCHES, max(_LEAST_WEIGHTS, _MOST_BYTES // self._weights[0].values.nbytes))
        launches = self._launches(matmul)
        by_pytorch = itertools.cycle(self._by_pytorch(matmul.shape))
        queued = Queued()
        next(by_pytorch)()
        for _ in range(_TURNS):
            for algorithm in algorithms:
                self._queue(queued, launches, algorithm, count)
            queued.time(b"", by_pytorch, count, _PYTORCH_HEAD_START)
        return queued

    def _queue(self, queued: "Queued", launches: "itertools.cycle[Launch]", algorithm: bytes, count: int) -> None:
        self._algorithm.hold(algorithm)
        if algorithm not in self._loaded:
            if next(launches)():
                return  # this GPU cannot run it
            self._loaded.add(algorithm)
        queued.time(algorithm, launches, count, _HEAD_START)

    def _launches(self, matmul: Matmul) -> "itertools.cycle[Launch]":
        shape = matmul.shape
        if not self._descriptions:
            self._descriptions = [matmul.description(scales(self.x_scale, weight)) for weight in self._weights]
        x = self.x[: shape.rows]
        some = self._weights[: 1 if shape.rows > _MANY_ROWS else None]
        return itertools.cycle([
            matmul.launch(x, weight.values, self._y, self._algorithm, description)
            for weight, description in zip(some, self._descriptions, strict=False)
        ])  # fmt: skip

    def _by_pytorch(self, shape: Shape) -> list[Launch]:
        x = self.x[: shape.rows]
        x_scale = None if self.x_scale is None else self.x_scale[: shape.rows]
        some = self._weights[: 1 if shape.rows > _MANY_ROWS else None]
        return [_pytorch_launch(x, x_scale, weight, shape.dtype) for weight in some]


class Queued:
    """Measurements that the GPU may still be making."""

    def __init__(self) -> None:
        self._events: list[tuple[bytes, torch.cuda.Event, torch.cuda.Event, int]] = []
        self._refused: set[bytes] = set()

    def time(self, name: bytes, launches: "itertools.cycle[Launch]", count: int, head_start: int) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(head_start * (count + 2))
        start.record()
        for launch in itertools.islice(launches, count):
            if launch():
                self._refused.add(name)
        end.record()
        self._events.append((name, start, end, count))

    def results(self) -> dict[bytes, float]:
        """Milliseconds per GEMM of each, in its fastest round. Waits for the GPU."""
        if self._events:
            self._events[-1][2].synchronize()
        found: dict[bytes, float] = {}
        for name, start, end, count in self._events:
            if name not in self._refused:
                found[name] = min(found.get(name, float("inf")), start.elapsed_time(end) / count)
        return found


def inputs(shape: Shape, weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x and its scale. x is random, because a GPU that multiplies zeros draws less power and runs faster."""
    device = weight.values.device
    x = torch.randn(shape.rows, shape.inner, dtype=shape.dtype, device=device)
    if not shape.fp8:
        return x, None
    return (x * 100).to(weight.values.dtype), torch.full((shape.rows,), 0.01, dtype=torch.float32, device=device)


def scales(x_scale: torch.Tensor | None, weight: Weight) -> tuple[torch.Tensor, torch.Tensor] | None:
    return None if x_scale is None or weight.scale is None else (x_scale, weight.scale)


def _pytorch_launch(x: torch.Tensor, x_scale: torch.Tensor | None, weight: Weight, dtype: torch.dtype) -> Launch:
    if x_scale is None or weight.scale is None:

        def launch() -> int:
            F.linear(x, weight.values)
            return 0

        return launch
    weight_t, scale_row = weight.values.t(), weight.scale.unsqueeze(0)

    def launch_fp8() -> int:
        scaled.multiply(x, weight_t, x_scale, scale_row, None, dtype)
        return 0

    return launch_fp8
