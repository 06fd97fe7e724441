"""Guesses whether a start will find all its kernels compiled, before the code that could tell is loaded.

A successful start leaves a file in the cache, named after everything that decides which kernels it needs. If the next
start finds a file of that name, it does not start compilers early. If the guess was wrong, they are started as soon as
that is known (compile_ahead.py).
"""

import hashlib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from engine.kernels.runtime.cache_dir import use_cache_dir


def found(*what: str) -> bool:
    """Whether an earlier start with this key, the same kernels and the same Triton succeeded here."""
    return _path(what).exists()


def write(*what: str) -> None:
    """Write the hint for the next start. Failing to write it does no harm."""
    with suppress(OSError):
        _path(what).touch(mode=0o600)


def _path(what: tuple[str, ...]) -> Path:
    """The file for this key. Takes a few milliseconds."""
    triton = [found.version for found in metadata.distributions(name="triton")]  # PyTorch for CPUs comes without
    digest = hashlib.sha256("\0".join([*triton, *what]).encode())
    kernels = Path(__file__).parents[1]
    for source in sorted((*kernels.rglob("*.py"), *kernels.rglob("*.json"))):  # the json files are tables of tiles
        digest.update(str(source.relative_to(kernels)).encode() + b"\0" + source.read_bytes())
    for table in sorted((use_cache_dir() / "tuned").glob("*.json")):  # this server's own tables: tuned_tables
        digest.update(table.name.encode() + b"\0" + table.read_bytes())
    return use_cache_dir() / f"atoll-{digest.hexdigest()[:24]}.started"
