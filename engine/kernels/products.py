"""Which of cuBLASLt's algorithms the products of usual steps take: measured once on this card, then remembered.

The library's first choice is often not its best one. On an H100: 4096 x 12288, 96 rows: 46.8 and 41.6 us; 24576 x 4096,
8192 rows: 2,370 and 2,239 us. What is chosen here serves products of exactly so many rows, as captured graphs and full
steps have; all others are PyTorch's.

The choice stands in a file beside the compiled kernels, so that the next start gives the same numbers, bit for bit.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from engine.kernels import cublaslt
from engine.kernels.cache_dir import use_cache_dir
from engine.kernels.cublaslt import BoundProduct, CublasLtError, Product, Shape

log = logging.getLogger(__name__)

_BETTER = 0.98     # of PyTorch's time: less is noise
_CANDIDATES = 2    # counts up when others are tried: what was chosen among the old ones is chosen anew
_FINALISTS = 3
_TURNS = 4         # that they are measured in
_MOST_WEIGHTS = 4  # of one shape, which follow one another: more than caches hold
_MANY_ROWS = 1024  # they are bound by arithmetic, and one weight is enough
_DTYPES = (torch.bfloat16, torch.float16)

_chosen: dict[Shape, BoundProduct] = {}


def chosen(x: torch.Tensor, weight: torch.Tensor) -> BoundProduct | None:
    """For x [T, in] and W [out, in], both without gaps; None: PyTorch's product is as good."""
    if not _chosen or not x.is_contiguous():
        return None
    outputs, inner = weight.shape
    return _chosen.get(Shape(x.shape[0], outputs, inner, x.dtype))


def choose(weights: Mapping[tuple[int, int], Sequence[torch.Tensor]], rows: Iterable[int]) -> int:
    """Decide for all `weights`, by their shapes, and each number of rows. Returns how many were measured for it.

    Without the library, or where a measurement fails, PyTorch's products stay.
    """
    if not weights:
        return 0
    try:
        memory = _Memory.open()
        measured = 0
        for (outputs, inner), some in weights.items():
            if some[0].dtype not in _DTYPES:
                continue
            for number in rows:
                shape = Shape(number, outputs, inner, some[0].dtype)
                if shape in _chosen:
                    continue
                if shape not in memory.known:
                    memory.known[shape] = _fastest(shape, some[:_MOST_WEIGHTS])
                    measured += 1
                if algorithm := memory.known[shape]:
                    bound = Product(shape).bind(algorithm)
                    x = torch.zeros(number, shape.inner, dtype=shape.dtype, device=some[0].device)
                    bound(x, some[0])  # it works
                    _chosen[shape] = bound
        if measured:
            memory.save()
        return measured
    except (CublasLtError, OSError) as error:
        log.info("products keep PyTorch's algorithms: %s", error)
        return 0


def _fastest(shape: Shape, weights: Sequence[torch.Tensor]) -> bytes:
    """The best algorithm, or b"" for PyTorch's own. All are tried once, then the best ones against PyTorch's."""
    product = Product(shape)
    if shape.rows > _MANY_ROWS:
        weights = weights[:1]
    # Numbers as they come: a card that multiplies zeros needs less power, and is faster.
    x = torch.randn(shape.rows, shape.inner, dtype=shape.dtype, device=weights[0].device)
    tried: list[tuple[float, bytes]] = []
    for algorithm in product.algorithms():
        try:
            tried.append((_seconds(product.bind(algorithm), x, weights, 1), algorithm))
        except CublasLtError:
            continue  # it is not for this card
    found, best = b"", _BETTER * _seconds(F.linear, x, weights, _TURNS)
    for _, algorithm in sorted(tried)[:_FINALISTS]:
        seconds = _seconds(product.bind(algorithm), x, weights, _TURNS)
        if seconds < best:
            found, best = algorithm, seconds
    return found


def _seconds(
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    turns: int,
) -> float:
    """Of a product, in the fastest turn. The first ones of each keep the card busy while the others are queued."""
    times = []
    for _ in range(turns):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for weight in weights:
            multiply(x, weight)
        start.record()
        for weight in weights:
            multiply(x, weight)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times) / len(weights)


class _Memory:
    """What earlier starts found on this card with this library."""

    def __init__(self, path: Path, known: dict[Shape, bytes]) -> None:
        self._path, self.known = path, known

    @classmethod
    def open(cls) -> "_Memory":
        card = "".join(c if c.isalnum() else "-" for c in torch.cuda.get_device_name())
        path = use_cache_dir() / f"atoll-products-{card}-{cublaslt.version()}-{_CANDIDATES}.json"
        known = {}
        try:
            for rows, outputs, inner, dtype, algorithm in json.loads(path.read_text("utf-8")):
                known[Shape(rows, outputs, inner, getattr(torch, dtype))] = bytes.fromhex(algorithm)
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, AttributeError):
            log.warning("%s cannot be read: products are measured anew", path)
            known = {}
        return cls(path, known)

    def save(self) -> None:
        lines = [
            [s.rows, s.outputs, s.inner, str(s.dtype).removeprefix("torch."), algorithm.hex()]
            for s, algorithm in self.known.items()
        ]
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(lines), "utf-8")
        written.replace(self._path)
