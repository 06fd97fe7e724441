"""Grammars for a model's vocabulary, by llguidance: it says after each token which tokens may come next.

A grammar is untrusted. It is bounded before it is read (`MAX_CHARACTERS`) and while it is read and followed
(`_LIMITS`): what costs more is an error of its own request.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.core.grammar import TokenMasks
from engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

log = logging.getLogger("atoll.grammar")

MAX_CHARACTERS = 1 << 20
_CACHED = 128          # compiled grammars that are kept
_CACHED_CHARACTERS = 16 << 20
_SIDE_BY_SIDE = 4      # masks of a step from which on several threads compute them
# Of the library, for one grammar: regular expressions (50,000 a ms) and lexer states (1-2 kB each) of all its matchers,
# and for one mask: lexer steps (14,000 a ms) and parser items (20,000 a ms).
_LIMITS = {"initial_lexer_fuel": 1_000_000, "max_lexer_states": 50_000, "step_lexer_fuel": 100_000,
           "step_max_items": 50_000, "verbose_errors": False}
_REASON = 300          # characters of the library's reason that a client sees


class GrammarMatcher:
    """One sequence's place in its grammar (engine.core.grammar.Matcher)."""

    __slots__ = ("library", "_error")

    def __init__(self, library: "LLMatcher") -> None:
        self.library, self._error = library, ""

    @property
    def finished(self) -> bool:
        return self.library.is_stopped() and not self.library.is_error()

    @property
    def error(self) -> str:
        if not self._error and self.library.is_error():
            self._error = self.library.get_error()
        return self._error

    def accept(self, token_id: int) -> None:
        self.library.consume_token(token_id)


class GrammarCompiler:
    """Grammars of one model (engine.core.grammar.Grammars). Nothing is loaded before the first grammar comes."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`vocab_size`: columns of the logits; a model's vocabulary may be padded beyond its tokenizer's."""
        self._file = directory / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._lock = threading.Lock()          # of the cache; the engine's loop takes it
        self._loading = threading.Lock()
        self._cache: OrderedDict[str, LLMatcher] = OrderedDict()

    def compiled(self, grammar: str) -> bool:
        with self._lock:
            return grammar in self._cache

    def compile(self, grammar: str) -> None:
        self.matcher(grammar)

    def matcher(self, grammar: str) -> GrammarMatcher:
        with self._lock:
            if found := self._cache.get(grammar):
                self._cache.move_to_end(grammar)
                return GrammarMatcher(found.deep_copy())
        fresh = self._read(grammar)
        with self._lock:
            self._cache[grammar] = fresh
            while len(self._cache) > _CACHED or sum(map(len, self._cache)) > _CACHED_CHARACTERS:
                self._cache.popitem(last=False)
        return GrammarMatcher(fresh.deep_copy())

    def masks(self, places: list[int], matchers: Sequence[Any]) -> TokenMasks:
        words = np.empty((len(places), -(-self._vocab_size // 32)), dtype=np.int32)
        width = words.shape[1] * words.itemsize
        at = words.ctypes.data
        if len(matchers) < _SIDE_BY_SIDE:
            for i, matcher in enumerate(matchers):
                matcher.library.unsafe_compute_mask_ptr(at + i * width, width)
        else:
            pairs = [(matcher.library, i) for i, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(pairs, at, width, len(pairs))
        return TokenMasks(places, words)

    def _read(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher

        if len(grammar) > MAX_CHARACTERS:
            raise InvalidRequestError(f"The grammar of the answer may have {MAX_CHARACTERS} characters.", "grammar")
        with self._loading:
            tokenizer = self._tokenizer
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidRequestError(f"The answer's grammar cannot be used: {_reason(matcher.get_error())}", "grammar")
        return matcher

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        try:
            source = self._file.read_text("utf-8")
            return LLTokenizer(source, n_vocab=self._vocab_size, eos_token=self._eos)
        except (OSError, ValueError) as error:
            log.warning("no grammars: %s: %s", self._file, str(error)[:_REASON])
            raise InvalidRequestError("This model's tokenizer does not fit grammars of answers.", "grammar") from None

    @cached_property
    def _limits(self) -> Any:
        from llguidance import LLParserLimits

        return LLParserLimits(**_LIMITS)

    @cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor()


def _reason(error: str) -> str:
    """The first line of what the library says; the rest quotes the grammar."""
    return error.strip().splitlines()[0][:_REASON] if error.strip() else "the library gives no reason"
