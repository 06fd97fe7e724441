"""Rows of results, in the tuner's format, and statistics of a workload's times."""

import statistics

from engine.bench.workloads import Workload
from engine.kernels.tuning.rows import Row, machine, say, show

__all__ = ["Row", "machine", "say", "show", "timing"]


def timing(workload: Workload, seconds: list[float]) -> Row:
    """Medians over the repeats of one workload, and their spread."""
    middle = statistics.median(seconds)
    return {
        "requests": len(workload.prompts),
        "in_tokens": workload.total_in,
        "out_tokens": workload.total_out,
        "secs": round(middle, 3),
        "secs_all": [round(s, 3) for s in seconds],
        "out_tok_s": round(workload.total_out / middle, 1),
        "total_tok_s": round((workload.total_in + workload.total_out) / middle, 1),
    }
