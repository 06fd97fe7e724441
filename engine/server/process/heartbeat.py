"""When the scheduler loop may tell systemd that it lives, and when it must doubt its device."""

import time

from engine.server.process.notify import Notifier

MAX_FAILED_STEPS = 4  # in a row; then the device must show that it still makes tokens


class Pulse:
    """Feeds the watchdog from the loop itself: a thread beside it would go on pinging for a loop that hangs.

    A loop that turns but moves nothing although there is work falls silent too, after the watchdog's own patience.
    """

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._moved = time.monotonic()
        self._failed = 0

    @property
    def doubtful(self) -> bool:
        """Step after step has failed and none succeeded: a device with a sticky error fails everything for ever."""
        return self._failed >= MAX_FAILED_STEPS

    def worked(self, *, moved: bool, failed: bool, succeeded: bool) -> None:
        """Call after each step. `moved`: a request got somewhere, even if it was to its end by an error."""
        if moved:
            self._moved = time.monotonic()
        if succeeded:
            self._failed = 0
        elif failed:
            self._failed += 1

    def proved(self) -> None:
        """The device made a token, or there is nothing to do."""
        self._failed = 0

    def beat(self, *, idle: bool) -> None:
        """Call once a turn."""
        now = time.monotonic()
        if idle:
            self._moved = now
        patience = self._notifier.watchdog_seconds
        if patience and now - self._moved < patience:
            self._notifier.watchdog()
