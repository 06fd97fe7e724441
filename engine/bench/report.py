"""Rows of results: one JSON object a line on stdout; everything meant for eyes goes to stderr."""

import json
import platform
import statistics
import sys
from collections.abc import Iterable
from typing import Any

import torch

from engine.bench.workloads import Workload

Row = dict[str, Any]


def machine(device: torch.device) -> Row:
    """What a number depends on, for each row."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = _cpu_name()
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


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


def show(rows: Iterable[Row], *, as_json: bool) -> None:
    """Print rows as JSON lines, or as aligned text."""
    for row in rows:
        if as_json:
            print(json.dumps(row), flush=True)
        else:
            head = " ".join(str(row[key]) for key in ("bench", "engine") if key in row)
            rest = (f"{key} {_text(value)}" for key, value in row.items() if key not in ("bench", "engine"))
            print(f"{head:28} " + " · ".join(rest), flush=True)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return str(value)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
