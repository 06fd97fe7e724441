"""Parses one answer into reasoning, content and tool calls while it is being written.

    answer := (reasoning | content | calls)*

Control tokens are recognised by their id (`Mark`), so text that merely spells one stays text. What a parser reports
depends only on the answer, never on how it was cut into pieces.
"""

from collections.abc import Iterable, Mapping

from engine.text.parsers.calls import CallWriter, Schema, ToolFormat
from engine.text.parsers.events import CallArguments, Content, Event, ParserLimits, Reasoning
from engine.text.parsers.reasoning import ReasoningFormat
from engine.text.parsers.source import BrokenCall, LiteralMarks, Mark, Part, Reading, Source


class OutputParser:
    """Feed the parts of an answer with `push` and close it with `finish`; both return what is new."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        tools: ToolFormat | None = None,
        schemas: Mapping[str, Schema] | None = None,
        *,
        literal_marks: tuple[str, ...] = (),
        thinking: bool = False,
        limits: ParserLimits = ParserLimits(),
        formatted: bool = False,
    ) -> None:
        """`schemas`: those of the offered functions' parameters. `literal_marks`: marks for which the vocabulary has no
        token. `thinking`: the prompt ends inside the reasoning. `formatted`: a grammar makes the answer either text in
        a format, which may spell anything, or calls that begin with a mark."""
        self.thinking = thinking  # whether the reasoning is open now
        self._reasoning, self._tools, self._formatted = reasoning, tools, formatted
        self._source = Source()
        self._source.foreign = frozenset(reasoning.marks if reasoning is not None else ())
        self._literal = LiteralMarks(literal_marks) if literal_marks else None
        self._events: list[Event] = []
        self._calls = CallWriter(self._source, self._events.append, limits, schemas or {})
        self._space = ""         # trailing space of the content, which a call would drop
        self._trim = thinking    # drop space before the next content
        self._at_start = True    # only space has come since the last reasoning or call
        self._thought = False    # there has been reasoning
        self._broken = False     # a malformed call was given up: its closer is content, like its beginning
        self._reading = self._answer()
        self._over = False

    def push(self, parts: Iterable[Part]) -> list[Event]:
        for part in parts:
            if self._literal is None or isinstance(part, Mark):
                if part:
                    self._source.feed(part)
                continue
            for piece in self._literal.push(part):
                self._source.feed(piece)
        return self._resume()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """The answer is over. `cut`: it was cut off, the model did not end it."""
        if self._literal is not None and (held := self._literal.flush()):
            self._source.feed(held)
        self._source.ended, self._calls.cut = True, cut
        return self._resume()

    def _resume(self) -> list[Event]:
        if not self._over:
            self._over = next(self._reading, True) is True
        events = _merged(self._events)
        self._events.clear()
        return events

    # -- the states

    def _answer(self) -> Reading[None]:
        reasoning = self._reasoning
        if self.thinking and reasoning is not None:
            yield from self._think()
        elif reasoning is not None and reasoning.label and (yield from self._source.starts_with(reasoning.label)):
            yield from self._think()  # the model forgot the opener
        while opener := (yield from self._say()):
            if reasoning is not None and opener == reasoning.opener:
                self._source.take_mark()
                yield from self._think()
            else:
                yield from self._call(opener)

    def _think(self) -> Reading[None]:
        """Reasoning, up to its closer, a call or the end. Space at either end is not part of it."""
        source, reasoning = self._source, self._reasoning
        assert reasoning is not None
        self.thinking = self._thought = True
        if reasoning.label and (yield from source.starts_with(reasoning.label)):
            source.take(len(reasoning.label))
        said, space = False, ""

        def out(text: str) -> None:
            nonlocal said, space
            text = space + text if said else text.lstrip()
            kept = text.rstrip()
            space = text[len(kept) :]
            if kept:
                said = True
                self._events.append(Reasoning(kept))

        while True:
            yield from source.text_until((), out)
            mark = source.mark()
            if mark is None or (self._tools is not None and mark.literal in self._tools.openers):
                break
            literal = source.take_mark().literal
            if literal == reasoning.closer:
                break
            if literal != reasoning.opener:
                out(literal)
            elif reasoning.label and (yield from source.starts_with(reasoning.label)):
                source.take(len(reasoning.label))
        self.thinking = False
        self._trim = self._at_start = True

    def _say(self) -> Reading[str]:
        """Content, up to what may begin a call or reasoning. Returns the literal of that mark, or the bare text; "" at
        the end."""
        source, tools = self._source, self._tools
        bare = tools.bare if tools is not None and not self._formatted else ""
        while True:
            if (yield from source.text_until((bare,) if bare and self._at_start else (), self._out)):
                if self._at_start:
                    return bare
                self._out(source.take(len(bare)))
                continue
            mark = source.mark()
            if mark is None:
                if self._space and not self._calls.count:
                    self._events.append(Content(self._space))
                return ""
            literal = mark.literal
            thinks = self._reasoning is not None and literal == self._reasoning.opener
            # In a format only the beginning can be anything else: what the grammar allows there, in its order.
            counts = not self._formatted or (self._at_start and not (thinks and self._thought))
            if counts and (thinks or (tools is not None and literal in tools.openers)):
                return literal
            source.take_mark()  # a closer without its opener means nothing, except in a format, which may spell it
            if self._broken or self._formatted:
                self._broken = False
                self._out(literal)

    def _out(self, text: str) -> None:
        """Content, without space around reasoning and calls."""
        text = self._space + text
        self._space = ""
        if self._trim:
            text = text.lstrip()
        if self._tools is not None:
            kept = text.rstrip()
            text, self._space = kept, text[len(kept) :]
        if text:
            self._trim = False
            self._at_start = self._at_start and text.isspace()
            self._events.append(Content(text))

    def _call(self, opener: str) -> Reading[None]:
        source, calls, tools = self._source, self._calls, self._tools
        assert tools is not None
        mark = source.mark()
        calls.expect(known_only=mark is None or not mark.by_id)
        space, self._space = self._space, ""
        if mark is not None:
            source.take_mark()
        before = calls.count
        try:
            yield from tools.read(calls)
            source.recorded()
        except BrokenCall:
            if space and calls.count == before and not calls.begun:
                self._events.append(Content(space))
            calls.give_up()
            self._broken, self._trim, self._at_start = True, False, False
        else:
            self._trim = self._at_start = True


def _merged(events: list[Event]) -> list[Event]:
    """Merge neighbouring events of one kind."""
    if len(events) < 2:
        return list(events)
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, Reasoning | Content) and type(last) is type(event):
            last.text += event.text  # type: ignore[union-attr]
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            last.text += event.text
        else:
            merged.append(event)
    return merged
