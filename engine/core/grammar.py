"""The engine's interface to grammars that answers must follow. engine.text.grammar implements it.

    SamplingParams.grammar ─► Grammars.begin ─► Pending.poll ─► Matcher, one per sequence ─► accept(each token)
                                                                   └► Grammars.masks ─► TokenMasks, for the sampler
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Matcher(Protocol):
    """The state of one sequence in its grammar."""

    @property
    def finished(self) -> bool:
        """Whether the grammar allows only an end token next."""
        ...

    @property
    def error(self) -> str:
        """Why the sequence cannot go on (the grammar takes too much work at this point); "" if it can."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by the sequence's next token, which the last mask allowed."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens may come next, for some of the sequences that sample.

    places: the index of each mask's sequence among those that sample. words: NumPy int32 [M, ceil(V / 32)]; bit i of
    word w is token 32 w + i.
    """

    places: list[int]
    words: Any


class Pending(Protocol):
    """A grammar that is being compiled."""

    def poll(self) -> Matcher | None:
        """A matcher at the start of the grammar, or None while it is being compiled. Raises InvalidRequestError if the
        grammar cannot be used."""
        ...


class Grammars(Protocol):
    """Grammars of one model's vocabulary."""

    def begin(self, grammar: str) -> Pending:
        """Start compiling a grammar in another thread, unless it has been compiled already."""
        ...

    def masks(self, places: list[int], matchers: Sequence[Matcher]) -> TokenMasks: ...
