"""The text of an answer as a parser reads it. It arrives in pieces of any size, which must make no difference.

A parser is a generator that yields while it waits for more (`Reading`). Between marks (tokens recognised by their id)
there is a run of text. What the parser has not consumed stays in the run, so it can look ahead.
"""

import re
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
_SPACES = re.compile(r"\s+")
_LONGEST = 64  # characters of the longest literal that is searched for


class BrokenCall(Exception):
    """What the model wrote is not a valid call, or exceeds a limit."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A control token. `by_id`: the model produced the token itself, not text that looks like it."""

    literal: str
    by_id: bool = True


Part = str | Mark


class Source:
    def __init__(self) -> None:
        self._run, self._at = "", 0
        self._later: deque[Part] = deque()  # begins with a mark, which ends the run
        self._recorded: list[str] | None = None
        self._budget = 0
        self._as_text: frozenset[str] = frozenset()
        self.foreign: frozenset[str] = frozenset()  # marks that are text inside the values of a call
        self.ended = False

    def feed(self, part: Part) -> None:
        if self._later or isinstance(part, Mark):
            self._later.append(part)
        else:
            self._run, self._at = self._run[self._at :] + part, 0

    # -- looking ahead

    def matching(self, pattern: re.Pattern[str]) -> int:
        """How many characters of the run match."""
        match = pattern.match(self._run, self._at)
        return match.end() - self._at if match else 0

    def more(self) -> Reading[bool]:
        """Wait until the run is longer. Returns False if a mark or the end follows it."""
        before = len(self._run) - self._at
        while len(self._run) - self._at == before:
            if self._later:
                if self._later[0].literal not in self._as_text:  # type: ignore[union-attr]
                    return False
                self._absorb()
            elif self.ended:
                return False
            else:
                yield
        return True

    def character(self) -> Reading[str]:
        """The next character, not consumed; "" before a mark and at the end."""
        while self._at == len(self._run):
            if not (yield from self.more()):
                return ""
        return self._run[self._at]

    def ahead(self, count: int) -> Reading[str]:
        """The character `count` characters after the next."""
        while self._at + count >= len(self._run):
            if not (yield from self.more()):
                return ""
        return self._run[self._at + count]

    def starts_with(self, literal: str, after: int = 0) -> Reading[bool]:
        """Whether the run goes on with `literal`, `after` characters ahead."""
        while True:
            begin = self._at + after
            available = self._run[begin : begin + len(literal)]
            if available == literal or not literal.startswith(available):
                return available == literal
            if not (yield from self.more()):
                return False

    def mark(self) -> Mark | None:
        """The mark that follows, if the run is consumed. None: not yet, or the end."""
        return self._later[0] if self._at == len(self._run) and self._later else None  # type: ignore[return-value]

    def text_mark(self) -> bool:
        """Make the mark that follows part of the run, if it is text that spells one. Returns whether it is."""
        mark = self.mark()
        if mark is None or mark.by_id:
            return False
        self._absorb()
        return True

    # -- consuming

    def take(self, count: int) -> str:
        """The next characters, fewer if the limit of a call is reached. Raises BrokenCall beyond the limit."""
        if self._recorded is not None:
            if not self._budget and count:
                raise BrokenCall
            count = min(count, self._budget)
            self._budget -= count
        text = self._run[self._at : self._at + count]
        self._at += count
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def take_mark(self) -> Mark:
        mark = self._absorb(as_text=False)
        if self._recorded is not None:
            self._recorded.append(mark.literal)
        return mark

    def word(self, stops: str, limit: int) -> Reading[str]:
        """Text up to one of the characters of `stops`, or a mark or the end. Raises BrokenCall if it is longer."""
        text = ""
        while (character := (yield from self.character())) and character not in stops:
            if len(text) == limit:
                raise BrokenCall
            text += self.take(1)
        return text

    @contextmanager
    def value(self) -> Iterator[None]:
        """Inside this context foreign marks are text: a model that writes about reasoning may spell its marks."""
        self._as_text = self.foreign
        try:
            yield
        finally:
            self._as_text = frozenset()

    def spaces(self) -> Reading[None]:
        while (yield from self.character()).isspace():
            self.take(self.matching(_SPACES))

    def text_until(self, literals: tuple[str, ...], out: Callable[[str], None]) -> Reading[str]:
        """Pass text to `out` up to one of the literals, which is not consumed. Returns it; "" before a mark and at the
        end."""
        while True:
            run, begin = self._run, self._at
            found = _any_of(literals).search(run, begin) if literals else None
            size = (found.start() if found else len(run)) - begin
            hold = 0 if found or not size else _overlap(run[-min(size, _LONGEST) :], literals)
            if size > hold:
                out(text := self.take(size - hold))
                if len(text) < size - hold:
                    continue  # at the limit of a call: the next character exceeds it
            if found:
                return found[0]
            if not (yield from self.more()):
                if hold:
                    out(self.take(hold))
                return ""

    # -- recording the text of a call, in case it is malformed

    def record(self, budget: int) -> None:
        """Record what is consumed from now on, at most `budget` characters."""
        self._recorded, self._budget = [], budget

    def recorded(self) -> str:
        """Stop recording, and return what was recorded."""
        text, self._recorded = "".join(self._recorded or ()), None
        return text

    def _absorb(self, *, as_text: bool = True) -> Mark:
        """Make the mark that follows the run, and the text after it, part of the run."""
        mark = self._later.popleft()
        assert isinstance(mark, Mark)
        pieces = [self._run[self._at :], mark.literal if as_text else ""]
        while self._later and isinstance(text := self._later[0], str):
            pieces.append(text)
            self._later.popleft()
        self._run, self._at = "".join(pieces), 0
        return mark


class LiteralMarks:
    """Finds marks in text, for a model whose vocabulary has no token for them."""

    def __init__(self, literals: tuple[str, ...]) -> None:
        self._literals = literals
        self._held = ""

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        text, at = self._held + text, 0
        for found in _any_of(self._literals).finditer(text):
            if found.start() > at:
                parts.append(text[at : found.start()])
            parts.append(Mark(found[0], by_id=False))
            at = found.end()
        cut = len(text) - _overlap(text[max(at, len(text) - _LONGEST) :], self._literals)
        if cut > at:
            parts.append(text[at:cut])
        self._held = text[cut:]
        return parts

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


@cache
def _any_of(literals: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, literals)))


def _overlap(text: str, literals: tuple[str, ...]) -> int:
    """Length of the longest suffix of `text` that is a prefix of one of the literals."""
    longest = 0
    for literal in literals:
        for size in range(min(len(literal) - 1, len(text)), longest, -1):
            if text.endswith(literal[:size]):
                longest = size
                break
    return longest
