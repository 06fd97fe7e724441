"""Splits one choice's output into reasoning, content and tool calls, for any endpoint that reports them."""

import secrets
import string

from engine.core.request import FinishReason
from engine.server.http.limits import Limits
from engine.server.openai.chat.tool_use import ToolUse
from engine.server.openai.generation import ChoiceDelta
from engine.text.parsers.events import CallBegun, Content, Event, ParserLimits, Reasoning
from engine.text.parsers.registry import OutputFormat

_ALPHABET = string.ascii_letters + string.digits


class SpokenChoice:
    """The parser of one choice, and what it counts."""

    def __init__(self, form: OutputFormat, use: ToolUse, *, thinking: bool, reasoning: bool, limits: Limits,
                 formatted: bool = False) -> None:
        """`thinking`: the prompt ends inside the reasoning. `reasoning`: whether to report reasoning. `formatted`: the
        request specifies a format for the answer."""
        self.called = False
        self.reasoning_tokens = 0
        self._use, self._tools, self._reports = use, form.tools, reasoning
        bounds = ParserLimits(characters=limits.max_call_characters, depth=limits.max_call_depth)
        self._parser = form.parser(calls=use.calls, schemas=use.schemas, thinking=thinking, limits=bounds,
                                   formatted=formatted and use.calls and not use.forced)

    def read(self, delta: ChoiceDelta) -> list[Event]:
        """The events that a delta adds."""
        events: list[Event] = []
        for i, parts in enumerate(delta.parts):
            self.reasoning_tokens += self._parser.thinking and i < len(delta.token_ids)
            events += self._parser.push(parts)
        if delta.finish_reason is not None:
            events += self._parser.finish(cut=delta.finish_reason is FinishReason.LENGTH)
        events = [event for event in events if self._wanted(event)]
        self.called = self.called or any(isinstance(event, CallBegun) for event in events)
        return events

    def call_id(self) -> str:
        """A new id, in the form that the model's template accepts."""
        assert self._tools is not None
        return self._tools.id_prefix + "".join(secrets.choice(_ALPHABET) for _ in range(self._tools.id_characters))

    def _wanted(self, event: Event) -> bool:
        if isinstance(event, Reasoning):
            return self._reports
        return isinstance(event, Content) or self._use.parallel or event.index == 0
