"""Chooses cuBLASLt's algorithm for the GEMMs of common step sizes: measured once on this GPU, then remembered.

The library's first choice is often not its fastest (measurements: docs/performance.md). A choice holds for one number
of rows exactly, so only the row counts of captured graphs and of full steps get one; all others use PyTorch's choice.

Choices are stored next to the compiled kernels, so that the next start gives the same results, bit for bit.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from engine.kernels.gemm import cublaslt
from engine.kernels.gemm.cublaslt import BoundMatmul, CublasLtError, Matmul, Shape
from engine.kernels.gemm.trials import Trials, Weight, inputs, scales
from engine.kernels.runtime.cache_dir import use_cache_dir

log = logging.getLogger(__name__)

_BETTER = 0.98     # gain relative to PyTorch's choice: less is noise
_CANDIDATES = 3    # version of the list of algorithms: increase it when the list changes, to measure everything again
_FINALISTS = 3
_DTYPES = (torch.bfloat16, torch.float16)

_chosen: dict[Shape, BoundMatmul] = {}


def chosen(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None) -> BoundMatmul | None:
    """The algorithm for contiguous x [T, in] and W [out, in]; `dtype` is the result's if both are fp8. None if
    PyTorch's own choice is as good."""
    if not _chosen or not x.is_contiguous():
        return None
    outputs, inner = weight.shape
    return _chosen.get(Shape(x.shape[0], outputs, inner, dtype or x.dtype, dtype is not None))


def choose(
    weights: Mapping[tuple[int, int], Sequence[Weight]], rows: Sequence[int], dtype: torch.dtype, *, fp8: bool = False
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
            shapes = [Shape(number, outputs, inner, dtype, fp8) for number in rows]
            unknown = [shape for shape in shapes if shape not in memory.known]
            if unknown:
                memory.known |= _fastest(unknown, some)
                measured += len(unknown)
            for shape in shapes:
                if (algorithm := memory.known[shape]) and shape not in _chosen:
                    bound = Matmul(shape).bind(algorithm)
                    x, x_scale = inputs(shape, some[0])
                    bound(x, some[0].values, scales(x_scale, some[0]))  # fails here if it does not work
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


def _fastest(shapes: Sequence[Shape], weights: Sequence[Weight]) -> dict[Shape, bytes]:
    """The best algorithm of each, or b"" for PyTorch's own. All are timed briefly, then the best against PyTorch's."""
    trials = Trials(shapes, weights)
    screened = []
    for shape in shapes:
        try:
            matmul = Matmul(shape)
            screened.append((matmul, trials.screen(matmul, matmul.algorithms())))
        except CublasLtError as error:  # concerns this shape only: not every GPU has fp8 GEMMs with a scale per row
            log.info("no algorithms for %s: %s", shape, error)
    finals = []
    for matmul, queued in screened:
        times = queued.results()
        finals.append((matmul.shape, trials.finals(matmul, sorted(times, key=times.__getitem__)[:_FINALISTS])))
    best = dict.fromkeys(shapes, b"")
    for shape, queued in finals:
        times = queued.results()
        times[b""] *= _BETTER
        best[shape] = min(times, key=times.__getitem__)
    return best


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
