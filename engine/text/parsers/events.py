"""The events in which a parser reports an answer piece by piece: reasoning, content and tool calls."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Reasoning:
    text: str


@dataclass(slots=True)
class Content:
    text: str


@dataclass(slots=True)
class CallBegun:
    index: int
    name: str


@dataclass(slots=True)
class CallArguments:
    """The next piece of the call's arguments; joined, the pieces of a complete call are the JSON text of an object."""

    index: int
    text: str


@dataclass(slots=True)
class CallEnded:
    """`broken`: the text of a call that was cut off or is malformed, as the model wrote it; else empty."""

    index: int
    broken: str = ""


Event = Reasoning | Content | CallBegun | CallArguments | CallEnded


@dataclass(frozen=True, slots=True)
class ParserLimits:
    """A call beyond these limits counts as malformed, so that the cost of parsing is linear in an answer's length."""

    calls: int = 128
    characters: int = 1 << 20  # of one call
    depth: int = 64            # nesting of its arguments
    name: int = 256            # characters of a function's or an argument's name


@dataclass(slots=True)
class ToolCall:
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """A whole answer. A malformed call is part of the content, because none of it has been sent yet."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def parsed(events: Iterable[Event]) -> Parsed:
    reasoning, content = [], []
    calls: dict[int, tuple[ToolCall, list[str]]] = {}
    for event in events:
        match event:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text):
                content.append(text)
            case CallBegun(index, name):
                calls[index] = ToolCall(name), []
            case CallArguments(index, text):
                calls[index][1].append(text)
            case CallEnded(index, broken):
                call, pieces = calls[index]
                call.arguments = "".join(pieces)
                if broken:
                    content.append(broken)
                    del calls[index]
    return Parsed("".join(reasoning), "".join(content), [call for call, _ in calls.values()])
