"""How long a new request would wait in an engine's queue: the tokens ahead of it, by the speed that was measured.

The speed is that of seconds in which something waited: an engine that has nothing to do is slow for no reason. Keys
take turns (engine/core/waiting.py), so a key with nothing in the queue waits for one turn of each other key.
"""

import math
import time
from collections.abc import Callable, Mapping

from engine.core.request import EngineStats

SAMPLE_SECONDS = 1.0
_MEMORY_SECONDS = 20.0   # of the mean speed
_FIRST_TURN = 256        # tokens of a request whose length is not known yet


class ExpectedWait:
    """Of one engine. `sample` once a second, `seconds` for each request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._speed = 0.0                # tokens a second; 0: nothing has waited yet
        self._waiting: dict[str, int] = {}
        self._before: tuple[float, int, int] | None = None  # time, tokens, sequences that waited

    def sample(self, stats: EngineStats, waiting: Mapping[str, int]) -> None:
        """`waiting`: tokens (prompts, and answers as long as usual) of each key that wait in the engine's queue."""
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
        """For a new request of `key`; 0 where nothing is known."""
        if not self._speed:
            return 0.0
        own = self._waiting.get(key, 0)
        turn = own + _FIRST_TURN
        ahead = own + sum(min(tokens, turn) for other, tokens in self._waiting.items() if other != key)
        return ahead / self._speed
