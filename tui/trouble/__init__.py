"""Trouble is a screen, too: one trouble at a time, the gravest first."""

from appliance.service.desk import InstallError
from tui.frame.front import Front
from tui.trouble.screen import TroubleScreen
from tui.trouble.view import TroubleView

__all__ = ["TroubleScreen", "TroubleView", "screen_at_start", "screen_for"]


def screen_for(front: Front, error: InstallError, step: str) -> TroubleScreen | None:
    """When the work of this step ended with an error that has more to say than the pane can show; None: the pane says
    it."""
    found = front.desk.trouble_of(error)
    return TroubleScreen([found], step) if found is not None else None


def screen_at_start(front: Front) -> TroubleScreen | None:
    """When the program opens and clients already get no answers. What only needs attention waits in the menu."""
    found = [each for each in front.desk.troubles if each.stops]
    return TroubleScreen(found) if found else None
