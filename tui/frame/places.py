"""The other screens that open from the frame: imported when they open, so that the frame does not depend on them.

    tui.dashboard.screen(front) -> Screen            F12, 7, the menu
    tui.trouble.screen_for(front, error, step) -> Screen | None   when work ended with an error; None: the pane says it
    tui.trouble.screen_at_start(front) -> Screen | None     when the program opens and something is wrong already
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from textual.screen import Screen

from appliance.service.desk import InstallError
from tui.frame.front import Front


def has_dashboard() -> bool:
    return find_spec("tui.dashboard") is not None


def dashboard(front: Front) -> Screen[Any]:
    return import_module("tui.dashboard").screen(front)


def trouble(front: Front, error: InstallError, step: str) -> Screen[Any] | None:
    return import_module("tui.trouble").screen_for(front, error, step) if find_spec("tui.trouble") is not None else None


def trouble_at_start(front: Front) -> Screen[Any] | None:
    return import_module("tui.trouble").screen_at_start(front) if find_spec("tui.trouble") is not None else None
