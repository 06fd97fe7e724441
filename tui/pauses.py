"""Keeps the garbage collector from holding up a key: a look through all objects takes 15 ms, with PyTorch 80 and more.

A full collection waits until nobody types. What is there after PyTorch was loaded, or when a collection has taken long,
stays for good and is not looked through again.
"""

import gc
import sys
import time

IDLE_SECONDS = 10.0        # between two full collections
_QUIET_SECONDS = 1.0       # without a key, before one of them
_LATEST_SECONDS = 60.0     # however much is typed
_LONG_SECONDS = 0.02
_NEVER = 1_000_000         # young collections before a full one
_key_at = _collected_at = 0.0
_is_kept = False


def keep_short() -> None:
    """From here on nothing but `collect_when_quiet` makes a full collection."""
    first, second, _ = gc.get_threshold()
    gc.set_threshold(first, second, _NEVER)


def key_came() -> None:
    global _key_at
    _key_at = time.monotonic()


def keep_loaded() -> None:
    """PyTorch's objects stay, once it is there: called after work that loads it."""
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
