"""Finds stop strings in a stream of text, across chunks, and never shows a part of one.

Each stop string is followed by a Knuth-Morris-Pratt automaton, so a character costs a few steps however long the
strings are. The automaton's state is how many characters of the text so far could begin the string: that many are held
back. The match that ends first wins (of two that end together, the longer), which does not depend on the chunking.
"""

from collections.abc import Sequence


class StopMatcher:
    """Feed text with `push`; it returns what may be shown. Once `found` is set the text is over."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        # Longest first: the first to match at a character is then the longest.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._links = [_failure_links(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that certainly precedes any stop string (with `include`: up to the end of one)."""
        if not self._stops or self.found is not None:
            return "" if self.found is not None else text
        pending = self._held + text
        for i, character in enumerate(text):
            if (stop := self._advance(character)) is not None:
                self.found, self._held = stop, ""
                end = len(pending) - len(text) + i + 1
                return pending[: end if self._include else end - len(stop)]
        # With `include`, the beginning of a stop string is shown whether or not it completes: hold nothing back.
        hold = 0 if self._include else max(self._states)
        cut = len(pending) - hold
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """The text is over: return what was held back, because it was not a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        match = None
        for index, (stop, links) in enumerate(zip(self._stops, self._links, strict=True)):
            state = self._states[index]
            while state and stop[state] != character:
                state = links[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                match = match or stop
                state = links[state - 1]
            self._states[index] = state
        return match


def _failure_links(pattern: str) -> list[int]:
    """links[i]: length of the longest proper prefix of pattern[:i+1] that is also its suffix."""
    links = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = links[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        links[i] = length
    return links
