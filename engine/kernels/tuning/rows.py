"""Rows of results: one JSON object per line on stdout, or aligned text; progress goes to stderr."""

import json
import platform
import sys
from collections.abc import Iterable
from typing import Any

import torch

Row = dict[str, Any]


def machine(device: torch.device) -> Row:
    """The machine's properties that a measurement depends on; every row contains them."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = _cpu_name()
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


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
