"""Tables of tiles that an operator measured on this server. They are preferred to those that come with Atoll.

`python -m engine.kernels.tuning` writes one file for each kind of GPU, in the directory of compiled kernels:

    tuned/NVIDIA-L40S-8.9-142-99.json      name, compute capability, multiprocessors, KiB of shared memory

A table is only used on the kind of GPU it was measured on. The shipped table (gpu_target.tuned_file) serves other GPUs,
shapes that were not searched, and all shapes if the file cannot be used (a line in the log says why).

Plain Python: the processes that compile kernels read tables, too, and do not load PyTorch.
"""

import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from engine.kernels.runtime.cache_dir import use_cache_dir
from engine.kernels.runtime.gpu_target import Target, name_of

log = logging.getLogger(__name__)

KINDS = ("gemm", "moe")
_FORMAT = 1
_MOST_BYTES = 4 << 20
_MOST_ENTRIES = 10_000

Entry = TypeVar("Entry")


class TableError(ValueError):
    """Why a table cannot be used. The text completes a sentence."""


@dataclass(slots=True)
class Table:
    """The contents of a file. Entries are raw: engine/kernels/gemm/tiles.py and moe/tiles.py check theirs."""

    gemm: list[Any] = field(default_factory=list)
    moe: list[Any] = field(default_factory=list)
    done: list[str] = field(default_factory=list)  # what the tuner has searched already
    tuner: str = ""  # a hash of the tuner and the kernels: if it changes, everything is searched again


def directory() -> Path:
    """The directory of these tables."""
    return use_cache_dir() / "tuned"


def path_for(gpu: Target) -> Path:
    """The path of this GPU's table, which need not exist."""
    name = "-".join("".join(c if c.isascii() and c.isalnum() else " " for c in gpu.name).split())
    return directory() / f"{name}-{name_of(gpu)}.json"


def load(path: Path, gpu: Target) -> Table:
    """Read a table. Raises FileNotFoundError, or TableError if the file is not a table for this GPU."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise TableError(f"it is larger than {_MOST_BYTES >> 20} MiB")
        raw = json.loads(text)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TableError(f"it cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, TableError) else TableError("it is not valid JSON") from error
    if not isinstance(raw, dict) or raw.get("format") != _FORMAT:
        raise TableError(f"it is not a table of format {_FORMAT}")
    if raw.get("gpu") != _facts(gpu):
        raise TableError("it was measured on another GPU")
    table = Table(raw.get("gemm"), raw.get("moe"), raw.get("done"), raw.get("tuner"))  # type: ignore[arg-type]
    lists = table.gemm, table.moe, table.done
    if not all(isinstance(each, list) and len(each) <= _MOST_ENTRIES for each in lists):
        raise TableError("a list is missing or too long")
    if not isinstance(table.tuner, str) or not all(isinstance(each, str) for each in table.done):
        raise TableError("its record of the search is malformed")
    return table


def save(path: Path, gpu: Target, table: Table) -> None:
    """Replace the file atomically: after a power loss, too, there is the old table or the new one. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    body: dict[str, Any] = {"format": _FORMAT, "gpu": _facts(gpu), "tuner": table.tuner}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in body.items()]
    for name in (*KINDS, "done"):
        entries = ",\n  ".join(json.dumps(entry) for entry in getattr(table, name))
        lines.append(f"{json.dumps(name)}: [\n  {entries}\n ]")
    descriptor, new = tempfile.mkstemp(prefix=".tuned-", suffix=".new", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write("{\n " + ",\n ".join(lines) + "\n}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(new)
        raise
    with suppress(OSError):
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


def entries(kind: str, gpu: Target | None, parse: Callable[[Any, Target], Entry]) -> list[Entry]:
    """This server's own entries for `gpu`; none if there is no table, or if it cannot be used.

    `parse` raises TableError for an entry that this GPU cannot run. One such entry makes all entries of this kind
    unusable: if a table was edited by hand or damaged on disk, the rest is not to be trusted either.
    """
    if gpu is None or not gpu.name:
        return []
    try:
        path = path_for(gpu)
        raw = getattr(load(path, gpu), kind)
    except FileNotFoundError:
        return []
    except (TableError, OSError) as error:
        log.warning("%s: %s; the tiles that come with Atoll are used.", path_for(gpu), error)
        return []
    try:
        found = parsed(raw, gpu, parse)
    except TableError as error:
        log.warning("%s: %s: %s; the tiles that come with Atoll are used.", path, kind, error)
        return []
    if found:
        log.info("%s kernels take the tiles that were measured on this server: %s", kind, path)
    return found


def parsed(raw: list[Any], gpu: Target, parse: Callable[[Any, Target], Entry]) -> list[Entry]:
    """All entries, parsed and checked. Raises TableError."""
    found = []
    for number, entry in enumerate(raw, 1):
        try:
            found.append(parse(entry, gpu))
        except TableError as error:
            raise TableError(f"entry {number} {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise TableError(f"entry {number} is malformed") from error
    return found


def number(value: Any, name: str, least: int, most: int, *, power_of_two: bool = False) -> int:
    """`value` if it is a whole number within these bounds. Raises TableError."""
    if type(value) is not int or not least <= value <= most:
        raise TableError(f"has {name} {json.dumps(value)[:40]}, not {least} to {most}")
    if power_of_two and value & (value - 1):
        raise TableError(f"has {name} {value}, not a power of two")
    return value


def _facts(gpu: Target) -> dict[str, Any]:
    return {
        "name": gpu.name, "capability": ".".join(map(str, gpu.capability)), "multiprocessors": gpu.multiprocessors,
        "shared_memory": gpu.shared_memory,
    }  # fmt: skip
