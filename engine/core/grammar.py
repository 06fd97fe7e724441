"""What the engine needs of grammars that answers must follow. Who reads grammars is engine.text.grammar.

    SamplingParams.grammar ─► Grammars.begin ─► Pending.poll ─► Matcher, of one sequence ─► accept(each token)
                                                                   └► Grammars.masks ─► TokenMasks, for the sampler
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Matcher(Protocol):
    """Where one sequence is in its grammar."""

    @property
    def finished(self) -> bool:
        """The grammar allows no further token but an end token."""
        ...

    @property
    def error(self) -> str:
        """Why it cannot go on: the grammar needs too much work here. "" while it can."""
        ...

    def accept(self, token_id: int) -> None:
        """The sequence's next token; one that the last mask allowed."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens may come next, for some of the sequences that sample.

    places: of each mask the index among the sequences that sample. words: NumPy int32 [M, ceil(V / 32)], bit i of word
    w is token 32 w + i.
    """

    places: list[int]
    words: Any


class Pending(Protocol):
    """A grammar that is being compiled."""

    def poll(self) -> Matcher | None:
        """A matcher at the beginning of the grammar, once it is ready. Raises InvalidRequestError for a grammar that
        cannot be used."""
        ...


class Grammars(Protocol):
    """Grammars of one model's vocabulary."""

    def begin(self, grammar: str) -> Pending:
        """Start to compile a grammar in another thread, if it is not at hand."""
        ...

    def masks(self, places: list[int], matchers: Sequence[Matcher]) -> TokenMasks: ...
