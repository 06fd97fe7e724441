"""The requests that are under way, for the operator: ids, states, ages and counts of tokens; never content.

A request is entered when it goes to its engine and leaves when it ends. Its tokens are counted anyway, by its
`RequestTracker`: the list costs nothing for each token.
"""

import time
from dataclasses import dataclass

import msgspec

from engine.core.request import EngineRequest
from engine.server.http.caller import Caller
from engine.server.http.metrics import RequestTracker
from engine.server.ipc.client import EngineClient


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
    total: int                  # also of those that are left out


@dataclass(frozen=True, slots=True)
class _Entry:
    model: str
    caller: Caller
    request: EngineRequest
    client: EngineClient
    tracker: RequestTracker

    def row(self, now: float) -> ActiveRow:
        tokens = self.tracker.generated
        state = self.client.stage(self.request.request_id) or ("running" if tokens else "waiting")
        return ActiveRow(
            self.request.request_id, self.caller.request_id, self.model, self.caller.key_id, state,
            round(now - self.tracker.started, 3), len(self.request.prompt_token_ids), tokens, self.request.priority)


class ActiveRequests:
    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}  # in the order of their arrival

    def enter(self, model: str, caller: Caller, request: EngineRequest, client: EngineClient,
              tracker: RequestTracker) -> None:
        self._entries[request.request_id] = _Entry(model, caller, request, client, tracker)

    def leave(self, request: EngineRequest) -> None:
        self._entries.pop(request.request_id, None)

    def listing(self, most: int) -> ActiveReply:
        now, entries = time.monotonic(), list(self._entries.values())
        return ActiveReply([entry.row(now) for entry in entries[:most]], len(entries))
