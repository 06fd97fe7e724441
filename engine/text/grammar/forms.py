"""Converts what a client sent to `SamplingParams.grammar`, which is llguidance's own JSON form.

Sizes are checked here. The engine finds other errors when it compiles the grammar.
"""

import json
from collections.abc import Sequence
from fractions import Fraction
from math import isfinite, lcm
from typing import Any

from engine.errors import InvalidRequestError
from engine.text.grammar import limits

ANSWER = "@answer"  # the name under which a grammar of what precedes the answer refers to the answer
# Models write JSON like Python's json.dumps. If white space were free, they might write nothing else for ever.
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_schema(schema: Any, param: str, *, strict: bool) -> dict[str, Any]:
    """The form of a JSON schema: an object, a boolean, or the text of one. With `strict`, a schema that cannot be fully
    enforced is refused; otherwise what cannot be enforced is ignored. Raises InvalidRequestError."""
    if isinstance(schema, str):
        check_size(schema, param, limits.MAX_GRAMMAR_BYTES)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise InvalidRequestError(f"{param} is not valid JSON.", param) from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError(f"{param} must be a JSON schema: an object.", param)
    check_schema(schema, param)
    check_size(json.dumps(schema, ensure_ascii=False, separators=(",", ":")), param, limits.MAX_GRAMMAR_BYTES)
    if schema is True:
        schema = {}
    if isinstance(schema, dict):  # the style of the JSON is our choice
        schema = {**schema, "x-guidance": {**STYLE, "lenient": not strict}}
    return {"json_schema": schema}


def regex(pattern: str, param: str) -> dict[str, Any]:
    """The form of a regular expression that the whole answer must match; its classes (\\d, \\w, \\s) are ASCII.

    Raises InvalidRequestError.
    """
    from llguidance import regex_to_lark

    check_size(pattern, param, limits.MAX_REGEX_BYTES)
    return {"lark_grammar": f"start: /{regex_to_lark(pattern, 'dws')}/"}


def grammar(source: str, param: str) -> dict[str, Any]:
    """The form of a grammar in Lark's notation, or in GBNF, which writes rules with `::=`. Raises
    InvalidRequestError."""
    check_size(source, param, limits.MAX_GRAMMAR_BYTES)
    if "%json" in source:  # it would contain a schema whose cost is not limited
        raise InvalidRequestError(f"{param}: %json is not available in a grammar; send the schema itself.", param)
    if "::=" in source:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        check_size(source, param, limits.MAX_GBNF_BYTES)
        try:
            source = gbnf_to_lark(source)
        except Exception as error:  # the library's own type, and others that hostile input may cause
            raise InvalidRequestError(f"{param} is no GBNF grammar: {str(error)[:200]}", param) from None
    return {"lark_grammar": source}


def choice(choices: Sequence[str], param: str) -> dict[str, Any]:
    """One of these texts. Raises InvalidRequestError."""
    if not choices or len(choices) > limits.MAX_CHOICES or not all(choices):
        raise InvalidRequestError(f"{param} must hold 1 to {limits.MAX_CHOICES} texts, none of them empty.", param)
    lark = "start: " + " | ".join(map(json.dumps, dict.fromkeys(choices)))
    check_size(lark, param, limits.MAX_GRAMMAR_BYTES)
    return {"lark_grammar": lark}


def whole(answer: dict[str, Any], before: str | None = None) -> str:
    """The grammar for `SamplingParams`. `before`: a Lark grammar that refers to the answer as ANSWER, for what precedes
    it."""
    grammars = [{"name": ANSWER.removeprefix("@"), **answer}]
    if before is not None:
        grammars.insert(0, {"lark_grammar": before})
    return json.dumps({"grammars": grammars})


def check_size(text: str, param: str, most: int) -> None:
    if not text:
        raise InvalidRequestError(f"{param} must not be empty.", param)
    if len(text) > most or len(text.encode("utf-8", "replace")) > most:
        raise InvalidRequestError(f"{param} may have {most} bytes.", param)


def check_schema(schema: Any, param: str) -> None:
    """Check the limits that the library does not enforce. Raises InvalidRequestError.

    Does not recurse, because the schema may be as deep as JSON allows.
    """
    nodes, level, multiples = 0, [schema], []
    for _ in range(limits.MAX_SCHEMA_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                members = value.get("properties")
                if isinstance(members, dict) and len(members) > limits.MAX_PROPERTIES:
                    raise InvalidRequestError(
                        f"{param}: an object of a schema may have {limits.MAX_PROPERTIES} properties.", param)
                multiple = value.get("multipleOf")
                if isinstance(multiple, int | float) and not isinstance(multiple, bool):
                    multiples.append(_fraction(multiple, param))
                below += value.values()
            elif isinstance(value, list):
                below += value
        nodes += len(below)
        if nodes > limits.MAX_SCHEMA_VALUES:
            raise InvalidRequestError(f"{param}: a schema may hold {limits.MAX_SCHEMA_VALUES} values.", param)
        if any(isinstance(value, int | float) and value < limits.LEAST_NUMBER for value in below):
            raise InvalidRequestError(f"{param}: the numbers of a schema must not lie below -9.2e18.", param)
        level = [value for value in below if isinstance(value, dict | list)]
        if not level:
            _check_multiples(multiples, param)
            return
    raise InvalidRequestError(f"{param}: a schema may be {limits.MAX_SCHEMA_DEPTH} levels deep.", param)


def _fraction(number: float, param: str) -> Fraction:
    if not isfinite(number) or not 1e-9 <= abs(number) <= 1e9:  # checked before the exponent becomes a power of ten
        raise InvalidRequestError(f"{param}: multipleOf must lie between 1e-9 and 1e9.", param)
    return Fraction(str(number))


def _check_multiples(multiples: list[Fraction], param: str) -> None:
    unit = lcm(*{multiple.denominator for multiple in multiples})
    whole_ones = [abs(int(multiple * unit)) or 1 for multiple in multiples]
    if lcm(*set(whole_ones)) > limits.MAX_MULTIPLE or sum(whole_ones) > limits.MAX_SUM_OF_MULTIPLES:
        raise InvalidRequestError(f"{param}: the schema's values of multipleOf take too much work to enforce.", param)
