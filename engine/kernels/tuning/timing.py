"""The time of a step: the median over repeats; on a GPU, of a CUDA graph, because decode steps run as graphs."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

_REPEATS = 15


def step_seconds(steps: Sequence[Callable[[], object]], device: torch.device, repeats: int = _REPEATS) -> float:
    """Median time of a step. On a GPU all steps are captured in one graph."""
    with torch.inference_mode():
        for step in steps:
            step()
        if device.type != "cuda":
            return statistics.median(_timed(step) for step in steps)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in steps:
                step()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times[2:]) / len(steps)


def _timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
