"""How good a trial was, and when another one counts as better. Pure."""

from dataclasses import dataclass
from typing import Any

MARGIN = 0.05  # a smaller difference is noise: two runs of one setting differ by as much


@dataclass(frozen=True, slots=True)
class Score:
    """`goodput`: requests per second within all limits; without limits, all that were answered.

    `excess`: how far the worst limit was missed at the 95th percentile, 0.2 for 20 %; 0 if all were met. `rate`: output
    tokens per second.
    """

    goodput: float
    excess: float
    rate: float

    @property
    def met(self) -> bool:
        return self.excess <= 0

    def to_json(self) -> dict[str, float]:
        return {"goodput": self.goodput, "excess": self.excess, "rate": self.rate}

    @classmethod
    def of_json(cls, facts: dict[str, Any]) -> "Score":
        return cls(*(float(facts[name]) for name in ("goodput", "excess", "rate")))


def beats(one: Score, other: Score, margin: float = MARGIN) -> bool:
    """Whether `one` is better by more than noise: limits met, then goodput, then nearness to the limits, then rate."""
    if one.met != other.met:
        return one.met and not _less(one.goodput, other.goodput, margin)
    if _less(other.goodput, one.goodput, margin):
        return True
    if _less(one.goodput, other.goodput, margin):
        return False
    if not one.met and abs(one.excess - other.excess) > margin * (1 + other.excess):
        return one.excess < other.excess
    return _less(other.rate, one.rate, margin)


def _less(one: float, other: float, margin: float) -> bool:
    return one < other * (1 - margin)
