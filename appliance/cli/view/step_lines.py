"""Progress of counted steps on stderr: a line at the start, every few seconds, and at the end."""

import time

from appliance.cli.common import say
from installer.base.i18n import t

_LINE_EVERY = 5.0  # seconds


class StepLines:
    """Lines of one or more stages, one after the other."""

    def __init__(self) -> None:
        self._stage = ""
        self._last = 0.0

    def report(self, words: str, done: int, total: int) -> None:
        """`words`: the name of the stage."""
        now = time.monotonic()
        if words == self._stage and done < total and now - self._last < _LINE_EVERY:
            return
        self._stage, self._last = words, now
        say(t("{stage}: {done} of {total}", stage=words, done=done, total=total), err=True)
