"""Quarantine for requests that ran when the engine process died, if they are sent again.

After one crash nobody knows which of the running requests caused it, so all of them are suspects. A suspect may run
again, but only one suspect at a time, until it has passed the point where it was when the engine died; then it is
cleared. If the engine dies with a suspect a second time, that request is refused from then on. Because suspects run one
by one, a request that only ran at the same time as the cause is not refused, even if both are sent again at once.

Suspects are recorded by key, so nobody can have another key's request refused.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from engine.core.request import EngineRequest
from engine.errors import QuarantinedError

log = logging.getLogger("atoll.client")

CRASHES = 2                      # after so many crashes a request is refused
REMEMBERED_SECONDS = 24 * 3600.0
MOST_REMEMBERED = 4096
_UNSENT = 8                      # tokens of steps in flight at the crash, which the client never got

_encoder = msgspec.msgpack.Encoder(order="deterministic")


def fingerprint(request: EngineRequest) -> bytes:
    """A digest that is equal for requests of one key that ask for the same."""
    asked = (request.owner, request.prompt_token_ids, request.params, request.pooling)
    return hashlib.blake2b(_encoder.encode(asked), digest_size=16).digest()


@dataclass(slots=True)
class Suspect:
    crashes: int = 0
    tokens: int = 0     # length of its answer when the engine died
    at: float = 0.0     # monotonic time of the last crash

    @property
    def refused(self) -> bool:
        return self.crashes >= CRASHES


class Quarantine:
    """The quarantine of one engine."""

    def __init__(self) -> None:
        self._suspects: dict[bytes, Suspect] = {}
        self._holder: bytes | None = None  # the suspect that is running
        self._holders = 0                  # number of its requests: equal ones may run together
        self._free = asyncio.Event()
        self.held = 0                      # suspects that wait for another one

    def __bool__(self) -> bool:
        return bool(self._suspects)

    @property
    def refused(self) -> int:
        """How many requests are refused now."""
        return sum(suspect.refused for suspect in self._suspects.values())

    def crashed(self, ran: Iterable[tuple[EngineRequest, int]]) -> None:
        """Call when the engine process died while these requests ran; with each, the length of its answer so far."""
        now, blamed = time.monotonic(), set[bytes]()
        for request, tokens in ran:
            key = fingerprint(request)
            suspect = self._suspects.pop(key, None) or Suspect()
            suspect.crashes += key not in blamed
            suspect.tokens, suspect.at = max(tokens, suspect.tokens if key in blamed else 0), now
            blamed.add(key)
            self._suspects[key] = suspect  # the newest is the last
            what = "is refused from now on" if suspect.refused else "is a suspect"
            log.error("request %s ran when the engine died, %d times now: it %s", request.request_id, suspect.crashes,
                      what, extra={"fields": {"fingerprint": key.hex(), "key": request.owner}})
        while len(self._suspects) > MOST_REMEMBERED:
            del self._suspects[next(iter(self._suspects))]

    def find(self, key: bytes) -> Suspect | None:
        suspect = self._suspects.get(key)
        if suspect is not None and time.monotonic() - suspect.at > REMEMBERED_SECONDS:
            del self._suspects[key]
            return None
        return suspect

    async def admit(self, request: EngineRequest) -> "Trial | None":
        """If this request is a suspect, wait until no other suspect runs. Raises QuarantinedError.

        The caller must end the trial that this returns.
        """
        key = fingerprint(request)
        while (suspect := self.find(key)) is not None:
            if suspect.refused:
                raise QuarantinedError(
                    f"This very request ran {suspect.crashes} times when the engine died, so it is not run again for a "
                    "day. Change it, or ask the operator, who finds it in the server's log.")
            if self._holder in (None, key):
                self._holder, self._holders = key, self._holders + 1
                return Trial(self, key, suspect.tokens)
            self._free.clear()
            self.held += 1
            try:
                await self._free.wait()
            finally:
                self.held -= 1
        return None

    def release(self, key: bytes, *, cleared: bool) -> None:
        if cleared and (suspect := self._suspects.get(key)) is not None and not suspect.refused:
            del self._suspects[key]
        self._holders -= 1
        if not self._holders:
            self._holder = None
            self._free.set()


@dataclass(frozen=True, slots=True)
class Trial:
    """A running suspect. `tokens`: the length of its answer when the engine died."""

    quarantine: Quarantine
    key: bytes
    tokens: int

    def passed(self, tokens: int) -> bool:
        """Whether an answer of `tokens` is past the point at which the engine died."""
        return tokens > self.tokens + _UNSENT

    def end(self, *, cleared: bool) -> None:
        self.quarantine.release(self.key, cleared=cleared)
