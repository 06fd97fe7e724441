"""Messages with an id: each *is* its English wording, and remembers the template and the values it was made of.

The id is the English template, as in a gettext catalogue. The engine speaks English only: logs, API answers and `str()`
hold the wording. Whoever shows a message to a person can say it in another language, because the id and the values
travel with it: inside a process as attributes, between processes as JSON (`to_json`, `from_json`).
"""

from collections.abc import Iterable, Mapping
from typing import Any


class Message(str):
    """Made by `msg` and `joined`. Has either `params` for the placeholders of `source`, or `parts` that it joins."""

    __slots__ = ("params", "parts", "source")

    source: str
    params: Mapping[str, Any]
    parts: tuple[str, ...] | None

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # a copy or a pickle is plain English


def msg(source: str, /, **params: Any) -> Message:
    """`source` with its {placeholders} filled in. Call it with a literal: the catalogue is made from these."""
    message = Message(source.format(**params))
    message.source, message.params, message.parts = source, params, None
    return message


def joined(parts: Iterable[str], separator: str = ", ") -> Message:
    """A list of messages as one message."""
    parts = tuple(parts)
    message = Message(separator.join(parts))
    message.source, message.params, message.parts = separator, {}, parts
    return message


def reason(error: Exception) -> str:
    """Why the operating system refused, in its own words and without the path; its words are ids, too."""
    words = getattr(error, "strerror", None)
    return msg(words.replace("{", "{{").replace("}", "}}")) if words else str(error)


def to_json(value: Any) -> Any:
    """A message as its id and values; plain text and numbers as they are, and anything else as text."""
    if isinstance(value, Message):
        if value.parts is not None:
            return {"join": value.source, "parts": [to_json(part) for part in value.parts]}
        return {"id": value.source, "params": {name: to_json(param) for name, param in value.params.items()}}
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def from_json(value: Any) -> Any:
    """What `to_json` was given. The sender may be of another version: what is no message stays as it is."""
    try:
        match value:
            case {"join": str(separator), "parts": list(parts)}:
                return joined([from_json(part) for part in parts], separator)
            case {"id": str(source), "params": dict(params)}:
                return msg(source, **{name: from_json(param) for name, param in params.items()})
    except (KeyError, IndexError, ValueError, TypeError, AttributeError):
        return str(value)
    return value


def with_ids(line: dict[str, Any]) -> dict[str, Any]:
    """A JSON object whose messages are English for any reader; `texts` has their ids and values beside them."""
    texts = {name: to_json(value) for name, value in line.items() if isinstance(value, Message)}
    return line | {"texts": texts} if texts else line


def without_ids(line: dict[str, Any]) -> dict[str, Any]:
    """The object that `with_ids` was given, its messages restored."""
    texts = line.get("texts")
    rest = {name: value for name, value in line.items() if name != "texts"}
    return rest | {name: from_json(text) for name, text in texts.items()} if isinstance(texts, dict) else rest
