"""The dashboard: the running service on one screen, over the same program as the checklist."""

from typing import Any

from textual.screen import Screen

from tui.frame.front import Front


def screen(front: Front) -> Screen[Any]:
    from tui.dashboard.dashboard import Dashboard

    return Dashboard(front)
