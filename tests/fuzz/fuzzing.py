"""The loop of all fuzzers: cases of one seed, one after another, until the time is over or one fails."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from mutations import Chance

CASE_SECONDS = 100.0  # a case that takes longer hangs


class Defect(AssertionError):
    """Something that must not happen, whatever the input is."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is fuzzed. `session` opens it and gives the function that tries one case; closing it checks what is left."""

    name: str
    session: Callable[[], AbstractContextManager[Callable[[Chance], None]]]


def fuzz(target: Target, *, seconds: float, seed: int, first: int = 0, most: int | None = None) -> int:
    """How many cases were tried, each with a `Chance` of its own. Raises Defect naming the one that failed."""
    with target.session() as attempt:
        number, deadline = first, time.monotonic() + seconds
        while time.monotonic() < deadline and (most is None or number < first + most):
            began = time.monotonic()
            try:
                attempt(Chance(f"{seed} {number}"))
            except Exception as error:
                raise Defect(f"{target.name}: seed {seed}, case {number}: {type(error).__name__}: {error}") from error
            if (took := time.monotonic() - began) > CASE_SECONDS:
                raise Defect(f"{target.name}: seed {seed}, case {number} took {took:.0f} seconds")
            number += 1
    return number - first
