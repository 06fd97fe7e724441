"""Kernels that came with the release, compiled when its medium was built (engine/prebuild): read here, never written.

    $ATOLL_PREBUILT_KERNELS/9.0/index.json     what made them, and for each variant its function, warps, shared memory
                                               and the SHA-256 of its machine code
                           /9.0/<key>.cubin    keys: launcher.variant_key

They are code for the GPU, so a directory that others could have written to is not used. Whatever is wrong with them,
one line in the log says so, and kernels are compiled as if there were none.
"""

import functools
import hashlib
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

from engine.kernels.runtime.cache_dir import is_closed

log = logging.getLogger(__name__)

VARIABLE = "ATOLL_PREBUILT_KERNELS"
INDEX = "index.json"
FORMAT = 1
_MOST_BYTES = 32 << 20  # of an index or of one kernel


class MachineCode(NamedTuple):
    """What the driver needs to load and start a kernel."""

    cubin: bytes
    function: str
    num_warps: int
    shared: int  # bytes


class Index(NamedTuple):
    """The kernels of one compute capability."""

    toolchain: str                                  # `toolchain` of the Triton that compiled them
    models: frozenset[str]                          # `model_key` of the models whose kernels were listed
    kernels: dict[str, tuple[str, int, int, str]]   # key -> function, warps, shared memory, SHA-256


class Prebuilt:
    """The kernels in one directory. `code` may be asked from several threads."""

    def __init__(self, directory: Path, index: Index) -> None:
        self.directory = directory
        self.models = index.models
        self._kernels = dict(index.kernels)

    def __contains__(self, key: str) -> bool:
        return self.code(key) is not None

    def code(self, key: str) -> MachineCode | None:
        """The machine code of this variant; None if it is missing or damaged."""
        found = self._kernels.get(key)
        if found is None:
            return None
        function, num_warps, shared, digest = found
        try:
            cubin = _read(self.directory / f"{key}.cubin")
        except (OSError, ValueError) as error:
            self._drop(key, str(error))
            return None
        if hashlib.sha256(cubin).hexdigest() != digest:
            self._drop(key, "it is not what the index names")
            return None
        return MachineCode(cubin, function, num_warps, shared)

    def _drop(self, key: str, why: str) -> None:
        self._kernels.pop(key, None)
        log.warning("The prebuilt kernel %s/%s is ignored and compiled here: %s.", self.directory, key, why)


def model_key(raw: dict[str, Any]) -> str:
    """Names a model by its config.json."""
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def of_model(raw: dict[str, Any], capability: tuple[int, int]) -> bool:
    """Whether the kernels of this model came with the release: a guess, made before Triton is loaded."""
    directory = _directory(capability)
    if directory is None:
        return False
    try:
        return model_key(raw) in read_index(directory / INDEX).models
    except (OSError, ValueError):
        return False  # `for_capability` says why


@functools.cache
def for_capability(capability: tuple[int, int]) -> Prebuilt | None:
    """The prebuilt kernels for such a GPU; None if there are none that this process may use."""
    directory = _directory(capability)
    if directory is None:
        return None
    try:
        found = _opened(directory, capability)
    except (OSError, ValueError) as error:
        log.warning("The prebuilt kernels in %s are ignored, and kernels are compiled here: %s.", directory, error)
        return None
    log.info("%d prebuilt kernels in %s", len(found._kernels), directory)
    return found


def toolchain(capability: tuple[int, int]) -> str:
    """Changes with everything but the kernel that Triton's own cache keys depend on: Triton, its assembler and
    libraries, and environment variables."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import get_cache_invalidating_env_vars, make_backend
    from triton.runtime.cache import triton_key

    backend = make_backend(GPUTarget("cuda", capability[0] * 10 + capability[1], 32))
    options: Any = backend.parse_options({})
    parts = (triton_key(), backend.hash(), options.hash(), str(sorted(get_cache_invalidating_env_vars().items())))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read_index(path: Path) -> Index:
    """Raises OSError, or ValueError if it is not an index."""
    text = _read(path)
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("its index is not valid JSON") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ValueError(f"its index is not of format {FORMAT}")
    try:
        kernels = {str(key): _entry(*entry) for key, entry in raw["kernels"].items()}
        return Index(str(raw["toolchain"]), frozenset(raw["models"]), kernels)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("its index is malformed") from error


def _entry(function: object, num_warps: object, shared: object, digest: object) -> tuple[str, int, int, str]:
    if not isinstance(function, str) or not isinstance(digest, str):
        raise TypeError
    if type(num_warps) is not int or type(shared) is not int or not 1 <= num_warps <= 32 or shared < 0:
        raise TypeError
    return function, num_warps, shared, digest


def _directory(capability: tuple[int, int]) -> Path | None:
    given = os.environ.get(VARIABLE)
    if not given:
        return None
    directory = Path(given) / ".".join(map(str, capability))
    return directory if directory.is_dir() else None


def _opened(directory: Path, capability: tuple[int, int]) -> Prebuilt:
    place = directory.resolve()
    if not is_closed(place):
        raise ValueError("others can write to that directory")
    index = read_index(place / INDEX)
    if index.toolchain != toolchain(capability):
        raise ValueError("another version of Triton, or one with other settings, has compiled them")
    return Prebuilt(place, index)


def _read(path: Path) -> bytes:
    """Raises ValueError if it is too large, or if others can write to it."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(f"others can write to {path.name}")
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{path.name} is larger than {_MOST_BYTES >> 20} MiB")
    return content
