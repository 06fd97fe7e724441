"""How tests look at a screen: its rows as a terminal would show them, and patience."""

import time
from collections.abc import Callable
from typing import Any

from rich.cells import cell_len
from textual.app import App


def rows(app: App[Any]) -> list[str]:
    return ["".join(part.text for part in strip) for strip in app.screen._compositor.render_strips()]


def seen(app: App[Any]) -> str:
    return "\n".join(rows(app))


def widths(app: App[Any]) -> set[int]:
    return {cell_len(row) for row in rows(app)}


async def until(pilot: Any, true: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, seen(pilot.app)
        await pilot.pause(0.05)
