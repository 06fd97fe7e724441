"""The common part of the tool call parsers: each reads its family's syntax and reports to a `CallWriter`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from engine.text.parsers.events import CallArguments, CallBegun, CallEnded, Content, Event, ParserLimits
from engine.text.parsers.lark_grammar import ANYTHING, SPACE, Grammar, escaped, quoted
from engine.text.parsers.source import BrokenCall, Reading, Source

Schema = Mapping[str, Any]


class CallWriter:
    """The calls of one answer. For each of them a parser calls `expect`, `begin`, `arguments`, `end`, in this order."""

    def __init__(self, source: Source, emit: Callable[[Event], None], limits: ParserLimits,
                 tools: Mapping[str, Schema]) -> None:
        """`tools`: the parameters' schema of each function that was offered."""
        self.source, self.limits, self.tools = source, limits, tools
        self.count = 0        # calls so far, including broken ones
        self.cut = False      # the answer was cut off at its length limit
        self.begun = False    # the current call's name has been reported
        self._emit = emit
        self._known_only = False

    def expect(self, *, known_only: bool | None = None) -> None:
        """A call may follow. `known_only`: only plain text suggests it, which may be a quotation; then it counts only
        if it calls a function that was offered."""
        if known_only is not None:
            self._known_only = known_only
        self.source.record(self.limits.characters)

    def begin(self, name: str, *, sure: bool = True) -> None:
        """Report a call's name. `sure` False: the text might not be a call."""
        if not name or len(name) > self.limits.name or self.count >= self.limits.calls:
            raise BrokenCall
        if self._known_only and (name not in self.tools or not sure):
            raise BrokenCall
        self._emit(CallBegun(self.count, name))
        self.begun = True

    def arguments(self, text: str) -> None:
        if text:
            self._emit(CallArguments(self.count, text))

    def end(self) -> None:
        self._emit(CallEnded(self.count))
        self.count += 1
        self.begun = False
        self.source.recorded()

    def give_up(self) -> None:
        """Give up a call that is malformed or cut off: its text becomes content."""
        text = self.source.recorded()
        if self.begun:
            self._emit(CallEnded(self.count, text))
            self.count += 1
            self.begun = False
        elif text:
            self._emit(Content(text))


class ToolFormat(ABC):
    """The syntax of one family."""

    openers: ClassVar[tuple[str, ...]]     # marks that begin a call
    marks: ClassVar[tuple[str, ...]]       # all marks of the syntax, including openers
    bare: ClassVar[str] = ""               # text that may begin a call without a mark
    id_characters: ClassVar[int] = 24      # length of a call's id, after its prefix
    id_prefix: ClassVar[str] = "call_"

    @abstractmethod
    def read(self, calls: CallWriter) -> Reading[None]:
        """Read the call, or calls, after an opener. Raises BrokenCall."""

    # -- the same syntax as a grammar (engine.text.parsers.lark_grammar)

    @abstractmethod
    def call_rule(self, grammar: Grammar, name: str, schema: Schema, *, strict: bool) -> str:
        """The rule of one call, without what surrounds and separates calls."""

    @abstractmethod
    def calls_rule(self, grammar: Grammar, calls: Sequence[str], *, parallel: bool) -> str:
        """The rule of one of the calls, or with `parallel` of one or more. If the syntax always has an opener, the rule
        begins with it."""

    def calls_beside_format(self, grammar: Grammar, calls: Sequence[str], *, parallel: bool) -> str:
        """As `calls_rule`, where an answer in a format of its own is possible, too. The opener tells them apart, so
        calls have it even in a syntax where it is optional."""
        opener = begins = grammar.mark(self.openers[0])
        if not grammar.has(self.openers[0]):  # the format may allow its text, so it must win
            begins = grammar.lexeme(f"{SPACE}*{escaped(self.openers[0])}", lazy=True)
        return f"{begins} {self.calls_rule(grammar, calls, parallel=parallel).removeprefix(opener)}"

    def text_and_calls(self, grammar: Grammar, calls: Sequence[str], marks: Sequence[str]) -> str:
        """The rule of any text, in which everything that the parser reads as a call must be a complete call. `marks`:
        those that it finds in text, because the vocabulary lacks them."""
        opener, one = self.openers[0], self.calls_rule(grammar, calls, parallel=False)
        if grammar.has(opener):
            return f"({grammar.text()} | {one})*"
        begins = grammar.lexeme(f"{ANYTHING}{escaped(opener)}", lazy=True)
        return f"({begins} {one.removeprefix(quoted(opener))})* {grammar.text()}?"
