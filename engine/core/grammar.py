"""What the engine needs of grammars that answers must follow. Who reads grammars is engine.text.grammar.

    SamplingParams.grammar ─► Grammars.matcher ─► Matcher, a sequence's own ─► accept(token) after each token
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

    places: of each mask the index among the sequences that sample. words: NumPy int32 [M, ceil(V / 32)], bit i of word w
    is token 32 w + i.
    """

    places: list[int]
    words: Any


class Grammars(Protocol):
    """Grammars of one model's vocabulary."""

    def compiled(self, grammar: str) -> bool:
        """Whether `matcher` will answer at once."""
        ...

    def compile(self, grammar: str) -> None:
        """Read a grammar; from any thread. Raises InvalidRequestError for one that cannot be used."""

    def matcher(self, grammar: str) -> Matcher:
        """At the beginning of a grammar, which is compiled if it is not. Raises InvalidRequestError."""
        ...

    def masks(self, places: list[int], matchers: Sequence[Matcher]) -> TokenMasks: ...
