"""Questions about a window of the time series: rates, quantiles of a histogram, shares, means and peaks.

    with Series(path) as series:
        window = series.window(start, end)      # or series.latest(300)
        window.rate("generation_tokens")        # a second, of the seconds that were observed
        window.quantile("time_to_first_token_seconds", 0.95)
"""

import math
import sqlite3
from pathlib import Path
from types import TracebackType

from appliance.series.names import MOST, spellings, split
from appliance.series.store import TIERS, Row, SeriesError, Tier, read_rows
from installer.base.i18n import t


class Window:
    """The rows of a window, and `before`: the last row before it, from which totals are counted."""

    def __init__(self, rows: list[Row], before: Row | None, start: float, end: float) -> None:
        self.rows, self.before, self.start, self.end = rows, before, start, end

    @property
    def seconds(self) -> float:
        """Seconds that were observed: gaps, such as a machine that was off, do not count.

        A window begins with a whole row, so that this and `increase` cover the same time.
        """
        return sum(row.span for row in (self.rows if self.before is not None else self.rows[1:]))

    def increase(self, name: str, **labels: str) -> float:
        """How much a counter grew; the sum over several series."""
        return sum(self._grown(spellings(name), labels).values())

    def rate(self, name: str, **labels: str) -> float:
        """`increase` per second; 0 if nothing was observed."""
        seconds = self.seconds
        return self.increase(name, **labels) / seconds if seconds > 0 else 0.0

    def by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """`increase` for each value of one label."""
        found: dict[str, float] = {}
        for key, grown in self._grown(spellings(name), labels).items():
            value = split(key)[1].get(label, "")
            found[value] = found.get(value, 0.0) + grown
        return found

    def mean(self, name: str, **labels: str) -> float | None:
        """A gauge's mean over the rows; the average over several models."""
        seen = [value for row in self.rows for value in _of(row, spellings(name), labels)]
        return sum(seen) / len(seen) if seen else None

    def most(self, name: str, **labels: str) -> float | None:
        """A gauge's highest value over all its series."""
        names = spellings(name)
        seen = [value for row in self.rows
                for value in (*_of(row, names, labels), *_of(row, {MOST + each for each in names}, labels))]
        return max(seen, default=None)

    def last(self, name: str, **labels: str) -> float | None:
        """The sum of a gauge's series in the newest row that has it."""
        for row in reversed(self.rows):
            if seen := _of(row, spellings(name), labels):
                return sum(seen)
        return None

    def count(self, name: str, **labels: str) -> float:
        """Number of observations of a histogram."""
        return sum(self._grown({f"{each}_count" for each in spellings(name, histogram=True)}, labels).values())

    def quantile(self, name: str, q: float, **labels: str) -> float | None:
        """As Prometheus computes it: linear within a bucket, and the highest finite bound for anything above it. None
        without observations."""
        buckets = self._buckets(name, labels)
        if not buckets or buckets[-1][1] <= 0:
            return None
        rank, lower, below = q * buckets[-1][1], 0.0, 0.0
        for bound, count in buckets:
            if count >= rank:
                if math.isinf(bound):
                    return lower
                inside = count - below
                return lower + (bound - lower) * ((rank - below) / inside if inside > 0 else 1.0)
            lower, below = bound, count
        return lower

    def milliseconds(self, name: str, q: float, **labels: str) -> float | None:
        """`quantile` of a histogram of seconds, in milliseconds."""
        seconds = self.quantile(name, q, **labels)
        return None if seconds is None else seconds * 1000

    def requests_by_status(self) -> dict[str, float]:
        """Requests to the models, by class of status: 2xx, 4xx, 5xx. Classes without a request are left out."""
        found: dict[str, float] = {}
        for handler in ("/v1/chat/completions", "/v1/completions"):
            for status, count in self.by_label("http_requests", "status", method="POST", handler=handler).items():
                if count:
                    found[status] = found.get(status, 0.0) + count
        return found

    def share_below(self, name: str, limit: float, **labels: str) -> float | None:
        """The share of observations up to `limit`, linear within its bucket; None without observations."""
        buckets = self._buckets(name, labels)
        if not buckets or buckets[-1][1] <= 0:
            return None
        whole, lower, below = buckets[-1][1], 0.0, 0.0
        for bound, count in buckets:
            if limit < bound:
                if math.isinf(bound):
                    return below / whole
                return (below + (count - below) * (limit - lower) / (bound - lower)) / whole
            lower, below = bound, count
        return 1.0

    def points(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """A gauge's sum in each row, for a chart: (time, value)."""
        return [(row.at, sum(seen)) for row in self.rows if (seen := _of(row, spellings(name), labels))]

    def rates(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """A counter's rate from row to row, for a chart; nothing across a gap."""
        found = []
        for before, row in zip([self.before, *self.rows], self.rows, strict=False):
            if before is not None and row.span > 0:
                grown = Window([row], before, before.at, row.at).increase(name, **labels)
                found.append((row.at, grown / row.span))
        return found

    def _grown(self, names: set[str] | frozenset[str], labels: dict[str, str]) -> dict[str, float]:
        """A series that first appears within the window began at 0."""
        if not self.rows:
            return {}
        first = self.before.values if self.before is not None else self.rows[0].values
        last: dict[str, float] = {}
        for row in self.rows:  # a sample of a gateway that was down has no counters
            last |= {key: value for key, value in row.values.items() if _matches(key, names, labels)}
        return {key: max(0.0, value - first.get(key, 0.0)) for key, value in last.items()}

    def _buckets(self, name: str, labels: dict[str, str]) -> list[tuple[float, float]]:
        """(upper bound, observations up to it), smallest first."""
        found: dict[float, float] = {}
        for key, grown in self._grown({f"{each}_bucket" for each in spellings(name, histogram=True)}, labels).items():
            bound = float(split(key)[1].get("le", "nan"))
            found[bound] = found.get(bound, 0.0) + grown
        return sorted((bound, count) for bound, count in found.items() if not math.isnan(bound))


class Series:
    """One reader of the file. It holds no lock between two queries. Raises SeriesError."""

    def __init__(self, path: Path, *, tiers: tuple[Tier, ...] = TIERS) -> None:
        self.path, self._tiers = path, tiers
        if not path.is_file():
            raise SeriesError(t("there is no time series yet"))
        try:
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)
            self._db.execute("PRAGMA trusted_schema = OFF")
        except sqlite3.Error as error:
            raise SeriesError(str(error)) from error

    def __enter__(self) -> "Series":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._db.close()

    @property
    def last_at(self) -> float | None:
        """Time of the newest sample."""
        return self._one("SELECT max(at) FROM sample WHERE tier = 0")

    def latest(self, seconds: float) -> Window:
        """The last `seconds` before the newest sample."""
        end = self.last_at or 0.0
        return self.window(end - seconds, end)

    def window(self, start: float, end: float) -> Window:
        """The rows at the finest resolution that reaches back to `start`."""
        try:
            tier = next((number for number in range(len(self._tiers)) if self._reaches(number, start)), None)
            if tier is None:  # none does: take the one that reaches back furthest
                oldest = [(self._one("SELECT min(at) FROM sample WHERE tier = ?", number), number)
                          for number in range(len(self._tiers))]  # fmt: skip
                tier = min(((at, number) for at, number in oldest if at is not None), default=(0, 0))[1]
            rows = read_rows(self._db, tier, start, end)
            if tier:  # the interval that is still open has no coarse row yet
                rows += read_rows(self._db, 0, rows[-1].at if rows else start, end)
            at = self._one("SELECT max(at) FROM sample WHERE tier = ? AND at <= ?", tier, start)
            before = read_rows(self._db, tier, math.nextafter(at, 0), at)[0] if at is not None else None
        except (sqlite3.Error, ValueError) as error:
            raise SeriesError(str(error)) from error
        return Window(rows, before, start, end)

    def _reaches(self, tier: int, start: float) -> bool:
        oldest = self._one("SELECT min(at) FROM sample WHERE tier = ?", tier)
        return oldest is not None and oldest <= start

    def _one(self, query: str, *given: float) -> float | None:
        try:
            return self._db.execute(query, given).fetchone()[0]
        except sqlite3.Error as error:
            raise SeriesError(str(error)) from error


def _matches(key: str, names: set[str] | frozenset[str], labels: dict[str, str]) -> bool:
    if key.partition("{")[0] not in names:
        return False
    if not labels:
        return True
    have = split(key)[1]
    return all(have.get(label) == value for label, value in labels.items())


def _of(row: Row, names: set[str] | frozenset[str], labels: dict[str, str]) -> list[float]:
    return [value for key, value in row.values.items() if _matches(key, names, labels)]
