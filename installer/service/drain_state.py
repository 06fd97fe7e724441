"""Whether the gateway is draining: it refuses new requests with 503 and Retry-After, and lets running ones finish.

Only the gateway process holds this state, so a restarted gateway accepts requests.
"""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from installer.base.layout import Layout
from installer.service.local_socket import admin_socket, ask

_SECONDS = 5.0
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class DrainState:
    """`in_flight`: requests whose answers have not ended."""

    draining: bool
    in_flight: int

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def is_cause(health: str) -> bool:
    """Whether /health (its answer as `smoke_test.health` returns it) says 503 only because of a drain: the engines are
    healthy."""
    return '"code":"draining"' in health


def read(layout: Layout) -> DrainState | None:
    """None where the gateway does not answer on its admin socket."""
    return _ask(layout, "GET")


def switch(layout: Layout, *, on: bool) -> DrainState | None:
    """Refuse new requests, or accept them again. None if the gateway does not answer: then nothing was changed."""
    return _ask(layout, "POST" if on else "DELETE")


def _ask(layout: Layout, method: Literal["GET", "POST", "DELETE"]) -> DrainState | None:
    path = admin_socket(layout)
    body = ask(path, "/drain", seconds=_SECONDS, most=_MOST_BYTES, method=method) if path is not None else None
    try:
        told = json.loads(body or b"")
        return DrainState(bool(told["draining"]), int(told["in_flight"]))
    except (ValueError, KeyError, TypeError):
        return None
