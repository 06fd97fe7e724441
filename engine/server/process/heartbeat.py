"""When the scheduler loop may feed systemd's watchdog, and when it must check its device."""

import time

from engine.server.process.notify import Notifier

MAX_FAILED_STEPS = 4  # consecutive ones; then the device is asked for a token


class Heartbeat:
    """Feeds the watchdog from the loop itself: a separate thread would go on feeding it while the loop hangs.

    A loop that runs but makes no progress on its work also stops feeding it, after the watchdog's own timeout.
    """

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._moved = time.monotonic()
        self._failed = 0

    @property
    def doubtful(self) -> bool:
        """Several steps in a row have failed: after a sticky CUDA error every later step fails."""
        return self._failed >= MAX_FAILED_STEPS

    def step_done(self, *, moved: bool, failed: bool, succeeded: bool) -> None:
        """Call after each step. `moved`: a request progressed, even if only to its end by an error."""
        if moved:
            self._moved = time.monotonic()
        if succeeded:
            self._failed = 0
        elif failed:
            self._failed += 1

    def device_works(self) -> None:
        """Call when the device has produced a token on request."""
        self._failed = 0

    def beat(self, *, idle: bool) -> None:
        """Call once in each iteration of the loop."""
        now = time.monotonic()
        if idle:
            self._moved = now
        patience = self._notifier.watchdog_seconds
        if patience and now - self._moved < patience:
            self._notifier.watchdog()
