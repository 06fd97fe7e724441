"""CUDA graphs of decode steps: one launch instead of some hundred.

A graph has a fixed batch size; a step takes the next larger one and pads with row 0, the trash row. Sizes are recorded
from the largest down into one memory pool, so that the smaller ones live in the largest one's memory: they never run at
the same time, and each one's result is used up before the next replay.
"""

import gc
from collections.abc import Callable

import torch

_WARM_UP = 2  # runs before the capture: kernels are compiled and libraries choose their algorithms


def graph_sizes(max_batch: int) -> list[int]:
    """Ascending batch sizes up to `max_batch`, which is one itself: dense where padding would cost most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 1025, 64)]
    return sorted({s for s in sizes if s < max_batch} | {min(max_batch, 1024)})


class DecodeGraphs:
    """`decode(size)` recorded for every size of `graph_sizes`."""

    def __init__(self, decode: Callable[[int], torch.Tensor], max_batch: int) -> None:
        self.sizes = graph_sizes(max_batch)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # a collection during capture may free device memory, which capture forbids
        try:
            with torch.inference_mode():
                for size in reversed(self.sizes):
                    for _ in range(_WARM_UP):
                        decode(size)
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool):
                        hidden = decode(size)
                    self._graphs[size] = graph, hidden
        finally:
            if collecting:
                gc.enable()
        self._next = [0] * (self.sizes[-1] + 1)
        for batch in range(len(self._next)):
            self._next[batch] = next(s for s in self.sizes if s >= batch)

    def size_for(self, batch: int) -> int:
        """The size that a batch is padded to; the batch's own if it is larger than every graph."""
        return self._next[batch] if batch < len(self._next) else batch

    def has(self, size: int) -> bool:
        return size in self._graphs

    def replay(self, size: int) -> torch.Tensor:
        """Run the graph; its hidden states [size, H] are valid until the next replay."""
        graph, hidden = self._graphs[size]
        graph.replay()
        return hidden
