"""Whether a start will find all its kernels compiled: a guess, before what would know is loaded.

A start that went well leaves a file in the cache, named by what decides which kernels it needs. The next one of the
same name starts no compilers early. Where the guess is wrong they are started when it turns out (compile_ahead.py).
"""

import hashlib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from engine.kernels.runtime.cache_dir import use_cache_dir


def found(*what: str) -> bool:
    """Whether an earlier start with this key, the same kernels and the same Triton succeeded here."""
    return _path(what).exists()


def leave(*what: str) -> None:
    """Leave the hint for the next start. Failing to write it does no harm."""
    with suppress(OSError):
        _path(what).touch(mode=0o600)


def _path(what: tuple[str, ...]) -> Path:
    """Takes a few milliseconds."""
    triton = [found.version for found in metadata.distributions(name="triton")]  # none with a CPU's PyTorch
    digest = hashlib.sha256("\0".join([*triton, *what]).encode())
    kernels = Path(__file__).parents[1]
    for source in sorted((*kernels.rglob("*.py"), *kernels.rglob("*.json"))):  # and the tables of their tiles
        digest.update(str(source.relative_to(kernels)).encode() + b"\0" + source.read_bytes())
    for table in sorted((use_cache_dir() / "tuned").glob("*.json")):  # this server's own: tuned_tables
        digest.update(table.name.encode() + b"\0" + table.read_bytes())
    return use_cache_dir() / f"atoll-{digest.hexdigest()[:24]}.started"
