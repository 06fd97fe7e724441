"""Counts where this process's kernels came from, for one line in the log and in `atoll status`.

A kernel that came with the release costs a read, one in the cache a few milliseconds, and one that is compiled here
most of a second: the counts explain a slow start.
"""

import threading
from typing import Any

_lock = threading.Lock()
_counts = {"release": 0, "triton": 0, "compiled": 0}


def came_with_release() -> None:
    """Note that a kernel of the release was loaded."""
    _add("release", 1)


def came_from_triton() -> None:
    """Note that a kernel was loaded that Triton compiled, now or earlier."""
    _add("triton", 1)


def compiled_elsewhere(count: int) -> None:
    """Note kernels that other processes compiled for this one."""
    _add("compiled", count)


def triton_listener(*, cache_hit: bool, **_: Any) -> None:
    """Triton's own hook (knobs.compilation.listener): it calls this after each compilation, and after each search that
    found the result in the cache."""
    if not cache_hit:
        _add("compiled", 1)


def compiled() -> int:
    """How many kernels were compiled for this process so far."""
    return _counts["compiled"]


def counts() -> dict[str, int]:
    """Kernels of this process: `release`, `cached` (compiled by an earlier start), `compiled`."""
    with _lock:
        cached = max(0, _counts["triton"] - _counts["compiled"])
        return {"release": _counts["release"], "cached": cached, "compiled": _counts["compiled"]}


def line() -> str:
    found = counts()
    return (
        f"Kernels: {found['release']} came with the release, {found['cached']} were in the cache, "
        f"{found['compiled']} were compiled here."
    )


def _add(name: str, count: int) -> None:
    with _lock:
        _counts[name] += count
