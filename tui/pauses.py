"""Keeps the garbage collector from delaying a key: a full collection takes 15 ms, with PyTorch loaded 80 and more.

Full collections wait until nobody types. Objects that exist once PyTorch is loaded, or after a slow collection, are
frozen, so that later collections skip them.
"""

import gc
import sys
import time

IDLE_SECONDS = 10.0        # between two full collections
_QUIET_SECONDS = 1.0       # without a key, before one of them
_LATEST_SECONDS = 60.0     # between two of them, even while somebody types
_LONG_SECONDS = 0.02
_NEVER = 1_000_000         # young collections before a full one
_key_at = _collected_at = 0.0
_is_kept = False


def keep_short() -> None:
    """Leave full collections to `collect_when_quiet` from now on."""
    first, second, _ = gc.get_threshold()
    gc.set_threshold(first, second, _NEVER)


def key_came() -> None:
    global _key_at
    _key_at = time.monotonic()


def keep_loaded() -> None:
    """Freeze PyTorch's objects. Call it after work that may have loaded PyTorch."""
    global _is_kept
    if not _is_kept and "torch" in sys.modules:
        gc.freeze()
        _is_kept = True


def collect_when_quiet() -> None:
    """A full collection, unless somebody types. Called every IDLE_SECONDS."""
    global _collected_at
    began = time.monotonic()
    if began - _key_at < _QUIET_SECONDS and began - _collected_at < _LATEST_SECONDS:
        return
    gc.collect()
    _collected_at = time.monotonic()
    if _collected_at - began > _LONG_SECONDS:
        gc.freeze()
