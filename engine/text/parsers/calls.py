"""What the parsers of tool calls have in common: each reads its family's syntax and reports to a `CallWriter`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from engine.text.parsers.events import CallArguments, CallBegun, CallEnded, Content, Event, ParserLimits
from engine.text.parsers.lark_grammar import Grammar, escaped, quoted, regex
from engine.text.parsers.source import BrokenCall, Reading, Source

Schema = Mapping[str, Any]


class CallWriter:
    """One answer's calls. A parser calls `expect`, `begin`, `arguments`, `end` for each of them, in this order."""

    def __init__(self, source: Source, emit: Callable[[Event], None], limits: ParserLimits,
                 tools: Mapping[str, Schema]) -> None:
        """`tools`: the parameters' schema of each function that was offered."""
        self.source, self.limits, self.tools = source, limits, tools
        self.count = 0        # calls so far, the broken ones too
        self.cut = False      # the answer ended because it may not be longer
        self.begun = False    # the present call's name has been reported
        self._emit = emit
        self._known_only = False

    def expect(self, *, known_only: bool | None = None) -> None:
        """A call may follow. `known_only`: nothing but text says so, which may be a quotation; then only a function
        that was offered can be called."""
        if known_only is not None:
            self._known_only = known_only
        self.source.record(self.limits.characters)

    def begin(self, name: str, *, sure: bool = True) -> None:
        """`sure` False: what is written might be something else than a call."""
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
        """The call is not one, or is cut short: its text goes on as content."""
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
    marks: ClassVar[tuple[str, ...]]       # all marks that the syntax knows, openers too
    bare: ClassVar[str] = ""               # text at the beginning that may be a call without a mark
    id_characters: ClassVar[int] = 24      # of a call's id, after its prefix
    id_prefix: ClassVar[str] = "call_"

    @abstractmethod
    def read(self, calls: CallWriter) -> Reading[None]:
        """Read the call, or calls, after an opener. Raises BrokenCall."""

    # -- the same syntax as a grammar (engine.text.parsers.lark_grammar)

    @abstractmethod
    def call_rule(self, grammar: Grammar, name: str, schema: Schema, *, strict: bool) -> str:
        """One call, without what stands around and between calls."""

    @abstractmethod
    def calls_rule(self, grammar: Grammar, calls: Sequence[str], *, parallel: bool) -> str:
        """One of the calls, or with `parallel` one or more."""

    def text_and_calls(self, grammar: Grammar, calls: Sequence[str]) -> str:
        """Anything, in which whatever begins a call must go on as one."""
        opener, one = self.openers[0], self.calls_rule(grammar, calls, parallel=False)
        if grammar.has(opener):
            return f"({grammar.text()} | {one})*"
        begins = grammar.rule(regex(f"(.|\\n)*{escaped(opener)}"), "[lazy]")
        return f"({begins} {one.removeprefix(quoted(opener))})* {grammar.text()}?"
