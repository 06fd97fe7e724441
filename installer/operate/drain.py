"""`atoll drain`: let running requests finish before maintenance, without stopping anything."""

import time
from collections.abc import Callable

from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.operate.lifecycle import history_of
from installer.service import drain_state
from installer.service.drain_state import DrainState

_LOOK_SECONDS = 0.5


def drain(
    layout: Layout, *, wait: float = 0.0, progress: Callable[[DrainState], None] = lambda state: None
) -> DrainState:
    """Refuse new requests, and wait at most `wait` seconds for the running ones.

    `progress` is called with each state that was read. Raises InstallError: nothing installed (2), the gateway does not
    answer (40), somebody ended the drain meanwhile (75).
    """
    state = _switch(layout, on=True)
    end = time.monotonic() + wait
    while state.in_flight and time.monotonic() < end:
        progress(state)
        time.sleep(_LOOK_SECONDS)
        state = drain_state.read(layout) or _no_answer(layout)
        if not state.draining:
            raise InstallError(
                t("The drain was ended meanwhile: the service accepts requests again."), exit_code=ExitCode.BUSY,
                changed=t("Nothing was stopped."), hint="atoll drain")
    return state


def undrain(layout: Layout) -> DrainState:
    """Take requests again. Raises as `drain` does."""
    return _switch(layout, on=False)


def _switch(layout: Layout, *, on: bool) -> DrainState:
    history_of(layout)
    return drain_state.switch(layout, on=on) or _no_answer(layout)


def _no_answer(layout: Layout) -> DrainState:
    raise InstallError(
        t("The gateway does not answer on its admin socket."), exit_code=ExitCode.UNHEALTHY,
        why=t("The service does not run, or this user may not ask it: only its owner and root may."),
        changed=t("Nothing was changed."), hint=f"atoll status{layout.prefix_option}")
