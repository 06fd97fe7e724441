"""Grammars for a model's vocabulary, by llguidance, which computes after each token which tokens may come next.

Grammars are untrusted. Their size is limited before they get here (forms), and their cost while they are compiled and
matched (limits). A grammar that exceeds a limit is an error of its own request.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.core.grammar import TokenMasks
from engine.errors import InvalidRequestError, ModelError
from engine.text.grammar import limits
from engine.text.grammar.vocabulary import without_control_text

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

log = logging.getLogger("atoll.grammar")


class GrammarMatcher:
    """One sequence's state in its grammar (engine.core.grammar.Matcher)."""

    __slots__ = ("_error", "library")

    def __init__(self, library: "LLMatcher") -> None:
        self.library, self._error = library, ""

    @property
    def finished(self) -> bool:
        return self.library.is_stopped() and not self.library.is_error()

    @property
    def error(self) -> str:
        if not self._error and self.library.is_error():
            self._error = _reason(self.library.get_error())
        return self._error

    def accept(self, token_id: int) -> None:
        self.library.consume_token(token_id)


class PendingGrammar:
    """A grammar that threads compile (engine.core.grammar.Pending)."""

    __slots__ = ("_future", "_started")

    def __init__(self, future: "Future[LLMatcher]", started: list[float]) -> None:
        self._future, self._started = future, started

    def poll(self) -> GrammarMatcher | None:
        future = self._future
        if not future.done():
            if self._started and time.monotonic() - self._started[0] > limits.COMPILE_SECONDS:
                raise _refused(f"compiling it took more than {limits.COMPILE_SECONDS:.0f} seconds")
            return None
        try:
            return GrammarMatcher(future.result().deep_copy())
        except InvalidRequestError:
            raise
        except BaseException as error:  # a panic in the library is not an Exception
            log.exception("a grammar could not be compiled", exc_info=error)
            raise _refused("the library failed on it") from None


class GrammarCompiler:
    """Grammars of one model (engine.core.grammar.Grammars). Nothing is loaded before the first grammar.

    The most recently used grammars are kept, because requests of one application mostly use the same one. Its own
    threads compile grammars; everything else runs on one thread, the engine's loop.
    """

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`vocab_size`: the columns of the logits, which may be more than the tokenizer's vocabulary."""
        self._directory = directory
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._threads = ThreadPoolExecutor(limits.COMPILE_THREADS, "grammar")
        self._loading = threading.Lock()
        self._cache: OrderedDict[str, tuple[Future[LLMatcher], list[float]]] = OrderedDict()
        self._cached_characters = 0

    def begin(self, grammar: str) -> PendingGrammar:
        if (found := self._cache.get(grammar)) is not None:
            self._cache.move_to_end(grammar)
            return PendingGrammar(*found)
        started: list[float] = []

        def work() -> "LLMatcher":
            started.append(time.monotonic())
            return self._read(grammar)

        self._cache[grammar] = found = self._threads.submit(work), started
        self._cached_characters += len(grammar)
        while len(self._cache) > limits.CACHED_GRAMMARS or self._cached_characters > limits.CACHED_CHARACTERS:
            oldest, _ = self._cache.popitem(last=False)
            self._cached_characters -= len(oldest)
        return PendingGrammar(*found)

    def masks(self, places: list[int], matchers: Sequence[Any]) -> TokenMasks:
        words = np.empty((len(places), -(-self._vocab_size // 32)), dtype=np.int32)
        width = words.shape[1] * words.itemsize
        at = words.ctypes.data
        if len(matchers) < limits.SIDE_BY_SIDE:
            for i, matcher in enumerate(matchers):
                matcher.library.unsafe_compute_mask_ptr(at + i * width, width)
        else:
            pairs = [(matcher.library, i) for i, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(pairs, at, width, len(pairs))
        return TokenMasks(places, words)

    # -- in threads ---------------------------------------------------------------------------------------------------

    def _read(self, grammar: str) -> "LLMatcher":
        """Compile a grammar; returns a matcher at its start. Raises InvalidRequestError."""
        from llguidance import LLMatcher, LLParserLimits

        with self._loading:
            tokenizer = self._tokenizer
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits.LIBRARY))
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask takes longest; here it delays no step
        if matcher.is_error():
            raise _refused(_reason(matcher.get_error()))
        return matcher

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        began = time.monotonic()
        try:
            source = without_control_text(self._directory)
            made = LLTokenizer(source, n_vocab=self._vocab_size, eos_token=self._eos)
        except (OSError, ValueError, ModelError) as error:
            log.warning("no grammars: %s: %s", self._directory, str(error)[: limits.REASON_CHARACTERS])
            raise InvalidRequestError("This model's tokenizer does not fit grammars of answers.", "grammar") from None
        log.info("read the vocabulary for grammars in %.1f s", time.monotonic() - began)
        return made

    @cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor(max(1, min(8, (os.cpu_count() or 2) // 2)))


def _refused(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"The grammar of the answer cannot be used: {why}", "grammar")


def _reason(error: str) -> str:
    """The part of the library's error that does not quote the grammar."""
    lines = [line for line in error.strip().splitlines() if line.strip()] or ["the library gives no reason"]
    detail = next((line.strip() for line in lines if line.startswith("error: ")), "")
    return " ".join(filter(None, (lines[0], detail)))[: limits.REASON_CHARACTERS]
