"""Structured output: the fields that constrain an answer, in OpenAI's and vLLM's spellings."""

from collections.abc import Callable
from typing import Any

from engine.errors import InvalidRequestError
from engine.server.openai.request.schema import SamplingFields
from engine.text.grammar import forms

Form = dict[str, Any]
_OBJECT = {"type": "object"}
_FORMS: dict[str, Callable[[Any, str], Form]] = {
    "json": lambda value, param: forms.json_schema(value, param, strict=True),
    "regex": forms.regex,
    "choice": forms.choice,
    "grammar": forms.grammar,
}


def answer_form(request: SamplingFields) -> tuple[Form, str] | None:
    """The form that the answer must follow, and the field that asks for it; None if there is none. Raises
    InvalidRequestError."""
    asked = _asked(request)
    return None if asked is None else (asked[0](), asked[1])


def answer_field(request: SamplingFields) -> str:
    """The field that constrains the answer; "" for none. Raises InvalidRequestError."""
    asked = _asked(request)
    return "" if asked is None else asked[1]


def _asked(request: SamplingFields) -> tuple[Callable[[], Form], str] | None:
    found = [*_response_format(request), *_structured_outputs(request), *_guided(request)]
    if len(found) > 1:
        first, second = (param for _, param in found[:2])
        raise InvalidRequestError(f"{first} and {second} both say what the answer must follow; send one.", second)
    return found[0] if found else None


def _response_format(request: SamplingFields) -> list[tuple[Callable[[], Form], str]]:
    asked = request.response_format
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return [(lambda: forms.json_schema(_OBJECT, "response_format", strict=True), "response_format")]
    given = asked.json_schema
    if given is None:
        raise InvalidRequestError("response_format.json_schema is required.", "response_format.json_schema")
    param = "response_format.json_schema.schema"
    schema, strict = given.get("schema"), given.get("strict")
    if schema is None:
        raise InvalidRequestError(f"{param} is required.", param)
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequestError("response_format.json_schema.strict must be true or false.",
                                  "response_format.json_schema.strict")
    return [(lambda: forms.json_schema(schema, param, strict=bool(strict)), param)]


def _structured_outputs(request: SamplingFields) -> list[tuple[Callable[[], Form], str]]:
    asked = request.structured_outputs
    if asked is None:
        return []
    found = [_named(name, getattr(asked, name), f"structured_outputs.{name}") for name in _FORMS
             if getattr(asked, name) is not None]
    if asked.json_object:
        found.append(_named("json", _OBJECT, "structured_outputs.json_object"))
    return found


def _guided(request: SamplingFields) -> list[tuple[Callable[[], Form], str]]:
    """vLLM's older spellings."""
    return [_named(name, value, f"guided_{name}") for name in _FORMS
            if (value := getattr(request, f"guided_{name}")) is not None]


def _named(name: str, value: Any, param: str) -> tuple[Callable[[], Form], str]:
    return (lambda: _FORMS[name](value, param)), param
