"""Estimates how long a new request would wait in an engine's queue: the tokens ahead of it, divided by measured speed.

The speed is measured only in seconds in which some request waited, because an idle engine says nothing about its speed.
Keys take turns (engine/core/waiting.py), so a key with nothing in the queue waits for one turn of each other key.
"""

import math
import time
from collections.abc import Callable, Mapping

from engine.core.request import EngineStats

SAMPLE_SECONDS = 1.0
_MEMORY_SECONDS = 20.0   # time constant of the mean speed
_FIRST_TURN = 256        # tokens of a request whose length is not known yet


class ExpectedWait:
    """The estimate for one engine. Call `sample` once a second and `seconds` for each request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._speed = 0.0                # tokens per second; 0: no request has waited yet
        self._waiting: dict[str, int] = {}
        self._before: tuple[float, int, int] | None = None  # time, tokens, sequences that waited

    def sample(self, stats: EngineStats, waiting: Mapping[str, int]) -> None:
        """`waiting`: each key's tokens in the engine's queue (its prompts, and answers of average length)."""
        now, tokens = self._clock(), stats.prompt_tokens + stats.generation_tokens
        self._waiting = dict(waiting)
        if self._before is not None:
            at, done, waited = self._before
            if waited and stats.num_waiting and tokens >= done and now > at:
                speed = (tokens - done) / (now - at)
                share = 1 - math.exp((at - now) / _MEMORY_SECONDS)
                self._speed = self._speed + share * (speed - self._speed) if self._speed else speed
        self._before = now, tokens, stats.num_waiting

    def seconds(self, key: str) -> float:
        """The expected wait of a new request of `key`; 0 if nothing is known yet."""
        if not self._speed:
            return 0.0
        own = self._waiting.get(key, 0)
        turn = own + _FIRST_TURN
        ahead = own + sum(min(tokens, turn) for other, tokens in self._waiting.items() if other != key)
        return ahead / self._speed
