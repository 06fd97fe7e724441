"""Messages with an id: each *is* its English text, and remembers the template and the values that it was made from.

The id is the English template, as in a gettext catalogue. The engine itself only uses English: logs, API answers and
`str()` contain the text. Code that shows a message to a person can translate it, because the id and the values come
with it: inside a process as attributes, between processes as JSON (`to_json`, `from_json`).
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
    """`source` with its {placeholders} filled in. Call it with a literal, because the catalogue is made from those."""
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
    """The operating system's reason for an error, without the path; these texts are message ids, too."""
    words = getattr(error, "strerror", None)
    return msg(words.replace("{", "{{").replace("}", "}}")) if words else str(error)


def to_json(value: Any) -> Any:
    """A message as its id and values; plain text and numbers unchanged, and anything else as text."""
    if isinstance(value, Message):
        if value.parts is not None:
            return {"join": value.source, "parts": [to_json(part) for part in value.parts]}
        return {"id": value.source, "params": {name: to_json(param) for name, param in value.params.items()}}
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def from_json(value: Any) -> Any:
    """The inverse of `to_json`. The sender may be of another version, so whatever is not a message is not changed."""
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
    """A JSON object with its messages in English for any reader, and their ids and values under `texts`."""
    texts = {name: to_json(value) for name, value in line.items() if isinstance(value, Message)}
    return line | {"texts": texts} if texts else line


def without_ids(line: dict[str, Any]) -> dict[str, Any]:
    """The object that `with_ids` was given, its messages restored."""
    texts = line.get("texts")
    rest = {name: value for name, value in line.items() if name != "texts"}
    return rest | {name: from_json(text) for name, text in texts.items()} if isinstance(texts, dict) else rest
