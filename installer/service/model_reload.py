"""Has the running gateway read its list of models again: new ones are connected, removed ones finish their requests.

The gateway does the work in the background and answers at once, so that a long drain holds no connection.
"""

import json
import time
from pathlib import Path
from typing import Any

from installer.base.layout import Layout
from installer.service.local_socket import admin_socket, ask

_ANSWER_SECONDS = 5.0
_MOST_BYTES = 1 << 20
_LOOK_SECONDS = 0.1
_LOAD_SECONDS = 120.0   # to read tokenizers from a cold disk


def read(layout: Layout) -> dict[str, Any] | None:
    """What the gateway serves (`FleetReply` of engine/server/gateway/fleet.py); None where it cannot be asked."""
    path = admin_socket(layout)
    return _ask(path, "GET", "/models") if path is not None else None


def reload_models(layout: Layout, drain: float) -> bool:
    """Returns once the change is in force and removed engines have ended their requests, after `drain` seconds at most.

    False if the gateway cannot do it, is of an older release, or could not read the settings: then it has to restart.
    """
    path = admin_socket(layout)
    asked = _ask(path, "POST", f"/models/reload?drain={drain:g}") if path is not None else None
    if path is None or asked is None:
        return False
    end = time.monotonic() + _LOAD_SECONDS
    while (told := _ask(path, "GET", "/models")) is not None and time.monotonic() < end:
        if told["done"] >= asked["reload"]:
            if not told["draining"]:
                return "" not in told["errors"]
            end = max(end, time.monotonic() + _ANSWER_SECONDS)  # it bounds the drain itself
        time.sleep(_LOOK_SECONDS)
    return False


def _ask(path: Path, method: str, target: str) -> dict[str, Any] | None:
    body = ask(path, target, seconds=_ANSWER_SECONDS, most=_MOST_BYTES, method=method)
    try:
        told = json.loads(body or b"")
        return told if isinstance(told, dict) and {"reload", "done", "draining", "errors"} <= told.keys() else None
    except ValueError:
        return None
