"""Texts as JSON: the message id and its parameters are stored, so that each reader gets their own language.

A message's id is its English source text, as in the gettext catalogue.
"""

from typing import Any

from installer.base.i18n import is_text
from offline_bundle.text import joined
from offline_bundle.text import t as text_of


def encode(value: Any) -> Any:
    """`value` as JSON, texts with their ids; what JSON cannot carry becomes a string."""
    if is_text(value):
        if value.parts is not None:
            return {"join": value.source, "parts": [encode(part) for part in value.parts]}
        return {"id": value.source, "params": {name: encode(param) for name, param in value.params.items()}}
    if isinstance(value, dict):
        return {str(name): encode(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [encode(entry) for entry in value]
    if value is None or isinstance(value, bool | float):
        return value
    return int(value) if isinstance(value, int) else str(value)


def decode(value: Any) -> Any:
    """The value that `encode` was given, with lists for tuples."""
    if isinstance(value, list):
        return [decode(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"join", "parts"}:
        return joined([decode(part) for part in value["parts"]], value["join"])
    if value.keys() == {"id", "params"}:
        return text_of(value["id"], **{name: decode(param) for name, param in value["params"].items()})
    return {name: decode(entry) for name, entry in value.items()}


def with_ids(record: dict[str, Any]) -> dict[str, Any]:
    """A record whose texts are English for any reader, with their ids and values beside them in `texts`."""
    texts = {name: encode(value) for name, value in record.items() if is_text(value)}
    return record | {"texts": texts} if texts else record


def without_ids(record: dict[str, Any]) -> dict[str, Any]:
    """The record that `with_ids` was given. A record of an older release has no ids and stays plain English."""
    texts = record.get("texts")
    rest = {name: value for name, value in record.items() if name != "texts"}
    return rest | {name: decode(text) for name, text in texts.items()} if isinstance(texts, dict) else rest
