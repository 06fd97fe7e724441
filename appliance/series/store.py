"""The file of a time series: SQLite in WAL mode, a bounded number of rows at three resolutions.

SQLite, because it handles what this file must survive: a power cut keeps every committed row (synchronous=FULL: the log
is synced at each), a full disk rolls back one row, and readers never wait for the writer. A row is one sample of
everything: its values as packed numbers, and its names stored once for all rows that share them.

Counters are stored as totals that never fall. When the gateway restarts and counts from 0 again, the new counts are
added to the old total, so a row of any resolution can be subtracted from any other. The growth of a counter while
nobody took samples is left out, as that time is: both sides of a rate must cover the same seconds.
"""

import contextlib
import json
import os
import sqlite3
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from appliance.series.names import MOST, MOST_SERIES, is_counter
from installer.base.i18n import t

VERSION = 1
_STEP = 5.0             # seconds by which somebody has set the clock
_MOST_PACKED = 8 * 2 * MOST_SERIES


class SeriesError(Exception):
    """A sample could not be kept, or the file cannot be read. Everything that was committed stays."""


@dataclass(frozen=True, slots=True)
class Tier:
    """Rows of one resolution. `seconds`: time covered by one row; 0: as sampled."""

    seconds: float
    rows: int


TIERS = (Tier(0.0, 20_000), Tier(60.0, 20_160), Tier(900.0, 35_136))  # 2 days at 10 s, 2 weeks, a year

_SCHEMA = """
CREATE TABLE IF NOT EXISTS layout(id INTEGER PRIMARY KEY, names TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS sample(tier INTEGER, at REAL, span REAL, layout INTEGER, data BLOB,
  PRIMARY KEY(tier, at)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counter(key TEXT PRIMARY KEY, last REAL, total REAL) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Row:
    """`at`: its end, in seconds since 1970. `span`: observed seconds before it."""

    at: float
    span: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Opened:
    """`set_aside`: path of a damaged file that was replaced by a new one."""

    set_aside: Path | None = None


class Store:
    """The one writer. Use as a context manager. Raises SeriesError."""

    def __init__(self, path: Path, *, tiers: tuple[Tier, ...] = TIERS, most_gap: float = 60.0) -> None:
        self.path, self.tiers, self.most_gap = path, tiers, most_gap
        self.opened = Opened()
        self._db: sqlite3.Connection | None = None
        self._layouts: dict[tuple[str, ...], int] = {}
        self._counters: dict[str, tuple[float, float]] = {}
        self.last_at = 0.0

    def __enter__(self) -> "Store":
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and not _damaged(error):
                raise SeriesError(_why(error)) from error
            self.opened = Opened(self._set_aside())
            try:
                self._open()
            except sqlite3.Error as again:
                raise SeriesError(_why(again)) from again
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def add(self, at: float, values: Mapping[str, float]) -> float:
        """Keep one sample. Returns its time, which is never before the last one.

        If it raises SeriesError, nothing of the sample is kept; a counter's growth is kept with the next one.
        """
        db = self._connection
        at = max(at, self.last_at + 0.001)  # the clock was set back
        span = at - self.last_at if self.last_at and at - self.last_at <= self.most_gap else 0.0
        counters = {
            name: self._total(name, value, observed=span > 0) for name, value in values.items() if is_counter(name)
        }
        row = {**values, **{name: total for name, (_, total) in counters.items()}}
        try:
            with db:
                db.execute("BEGIN IMMEDIATE")
                self._insert(0, Row(at, span, row))
                db.executemany("INSERT OR REPLACE INTO counter VALUES (?, ?, ?)",
                               [(name, *pair) for name, pair in counters.items()])  # fmt: skip
                for number in range(1, len(self.tiers)):
                    self._close_bin(number, at)
                self._forget()
        except sqlite3.Error as error:
            self._layouts.clear()  # layouts that were rolled back must not be referred to
            raise SeriesError(_why(error)) from error
        self._counters |= counters
        self.last_at = at
        return at

    def _total(self, name: str, value: float, *, observed: bool) -> tuple[float, float]:
        """What the gateway reported, and the total. A value below the last one means a restart from 0."""
        last, total = self._counters.get(name, (0.0, 0.0))
        return value, total + ((value - last if value >= last else value) if observed else 0.0)

    def _close_bin(self, number: int, at: float) -> None:
        """Combine the finer tier's rows of the last finished interval into one row of this tier."""
        width = self.tiers[number].seconds
        end = at // width * width
        if not self.last_at or self.last_at >= end:
            return  # the bin of the last sample is still open
        start = self.last_at // width * width
        finer = read_rows(self._connection, number - 1, start, start + width)
        if finer:
            self._insert(number, combined(finer))

    def _insert(self, tier: int, row: Row) -> None:
        names = tuple(sorted(row.values))
        layout = self._layouts.get(names)
        if layout is None:
            text = json.dumps(names)
            self._connection.execute("INSERT OR IGNORE INTO layout(names) VALUES (?)", (text,))
            layout = self._connection.execute("SELECT id FROM layout WHERE names = ?", (text,)).fetchone()[0]
            self._layouts[names] = layout
        packed = zlib.compress(struct.pack(f"<{len(names)}d", *(row.values[name] for name in names)), 1)
        self._connection.execute("INSERT OR REPLACE INTO sample VALUES (?, ?, ?, ?, ?)",
                                 (tier, row.at, row.span, layout, packed))  # fmt: skip

    def _forget(self) -> None:
        for number, tier in enumerate(self.tiers):
            self._connection.execute(
                "DELETE FROM sample WHERE tier = ? AND at <= (SELECT at FROM sample WHERE tier = ? ORDER BY at DESC "
                "LIMIT 1 OFFSET ?)", (number, number, tier.rows))  # fmt: skip

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise SeriesError(t("the file is not open"))
        return self._db

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            os.close(os.open(self.path, flags, 0o600))
        except OSError as error:
            raise SeriesError(error.strerror or str(error)) from error
        db = self._db = sqlite3.connect(self.path, timeout=5.0, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")  # a row is on the disk when `add` returns
            db.execute("PRAGMA trusted_schema = OFF")
            db.execute("PRAGMA journal_size_limit = 4194304")
            if db.execute("PRAGMA quick_check").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("database disk image is malformed")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError("another version of this file")
            db.executescript(_SCHEMA)
            db.execute(f"PRAGMA user_version = {VERSION}")
            db.execute("DELETE FROM layout WHERE id NOT IN (SELECT DISTINCT layout FROM sample)")
            self._counters = {name: (last, total) for name, last, total in db.execute("SELECT * FROM counter")}
            self.last_at = db.execute("SELECT coalesce(max(at), 0) FROM sample WHERE tier = 0").fetchone()[0]
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _set_aside(self) -> Path:
        """Keep a damaged file beside the new one; only the latest."""
        self._close()
        aside = self.path.with_name(self.path.name + ".damaged")
        with contextlib.suppress(OSError):
            os.replace(self.path, aside)
        for end in ("-wal", "-shm"):
            with contextlib.suppress(OSError):
                os.unlink(f"{self.path}{end}")
        return aside


def combined(rows: list[Row]) -> Row:
    """One row for several: the last total of each counter, each gauge's mean and highest value."""
    values: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row.values):
        seen = [row.values[name] for row in rows if name in row.values]
        if is_counter(name):
            values[name] = seen[-1]
        elif name.startswith(MOST):
            values[name] = max(seen)
        else:
            values[name] = sum(seen) / len(seen)
            highest = [row.values.get(MOST + name, row.values[name]) for row in rows if name in row.values]
            values[MOST + name] = max(highest)
    return Row(rows[-1].at, sum(row.span for row in rows), values)


