"""What the tests of the parsers share: answers as parts, in any chunking, and what comes of them."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from engine.text.parsers.events import Event, Parsed, ParserLimits, parsed
from engine.text.parsers.output import OutputParser
from engine.text.parsers.reasoning import REASONING_FORMATS
from engine.text.parsers.registry import TOOL_FORMATS
from engine.text.parsers.source import Mark, Part

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "fine": {"type": "boolean"},
        "maybe": {"type": ["string", "null"]},
        "opts": {"type": "object"},
        "list": {"type": "array", "items": {"type": "string"}},
        "either": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/word"}]},
    },
    "$defs": {"word": {"type": "string"}},
}
SCHEMAS = {"get_weather": WEATHER, "f": {}}
# family -> (tool parser, reasoning parser)
FAMILIES = {
    "gemma4": ("gemma4", "gemma4"),
    "qwen3.6": ("qwen3_coder", "qwen3"),
    "qwen3": ("hermes", "qwen3"),
    "llama3": ("llama3_json", None),
    "mistral": ("mistral", "mistral"),
}


def parser(family: str, *, thinking: bool = False, tools: bool = True, limits: ParserLimits = ParserLimits(),
           literal: bool = False) -> OutputParser:
    tool_parser, reasoning = FAMILIES[family]
    formats = REASONING_FORMATS[reasoning] if reasoning else None, TOOL_FORMATS[tool_parser]() if tools else None
    return OutputParser(*formats, SCHEMAS, thinking=thinking, limits=limits,
                        literal_marks=marks_of(family) if literal else ())


def marks_of(family: str) -> tuple[str, ...]:
    tool_parser, reasoning = FAMILIES[family]
    return (*TOOL_FORMATS[tool_parser].marks, *(REASONING_FORMATS[reasoning].marks if reasoning else ()))


def parts_of(text: str, family: str) -> list[Part]:
    """The answer as the detokenizer hands it on: every mark that the text spells is a token."""
    marks = marks_of(family)
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text)
    return [Mark(piece) if piece in marks else piece for piece in pieces if piece]


def cut(parts: Iterable[Part], sizes: Sequence[int]) -> list[list[Part]]:
    """`parts` in pushes: text in pieces of these sizes, again and again; a mark is never cut."""
    pushes, i = [], 0
    for part in parts:
        if isinstance(part, Mark):
            pushes.append([part])
            continue
        at = 0
        while at < len(part):
            size = sizes[i % len(sizes)]
            pushes.append([part[at : at + size]])
            at, i = at + size, i + 1
    return pushes


def events_of(parse: OutputParser, pushes: Iterable[list[Part]], *, cut_short: bool = False) -> list[Event]:
    events: list[Event] = []
    for push in pushes:
        events += parse.push(push)
    return events + parse.finish(cut=cut_short)


def streamed(events: Iterable[Event]) -> list[Any]:
    """Events as a client of the stream puts them together: neighbours joined."""
    joined: list[Any] = []
    for event in events:
        key = (type(event).__name__, getattr(event, "index", None))
        text = getattr(event, "text", None)
        if joined and joined[-1][0] == key and text is not None:
            joined[-1][1] += text
        else:
            joined.append([key, text if text is not None else vars_of(event)])
    return joined


def vars_of(event: Event) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__slots__}


def answer(text: str, family: str, *, cut_short: bool = False, **options: Any) -> Parsed:
    """The parsed answer, after checking that it does not depend on the chunking."""
    parts: list[Part] = [text] if options.get("literal") else parts_of(text, family)
    whole = events_of(parser(family, **options), [parts], cut_short=cut_short)
    for sizes in ([1], [2], [3, 1], [7]):
        pieces = events_of(parser(family, **options), cut(parts, sizes), cut_short=cut_short)
        assert streamed(pieces) == streamed(whole), sizes
    return parsed(whole)


def calls_of(result: Parsed) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in result.calls]
