"""Where a search stores its results: this server's own table, or the tables that come with Atoll.

Each result is on disk before the next search begins, so a search that was killed continues where it was.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from engine.errors import ConfigError
from engine.kernels.gemm import tiles as gemm_tiles
from engine.kernels.gemm.tiles import GemmShape, VectorTiles
from engine.kernels.moe import tiles as moe_tiles
from engine.kernels.moe.tiles import DecodeTiles, Key, Measured
from engine.kernels.runtime import tuned_tables
from engine.kernels.runtime.gpu_target import H100, Target, name_of
from engine.kernels.runtime.tuned_tables import Table, TableError
from engine.kernels.tuning.rows import say
from engine.kernels.tuning.step_search import Block, Found


class Results(Protocol):
    """The interface between a search and its results."""

    def is_done(self, key: str) -> bool:
        """Whether `key` was searched before."""
        ...

    def keep_found(self, key: str, found: Found) -> None:
        """Store a GEMM's tiles, or a sparse block's for one token."""
        ...

    def keep_measured(self, key: str, measured: Measured) -> None:
        """Store the tiles of a layer's experts for a number of tokens."""
        ...


class OwnTable:
    """The table of this server's GPU (engine/kernels/runtime/tuned_tables.py)."""

    def __init__(self, path: Path, gpu: Target, *, again: bool = False) -> None:
        self.path, self._gpu = path, gpu
        self._gemm: dict[GemmShape, VectorTiles] = {}
        self._moe: dict[Key, Measured] = {}
        self._done: dict[str, None] = {}
        try:
            table = tuned_tables.load(path, gpu)
            self._gemm = dict(tuned_tables.parsed(table.gemm, gpu, gemm_tiles.parse))
            self._moe = {_key(entry): entry for entry in tuned_tables.parsed(table.moe, gpu, moe_tiles.parse)}
        except FileNotFoundError:
            return
        except TableError as error:
            aside = path.with_suffix(".unusable")
            path.replace(aside)
            say(f"{path}: {error}. It is kept as {aside.name}, and the search begins from the start.")
            return
        if table.tuner == _tuner() and not again:
            self._done = dict.fromkeys(table.done)

    def __len__(self) -> int:
        return len(self._gemm) + len(self._moe)

    def is_done(self, key: str) -> bool:
        return key in self._done

    def keep_found(self, key: str, found: Found) -> None:
        part, tiles = found.stage.part, found.tiles
        if isinstance(part, GemmShape) and isinstance(tiles, VectorTiles):
            # Store tiles that equal the rule's, too: without an entry, the shipped table would apply, which was
            # measured on another machine.
            if self._is_usable(key, json.loads(gemm_tiles.line_of(part, tiles)), gemm_tiles.parse):
                self._gemm[part] = tiles
            self._save(key)
        elif isinstance(part, Block) and isinstance(tiles, DecodeTiles):
            self.keep_measured(key, Measured(part.shape, part.width, 1, tiles))

    def keep_measured(self, key: str, measured: Measured) -> None:
        if self._is_usable(key, measured.as_json(), moe_tiles.parse):
            self._moe[_key(measured)] = measured
        self._save(key)

    def _is_usable(self, key: str, entry: Any, parse: Callable[[Any, Target], Any]) -> bool:
        """Whether a later start would accept the entry: a single bad entry would make all others unusable."""
        try:
            tuned_tables.parsed([entry], self._gpu, parse)
        except TableError as error:
            say(f"{key}: not kept, because {error}.")
            return False
        return True

    def _save(self, key: str) -> None:
        self._done[key] = None
        gemm = [json.loads(gemm_tiles.line_of(*entry)) for entry in self._gemm.items()]
        moe = [self._moe[key].as_json() for key in sorted(self._moe, key=str)]
        tuned_tables.save(self.path, self._gpu, Table(gemm, moe, list(self._done), _tuner()))


class ShippedTables:
    """The tables of a checkout, for a release. They do not record what was searched."""

    def __init__(self, gpu: Target, kernels: Path = Path(__file__).parents[1]) -> None:
        name = "tuned.json" if gpu[:3] == H100[:3] else f"tuned-{name_of(gpu)}.json"
        self._gemm, self._moe = kernels / "gemm" / name, kernels / "moe" / name

    def is_done(self, key: str) -> bool:
        return False

    def keep_found(self, key: str, found: Found) -> None:
        part, tiles = found.stage.part, found.tiles
        if isinstance(part, GemmShape) and isinstance(tiles, VectorTiles):
            gemm_tiles.write_measured(self._gemm, part, tiles)
        elif isinstance(part, Block) and isinstance(tiles, DecodeTiles) and found.is_new:
            moe_tiles.write_measured(self._moe, [Measured(part.shape, part.width, 1, tiles)])

    def keep_measured(self, key: str, measured: Measured) -> None:
        moe_tiles.write_measured(self._moe, [measured])


@contextmanager
def only_tuner(directory: Path) -> Iterator[None]:
    """Allow one search at a time, because two on a GPU would disturb each other. Raises ConfigError if another is
    running."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"Another search is running with the tables in {directory}.", hint="Wait for it, or stop it."
            ) from None
        yield
    finally:
        os.close(descriptor)


def _key(entry: Measured) -> Key:
    return *entry.shape, entry.dense_width, entry.tokens


def _tuner() -> str:
    """A hash of the kernels whose tiles are searched, and of the search."""
    kernels, digest = Path(__file__).parents[1], hashlib.sha256()
    for room in ("gemm", "moe", "tuning"):
        for path in sorted((kernels / room).glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def model_key(config: Path, form: str, raw: dict[str, Any]) -> str:
    """A key for a model in a weight format, for `is_done`. Two models with equal shapes but different names are both
    searched."""
    return f"{config.name} {hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()[:8]} {form}"
