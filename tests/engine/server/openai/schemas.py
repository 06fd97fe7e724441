"""JSON schemas as applications write them. Texts in them are bounded, so that a model without any sense ends them."""

import json
from typing import Any

NAME = {"type": "string", "maxLength": 12}


def read(text: str) -> Any:
    """JSON, in which a number may be too large for a float."""
    return json.loads(text, parse_float=lambda number: min(max(float(number), -1e300), 1e300))


def record(*, required: bool = True, **properties: Any) -> dict[str, Any]:
    """A closed object, as OpenAI's strict mode wants it."""
    return {"type": "object", "properties": properties, "required": list(properties) if required else [],
            "additionalProperties": False}


SCHEMAS: dict[str, Any] = {
    "person": record(name=NAME, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "optional members": record(required=False, a={"type": "integer"}, b={"type": "boolean"}, c=NAME),
    "verdict": record(label={"enum": ["positive", "negative", "neutral"]}, confidence={"type": "number"}),
    "nullable": record(name={"type": ["string", "null"], "maxLength": 5}, score={"type": ["integer", "null"]}),
    "list of texts": {"type": "array", "items": NAME, "maxItems": 4},
    "at least two": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 2},
    "any of": {"anyOf": [record(kind={"const": "a"}, x={"type": "integer"}), record(kind={"const": "b"}, y=NAME)]},
    "const": {"const": {"answer": 42, "why": None}},
    "enum of kinds": {"enum": [1, "one", None, True, [1, 2], {"a": 1}]},
    "tree": {"$ref": "#/$defs/node", "$defs": {"node": record(
        value={"type": "integer", "minimum": 0, "maximum": 9},
        children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1})}},
    "date": record(day={"type": "string", "format": "date"}, time={"type": "string", "format": "time"}),
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "pattern": record(plate={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"}),
    "lengths": {"type": "string", "minLength": 3, "maxLength": 6},
    "bounded numbers": record(x={"type": "number", "minimum": -1, "maximum": 1},
                              y={"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 20}),
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    "map": {"type": "object", "patternProperties": {"^[a-z]{1,3}$": {"type": "integer"}},
            "additionalProperties": False},
    "all of": {"allOf": [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
    ], "type": "object", "properties": {"a": True, "b": True}, "additionalProperties": False},
    "invoice": record(
        number={"type": "string", "pattern": "^INV-[0-9]{3,6}$"},
        lines={"type": "array", "minItems": 1, "maxItems": 2, "items": record(
            text=NAME, quantity={"type": "integer", "minimum": 1, "maximum": 99}, price={"type": "number"})},
        paid={"type": "boolean"}, currency={"enum": ["EUR", "USD", "KRW"]}),
    "steps": record(
        steps={"type": "array", "maxItems": 2, "items": record(explanation=NAME, output=NAME)}, final_answer=NAME),
    "calendar event": record(name=NAME, date={"type": "string", "format": "date"},
                             participants={"type": "array", "items": NAME, "maxItems": 3}),
    "titles and descriptions": {
        "title": "Extraction", "description": "What was found.", "type": "object",
        "properties": {"entities": {"title": "Entities", "type": "array", "maxItems": 2, "items": {
            "$ref": "#/definitions/Entity"}}},
        "required": ["entities"], "additionalProperties": False,
        "definitions": {"Entity": {"title": "Entity", **record(text=NAME, kind={"enum": ["person", "place"]})}}},
    "true": {"type": "boolean"},
    "null": {"type": "null"},
    "Korean": record(이름=NAME, 나이={"type": "integer", "minimum": 1, "maximum": 99}, 상태={"enum": ["좋음", "나쁨"]}),
    "awkward keys": {"type": "object", "properties": {
        'a "b"': {"type": "integer"}, "c\\d": {"type": "boolean"}, "": {"type": "null"},
        "</think>": {"const": "<|im_end|>"},
    }, "required": ['a "b"', "c\\d", "", "</think>"], "additionalProperties": False},
    "deep": record(a=record(b=record(c=record(d=record(e=record(f={"type": "integer"})))))),
    "empty": record(),
    "matrix": {"type": "array", "minItems": 2, "maxItems": 2, "items": {
        "type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "integer", "minimum": 0, "maximum": 1}}},
}