def read_rows(
    db: sqlite3.Connection, tier: int, start: float, end: float, *, names: Callable[[str], bool] | None = None
) -> list[Row]:
    """Rows with start < at ≤ end, oldest first. Raises sqlite3.Error; ValueError for content that no writer of ours
    wrote."""
    found = []
    layouts: dict[int, list[str]] = {}
    query = "SELECT at, span, layout, data FROM sample WHERE tier = ? AND at > ? AND at <= ? ORDER BY at"
    for at, span, layout, data in db.execute(query, (tier, start, end)).fetchall():
        if layout not in layouts:
            text = db.execute("SELECT names FROM layout WHERE id = ?", (layout,)).fetchone()
            layouts[layout] = json.loads(text[0]) if text else []
        keys = layouts[layout]
        packed = zlib.decompressobj().decompress(data, _MOST_PACKED)
        if len(packed) != 8 * len(keys):
            raise ValueError("a row does not fit its names")
        values = zip(keys, struct.unpack(f"<{len(keys)}d", packed), strict=True)
        found.append(Row(at, span, {name: value for name, value in values if names is None or names(name)}))
    return found


def _damaged(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _why(error: sqlite3.Error) -> str:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return t("the disk is full")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return t("another process is writing it")
    return str(error)


def wall_clock() -> Callable[[], float]:
    """The time of day, counted on by a monotonic clock, so that slewing does not distort a rate. After a step of the
    time of day it starts again from the new time: a sampler that runs for months must not keep a time that was wrong at
    boot.
    """
    begun = time.time() - time.monotonic()

    def now() -> float:
        nonlocal begun
        fresh = time.time() - time.monotonic()
        if abs(fresh - begun) > _STEP:
            begun = fresh
        return begun + time.monotonic()

    return now
