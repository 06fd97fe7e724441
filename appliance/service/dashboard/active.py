"""The active requests, asked of the gateway over its admin socket. The rights of the socket decide who may."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from appliance.service.dashboard.snapshot import ActiveRow
from installer.base.layout import Layout
from installer.service.local_socket import admin_socket, ask

_SECONDS = 2.0
_MOST_BYTES = 4 << 20
_FIELDS = tuple(field.name for field in fields(ActiveRow))


def active_requests(layout: Layout, keys: Sequence[Mapping[str, Any]]) -> tuple[tuple[ActiveRow, ...], int | None]:
    """(the oldest requests, how many there are in all); None where the gateway does not answer on its socket."""
    path = admin_socket(layout)
    body = ask(path, "/requests", seconds=_SECONDS, most=_MOST_BYTES) if path is not None else None
    if body is None:
        return (), None
    names = {str(key["id"]): str(key.get("name") or "") for key in keys}
    try:
        told = json.loads(body)
        rows = [ActiveRow(**{name: row[name] for name in _FIELDS if name in row}) for row in told["requests"]]
        total = int(told["total"])
    except (ValueError, KeyError, TypeError):
        return (), None
    return tuple(_named(row, names) for row in rows), total


def _named(row: ActiveRow, names: Mapping[str, str]) -> ActiveRow:
    return replace(row, key=names.get(row.key) or row.key)
