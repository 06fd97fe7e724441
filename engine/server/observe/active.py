"""The active requests, for the operator: ids, states, ages and token counts, never content.

A request is listed from when it is sent to its engine until it ends. Its `RequestTracker` counts its tokens anyway, so
the list adds no cost per token.
"""

import time
from collections import Counter
from dataclasses import dataclass

import msgspec

from engine.core.request import EngineRequest
from engine.server.access.caller import Caller
from engine.server.ipc.client import EngineClient
from engine.server.observe.metrics import RequestTracker

_NEWEST = 0.05  # weight of the newest answer in the mean length


class ActiveRow(msgspec.Struct):
    """One sequence. `request_id` is the `X-Request-Id` of its HTTP exchange, `key` the id of the API key."""

    id: str
    request_id: str
    model: str
    key: str
    state: str           # "waiting" in the engine's queue, or "running"
    age_seconds: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0


class ActiveReply(msgspec.Struct):
    requests: list[ActiveRow]   # oldest first
    total: int                  # including those that the list leaves out


@dataclass(frozen=True, slots=True)
class _Entry:
    model: str
    caller: Caller
    request: EngineRequest
    client: EngineClient
    tracker: RequestTracker

    @property
    def state(self) -> str:
        told = self.client.stage(self.request.request_id)
        return told or ("running" if self.tracker.generated else "waiting")

    def row(self, now: float) -> ActiveRow:
        request, tracker = self.request, self.tracker
        return ActiveRow(
            request.request_id, self.caller.request_id, self.model, self.caller.key_id, self.state,
            round(now - tracker.started, 3), len(request.prompt_token_ids), tracker.generated, request.priority)


class ActiveRequests:
    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}  # in order of arrival
        self._usual: dict[str, float] = {}     # model -> mean length of its recent answers, in tokens

    def add(self, model: str, caller: Caller, request: EngineRequest, client: EngineClient,
              tracker: RequestTracker) -> None:
        self._entries[request.request_id] = _Entry(model, caller, request, client, tracker)

    def remove(self, request: EngineRequest) -> None:
        entry = self._entries.pop(request.request_id, None)
        if entry is not None and not request.pooling:
            usual, tokens = self._usual.get(entry.model, 0.0), entry.tracker.generated
            self._usual[entry.model] = usual + _NEWEST * (tokens - usual) if usual else tokens

    def listing(self, most: int) -> ActiveReply:
        now, entries = time.monotonic(), list(self._entries.values())
        return ActiveReply([entry.row(now) for entry in entries[:most]], len(entries))

    def waiting(self, model: str, key: str) -> int:
        """How many sequences of `key` wait for `model`, including those that the engine has not reported on yet."""
        return sum(entry.caller.key_id == key and entry.model == model and entry.state == "waiting"
                   for entry in self._entries.values())

    def waiting_tokens(self, model: str) -> Counter[str]:
        """Key -> the tokens of its requests that wait in the engine's queue: their prompts, and answers of average
        length."""
        usual, found = round(self._usual.get(model, 0.0)), Counter[str]()
        for entry in self._entries.values():
            if entry.model == model and entry.state == "waiting":
                most = entry.request.params.max_tokens
                answer = 0 if entry.request.pooling else usual if most is None else min(usual, most)
                found[entry.caller.key_id] += len(entry.request.prompt_token_ids) + answer
        return found
