"""Kernels that came with the release, compiled when its medium was built (engine/prebuild): read here, never written.

    $ATOLL_PREBUILT_KERNELS/9.0/index.json     what made them, and for each variant (launcher.variant_key) its function,
                                               warps, shared and scratch memory, place in the other file, and SHA-256
                           /9.0/kernels.bin    their machine code, one after the other

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
CODE = "kernels.bin"
FORMAT = 3
_MOST_BYTES = 32 << 20  # of an index or of one kernel
_MOST_SCRATCH = 1 << 16
# Fields of a config.json that decide no kernel: another revision of a model, or a fine-tuned one, may change them.
_SAY_NOTHING = ("_name_or_path", "transformers_version", "architectures", "use_cache", "initializer_range")


class MachineCode(NamedTuple):
    """What the driver needs to load and start a kernel."""

    cubin: bytes
    function: str
    num_warps: int
    shared: int  # bytes
    scratch: int  # bytes of global memory for each program


class Entry(NamedTuple):
    """One kernel in the index."""

    function: str
    num_warps: int
    shared: int
    scratch: int
    offset: int  # in kernels.bin
    size: int
    sha256: str


class Index(NamedTuple):
    """The kernels of one compute capability."""

    toolchain: str            # `toolchain` of the Triton that compiled them
    models: frozenset[str]    # `model_key` of the models whose kernels were listed
    kernels: dict[str, Entry]

    @property
    def size(self) -> int:
        """Bytes of kernels.bin."""
        return max((entry.offset + entry.size for entry in self.kernels.values()), default=0)


class Prebuilt:
    """The kernels in one directory. `code` may be asked from several threads."""

    def __init__(self, directory: Path, index: Index) -> None:
        """Raises OSError, or ValueError if the machine code is not what the index describes."""
        self.directory = directory
        self._kernels = dict(index.kernels)
        self._file = (directory / CODE).open("rb")
        found = os.fstat(self._file.fileno())
        _refuse_if_open(found, CODE)
        if found.st_size != index.size:
            raise ValueError(f"{CODE} has {found.st_size} bytes instead of {index.size}")

    def __contains__(self, key: str) -> bool:
        return self.code(key) is not None

    def smallest(self) -> MachineCode | None:
        """A kernel to try whether the driver takes them at all."""
        key = min(self._kernels, key=lambda key: self._kernels[key].size, default=None)
        return None if key is None else self.code(key)

    def code(self, key: str) -> MachineCode | None:
        """The machine code of this variant; None if it is missing or damaged."""
        found = self._kernels.get(key)
        if found is None:
            return None
        try:
            cubin = os.pread(self._file.fileno(), found.size, found.offset)
        except OSError as error:
            self._drop(key, str(error))
            return None
        if hashlib.sha256(cubin).hexdigest() != found.sha256:
            self._drop(key, "it is not what the index names")
            return None
        return MachineCode(cubin, found.function, found.num_warps, found.shared, found.scratch)

    def _drop(self, key: str, why: str) -> None:
        if self._kernels.pop(key, None) is not None:
            log.warning("The prebuilt kernel %s in %s is ignored and compiled here: %s.", key, self.directory, why)


def model_key(raw: dict[str, Any]) -> str:
    """Names a model by what its config.json says about its shape."""
    return hashlib.sha256(json.dumps(_shape(raw), sort_keys=True).encode()).hexdigest()


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
        return _opened(directory, capability)
    except (OSError, ValueError) as error:
        log.warning("The prebuilt kernels in %s are ignored, and kernels are compiled here: %s.", directory, error)
        return None


def toolchain(capability: tuple[int, int]) -> str:
    """Changes with everything but the kernel that decides over the machine code: Triton's version and sources, its
    assembler, and environment variables.

    Unlike Triton's own cache key it does not change with Triton's C++ library, which is another file for each version
    of Python: one medium serves several, and its wheels are those of one version of Triton.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import get_cache_invalidating_env_vars, make_backend

    backend = make_backend(GPUTarget("cuda", capability[0] * 10 + capability[1], 32))
    options: Any = backend.parse_options({})
    sources = hashlib.sha256()
    home = Path(triton.__file__).parent
    for part in ("compiler", "backends/nvidia", "language", "experimental/gluon"):
        for path in sorted((home / part).rglob("*.py")):
            sources.update(f"{path.relative_to(home)}\0".encode() + path.read_bytes())
    variables = str(sorted(get_cache_invalidating_env_vars().items()))
    parts = (triton.__version__, sources.hexdigest(), backend.hash(), options.hash(), variables)
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


def _entry(
    function: object, num_warps: object, shared: object, scratch: object, offset: object, size: object, digest: object
) -> Entry:
    if not isinstance(function, str) or not isinstance(digest, str):
        raise TypeError
    if type(num_warps) is not int or type(shared) is not int or type(scratch) is not int:
        raise TypeError
    if type(offset) is not int or type(size) is not int:
        raise TypeError
    if not (1 <= num_warps <= 32 and shared >= 0 and 0 <= scratch <= _MOST_SCRATCH):
        raise TypeError
    if not (offset >= 0 and 0 < size <= _MOST_BYTES):
        raise TypeError
    return Entry(function, num_warps, shared, scratch, offset, size, digest)


def _shape(raw: Any) -> Any:
    """A config.json without what decides no kernel."""
    if not isinstance(raw, dict):
        return raw
    return {key: _shape(value) for key, value in raw.items()
            if key not in _SAY_NOTHING and not key.endswith(("token_id", "token_ids"))}  # fmt: skip


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
        _refuse_if_open(os.fstat(file.fileno()), path.name)
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{path.name} is larger than {_MOST_BYTES >> 20} MiB")
    return content


def _refuse_if_open(found: os.stat_result, name: str) -> None:
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"others can write to {name}")
