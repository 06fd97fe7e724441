"""CUDA graphs of steps: one launch instead of hundreds (decode) or thousands (prompts).

A graph has a fixed size; a step takes the next larger one and pads with row 0, the padding row. Sizes are recorded from
the largest down into one memory pool, so that smaller graphs reuse the largest one's memory: they never run at the same
time, and each result is consumed before the next replay.

A step need not run before it is recorded: its kernels are loaded by then. But a library may load or allocate at a first
call, which the driver does not allow while a graph is recorded. Then the step runs once and is recorded again.
"""

import gc
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch.cuda import graph_pool_handle

from engine.worker.mixed_step import MixedShape, MixedStep

log = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)
Pool = Any  # a handle: memory that graphs share
Recorded = tuple[torch.cuda.CUDAGraph, torch.Tensor]  # and its hidden states

# Graphs whose recording failed. From the first on, every step runs before it is recorded. They are kept because
# PyTorch's allocators may still ask them whether an allocation is theirs.
_failed: list[torch.cuda.CUDAGraph] = []


def graph_sizes(max_batch: int) -> list[int]:
    """Ascending batch sizes up to and including `max_batch`, dense where padding would cost most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 1025, 64)]
    return sorted({s for s in sizes if s < max_batch} | {min(max_batch, 1024)})


def shared_prefix_sizes(max_batch: int) -> list[int]:
    """Batch sizes of the graphs for sequences that share a prefix. There are few: such a step saves more than padding
    costs it, and each graph costs time at the start."""
    return [s for s in graph_sizes(max_batch) if s in (16, 32) or s % 64 == 0 or s == max_batch >= 8]


class Graphs(Generic[Key]):
    """`step(key)` recorded for each of `keys`, largest first. `fill(key)` prepares its inputs."""

    def __init__(
        self,
        step: Callable[[Key], torch.Tensor],
        keys: Iterable[Key],
        pool: Pool | None,
        *,
        fill: Callable[[Key], None] | None = None,
    ) -> None:
        self.pool = graph_pool_handle() if pool is None else pool
        self._graphs: dict[Key, Recorded] = {}
        with torch.inference_mode(), _no_collection():
            for key in keys:
                if fill is not None:
                    fill(key)
                self._graphs[key] = self._record(step, key)

    def _record(self, step: Callable[[Key], torch.Tensor], key: Key) -> Recorded:
        # The first step runs before it is recorded, because steps of this kind create buffers once and keep them. In a
        # graph these would be taken from the graphs' memory, and initialised again by each replay.
        if not self._graphs or _failed:
            step(key)
        graph = torch.cuda.CUDAGraph()
        try:
            return graph, _record_into(graph, step, key, self.pool)
        except RuntimeError as error:
            had_run = bool(_failed)
            _failed.append(graph)
            torch.cuda.synchronize()
            if _left_open(graph, self.pool):
                self.pool = graph_pool_handle()
            if had_run:
                raise
            why = str(error).partition("\n")[0]
            log.info("A step could not be recorded before it ran; from now on each step runs first: %s", why)
        gc.collect()  # what the failed step held
        return self._record(step, key)

    def __len__(self) -> int:
        return len(self._graphs)

    def has(self, key: Key) -> bool:
        return key in self._graphs

    def replay(self, key: Key) -> torch.Tensor:
        """Run the graph; its hidden states [T, H] are valid until the next replay."""
        graph, hidden = self._graphs[key]
        graph.replay()
        return hidden


class DecodeGraphs(Graphs[int]):
    """`decode(size)` recorded for every one of `sizes`, which are ascending."""

    def __init__(self, decode: Callable[[int], torch.Tensor], sizes: list[int], pool: Pool | None = None) -> None:
        self.sizes = sizes
        super().__init__(decode, reversed(sizes), pool)
        self._next = [0] * (self.sizes[-1] + 1)
        for batch in range(len(self._next)):
            self._next[batch] = next(s for s in self.sizes if s >= batch)

    def size_for(self, batch: int) -> int:
        """The size that a batch is padded to; the batch's own if it is larger than every graph."""
        return self._next[batch] if batch < len(self._next) else batch


class MixedGraphs(Graphs[MixedShape]):
    """`step(shape)` recorded for every one of `shapes`, which are ascending."""

    def __init__(
        self,
        step: Callable[[MixedShape], torch.Tensor],
        fill: Callable[[MixedShape], None],
        shapes: list[MixedShape],
        pool: Pool | None = None,
    ) -> None:
        self.shapes = shapes
        super().__init__(step, reversed(shapes), pool, fill=fill)

    def shape_for(self, step: MixedStep) -> MixedShape | None:
        """The smallest that has room for the step, if there is one."""
        return step.shape(self.shapes)


def _record_into(
    graph: torch.cuda.CUDAGraph, step: Callable[[Key], torch.Tensor], key: Key, pool: Pool
) -> torch.Tensor:
    # The outer context restores the stream: the inner one does not if the recording fails.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
        return step(key)


def _left_open(graph: torch.cuda.CUDAGraph, pool: Pool) -> bool:
    """Clean up after a failed recording. Returns whether PyTorch had left the pool open: it ends neither of its two
    allocators' parts then, and only one can be ended from here, so nothing more can be recorded into this pool. Graphs
    that were recorded into it before still work."""
    graph.reset()
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # the step failed, but its recording was ended
        return False
    torch._C._cuda_releasePool(device, pool)  # a graph does this for the pool of a recording that succeeded
    return True


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage collection could free device memory, which is forbidden during capture."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
