"""Rate limits of keys: requests and tokens per minute, each a token bucket that holds one minute's worth."""

import time
from collections.abc import Callable


class Bucket:
    """A bucket that refills steadily with `per_minute` units a minute and holds at most that many."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_second = per_minute / 60
        self._capacity = self._level = per_minute
        self._at = now

    def wait_for(self, units: float, now: float) -> float:
        """Seconds until the bucket holds `units`; 0 if it does now."""
        self._level = min(self._capacity, self._level + (now - self._at) * self._per_second)
        self._at = now
        return max(0.0, units - self._level) / self._per_second

    @property
    def state(self) -> tuple[int, int, float]:
        """(units per minute, whole units left, seconds until it is full), as of the last `wait_for`."""
        return (round(self._capacity), max(0, int(self._level)),
                max(0.0, self._capacity - self._level) / self._per_second)

    def take(self, units: float) -> None:
        """Take units. The level may become negative, because an answer's length is only known at its end."""
        self._level -= units


class Rates:
    """The buckets of all keys. A rate of 0 means no limit."""

    def __init__(self, requests_per_minute: int, tokens_per_minute: int,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._requests_per_minute, self._tokens_per_minute = requests_per_minute, tokens_per_minute
        self._clock = clock
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}

    def admit(self, key: str) -> float:
        """Count a request of `key` and return 0, or count nothing and return the seconds until it may come."""
        wait, now = 0.0, self._clock()
        if self._tokens_per_minute:
            tokens = self._tokens.get(key) or self._tokens.setdefault(key, Bucket(self._tokens_per_minute, now))
            wait = tokens.wait_for(1, now)
        if self._requests_per_minute:
            requests = self._requests.get(key) or self._requests.setdefault(key, Bucket(self._requests_per_minute, now))
            wait = max(wait, requests.wait_for(1, now))
            if not wait:
                requests.take(1)
        return wait

    def headers(self, key: str) -> list[tuple[bytes, bytes]]:
        """What is left of the key's rates after its last request, as headers with OpenAI's names."""
        found = []
        for name, buckets in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket := buckets.get(key):
                limit, left, reset = bucket.state
                for what, value in (("limit", str(limit)), ("remaining", str(left)), ("reset", _duration(reset))):
                    found.append((f"x-ratelimit-{what}-{name}".encode(), value.encode()))
        return found

    def spend(self, key: str, tokens: int) -> None:
        """Count the tokens of an answer that has ended, prompt included."""
        if bucket := self._tokens.get(key):
            bucket.take(tokens)


def _duration(seconds: float) -> str:
    """A duration in OpenAI's format: 6m0s, 1.5s, 20ms."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 1), 60)
    return (f"{minutes:.0f}m" if minutes else "") + f"{rest:.1f}".removesuffix(".0") + "s"
