"""Keeps the garbage collector from delaying keys: searching PyTorch's objects takes it a tenth of a second."""

import gc
import time

_LONG_SECONDS = 0.02
_began = 0.0


def keep_short() -> None:
    """After a long collection, keep all existing objects for good, so that they are not searched again."""
    gc.callbacks.append(_after)


def _after(phase: str, info: dict[str, int]) -> None:
    global _began
    if phase == "start":
        _began = time.perf_counter()
    elif info["generation"] == 2 and time.perf_counter() - _began > _LONG_SECONDS:
        gc.freeze()
