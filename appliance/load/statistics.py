"""Samples of one quantity in bounded memory: exact mean, deviation and extremes; percentiles from a uniform sample."""

import math
import random
from collections.abc import Sequence

import numpy as np

PERCENTILES = (50, 90, 95, 99)
_KEPT = 100_000  # samples; above, percentiles come from a uniform sample of this size


class Distribution:
    """Seconds, or any other numbers, added one by one."""

    def __init__(self, kept: int = _KEPT) -> None:
        self.count = 0
        self._kept = kept
        self._samples: list[float] = []
        self._mean = self._squares = 0.0  # Welford's: stable for long runs
        self.least, self.most = math.inf, -math.inf
        self._rng = random.Random(0)  # noqa: S311 - which samples are kept, no secret

    def add(self, value: float) -> None:
        self.count += 1
        delta = value - self._mean
        self._mean += delta / self.count
        self._squares += delta * (value - self._mean)
        self.least, self.most = min(self.least, value), max(self.most, value)
        if len(self._samples) < self._kept:
            self._samples.append(value)
        elif (place := self._rng.randrange(self.count)) < self._kept:
            self._samples[place] = value

    def extend(self, values: Sequence[float]) -> None:
        for value in values:
            self.add(value)

    @property
    def mean(self) -> float:
        return self._mean

    @property
    def deviation(self) -> float:
        return math.sqrt(self._squares / self.count) if self.count else 0.0

    def percentiles(self, wanted: Sequence[float] = PERCENTILES) -> list[float]:
        """0 for each if nothing was added."""
        if not self._samples:
            return [0.0] * len(wanted)
        return [float(value) for value in np.percentile(self._samples, list(wanted))]


class Timeline:
    """Events over time, in at most `most` equal slots: they double their width when the run outgrows them."""

    def __init__(self, most: int = 512, width: float = 0.25) -> None:
        self._most, self.width = most, width
        self._slots: list[list[float]] = []   # tokens, requests begun, requests ended, errors
        self.fields = ("tokens", "begun", "ended", "errors")

    def add(self, seconds: float, field: str, amount: float = 1.0) -> None:
        index = max(0, int(seconds / self.width))
        while index >= self._most:
            self._halve()
            index = int(seconds / self.width)
        while len(self._slots) <= index:
            self._slots.append([0.0] * len(self.fields))
        self._slots[index][self.fields.index(field)] += amount

    def _halve(self) -> None:
        pairs = [self._slots[i : i + 2] for i in range(0, len(self._slots), 2)]
        self._slots = [[sum(values) for values in zip(*pair, strict=True)] for pair in pairs]
        self.width *= 2

    def peak_per_second(self, field: str) -> float:
        """The highest rate per second, or per slot if slots are wider."""
        index, span = self.fields.index(field), max(1, round(1 / self.width))
        values = [slot[index] for slot in self._slots]
        return max((sum(values[i : i + span]) for i in range(len(values))), default=0.0) / (span * self.width)

    def rows(self) -> list[list[float]]:
        """[seconds since the start, tokens, begun, ended, errors] of each slot."""
        return [[round(i * self.width, 3), *slot] for i, slot in enumerate(self._slots)]
