"""Signs of something wrong: texts that repeat themselves, meaningless probabilities, series that grow."""

import itertools
import math
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from installer.base.i18n import t

_LEAST = 200             # characters; in shorter texts repetition means nothing
_LOOP_SHARE = 0.5        # share of the text that one repeated piece takes up
_LOOP_TIMES = 4
_COMPRESSED = 0.12       # relative size after compression: English and Korean prose stay above 0.3
_NEARLY = 1e-4


@dataclass(frozen=True, slots=True)
class Repetition:
    """`piece` repeats `times` times in a row and takes up `share` of the text. `compressed`: its size, packed."""

    piece: str = ""
    times: int = 0
    share: float = 0.0
    compressed: float = 1.0

    @property
    def found(self) -> bool:
        return (self.times >= _LOOP_TIMES and self.share >= _LOOP_SHARE) or self.compressed < _COMPRESSED


def repetition(text: str) -> Repetition:
    """How much of `text` repeats itself."""
    text = " ".join(text.split())
    if len(text) < _LEAST:
        return Repetition()
    data = text.encode()
    compressed = len(zlib.compress(data, 9)) / len(data)
    best = Repetition(compressed=compressed)
    for period in range(1, min(len(text) // _LOOP_TIMES, 240) + 1):
        run = longest = end = 0
        for i in range(period, len(text)):
            run = run + 1 if text[i] == text[i - period] else 0
            if run > longest:
                longest, end = run, i
        share = (longest + period) / len(text) if longest else 0.0
        if longest >= period * (_LOOP_TIMES - 1) and share > best.share:
            piece = text[end - period + 1 : end + 1]
            best = Repetition(piece, (longest + period) // period, share, compressed)
    return best


def saturation(entries: Sequence[dict[str, Any]]) -> str:
    """What is wrong with the log-probabilities of an answer (`logprobs.content` of a chat); empty if nothing is.

    Broken arithmetic shows as invalid numbers, as certainty for each token, or as equal values for every candidate.
    """
    chosen: list[Any] = [entry.get("logprob") for entry in entries]
    if not chosen:
        return t("there are no log-probabilities")
    if any(not isinstance(value, int | float) or math.isnan(value) or value > _NEARLY for value in chosen):
        return t("{value} is not a log-probability", value=str(next(v for v in chosen if not _good(v))))
    tops = [[each.get("logprob", 0.0) for each in entry.get("top_logprobs") or []] for entry in entries]
    tops = [[value for value in top if _good(value)] for top in tops]
    if any(sum(math.exp(value) for value in top) > 1 + 1e-3 for top in tops):
        return t("the probabilities of one token add up to more than 1")
    if len(chosen) >= 8 and all(value > -1e-6 for value in chosen):
        return t("every token has probability 1")
    if len(tops) >= 8 and all(len(top) > 1 and max(top) - min(top) < _NEARLY for top in tops):
        return t("all candidates are equally likely")
    return ""


def _good(value: Any) -> bool:
    return isinstance(value, int | float) and not math.isnan(value) and value <= _NEARLY


@dataclass(frozen=True, slots=True)
class Growth:
    """From the median of the second fifth of a series to that of its last: `grown`, and whether it rises throughout."""

    before: float
    after: float
    steady: bool

    @property
    def grown(self) -> float:
        return self.after - self.before


def growth(values: Sequence[float]) -> Growth | None:
    """None for fewer than 10 values. The first fifth is warm-up. Steady: each later fifth is above the one before."""
    if len(values) < 10:
        return None
    fifth = len(values) / 5
    medians = [statistics.median(values[int(i * fifth) : int((i + 1) * fifth)]) for i in range(5)]
    steady = all(later > earlier for earlier, later in itertools.pairwise(medians[1:]))
    return Growth(medians[1], medians[-1], steady)
