"""Types values that a model writes without quotes by the JSON schema of the function's parameters."""

import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

_INTEGER = re.compile(r"[-+]?[0-9]{1,400}")
_NUMBER = re.compile(r"[-+]?([0-9]{1,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})([eE][-+]?[0-9]{1,400})?")
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
          type(None): "null"}
_DEEPEST = 16  # nested schemas that are searched for the type of a value
STRING = frozenset({"string"})


def property_of(schema: Any, root: Any, name: str) -> Any:
    """The schema of a member of an object; None if there is none."""
    schema = resolved(schema, root)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    more = schema.get("additionalProperties") if isinstance(schema, Mapping) else None
    return more if isinstance(more, Mapping) else None


def items_of(schema: Any, root: Any) -> Any:
    schema = resolved(schema, root)
    return schema.get("items") if isinstance(schema, Mapping) else None


def resolved(schema: Any, root: Any) -> Any:
    """`schema`, or what its `$ref` points to inside `root`."""
    for _ in range(_DEEPEST):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = root
        for step in reference[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            schema = schema.get(step) if isinstance(schema, Mapping) else None
    return None


def types_of(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return frozenset()
    found: set[str] = set()
    declared = schema.get("type")
    if isinstance(declared, str):
        found.add(declared)
    elif isinstance(declared, list):
        found |= {name for name in declared if isinstance(name, str)}
    if not found:
        values = schema.get("enum") if isinstance(schema.get("enum"), list) else []
        values = [*values, schema["const"]] if "const" in schema else values  # type: ignore[misc]
        found |= {_TYPES.get(type(value), "string") for value in values}  # type: ignore[union-attr]
    for word in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(word) or () if isinstance(schema.get(word), list) else ():
            found |= types_of(option, root, depth + 1)
    if not found:
        found |= {name for word, name in (("properties", "object"), ("items", "array")) if word in schema}
    return frozenset(found)


def typed(text: str, types: frozenset[str]) -> Any:
    """The value of `text` as one of these types; the text itself if none fits."""
    word = text.strip().lower()
    if word == "null" and ("null" in types or "string" not in types):
        return None
    if "integer" in types and _INTEGER.fullmatch(word):
        return int(word)
    if "number" in types and _NUMBER.fullmatch(word):
        number = float(word)
        if not math.isfinite(number):
            return math.copysign(sys.float_info.max, number)
        return int(number) if number.is_integer() else number
    if "boolean" in types and word in ("true", "false"):
        return word == "true"
    if types == {"boolean"} and word in ("1", "0"):
        return word == "1"
    if types & {"object", "array"}:
        value = _loaded(text)
        if _TYPES.get(type(value)) in types:
            return value
    return text


def literal(text: str) -> Any:
    """The value of `text` if no schema gives its type."""
    word = text.strip()
    if word in ("true", "false"):
        return word == "true"
    if word in ("null", "None"):
        return None
    return typed(text, frozenset({"integer", "number"})) if word.lower() != "null" else text


def json_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def in_json(text: str) -> str:
    """`text` escaped for the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _loaded(text: str) -> Any:
    def refuse(word: str) -> Any:
        raise ValueError(word)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return text
