"""Calls that are JSON objects: ``{"name": …, "arguments": {…}}``. Hermes, Llama 3 and Mistral write them."""

import json

from engine.text.parsers.calls import CallWriter, Schema
from engine.text.parsers.json_text import decoded, json_key, json_string, json_value
from engine.text.parsers.lark_grammar import Grammar, quoted
from engine.text.parsers.source import BrokenCall, Reading

_ARGUMENTS = ("arguments", "parameters")


def call_object(calls: CallWriter) -> Reading[None]:
    """One call. Its name and arguments may come in any order, among other members."""
    source, limits = calls.source, calls.limits
    if (yield from source.character()) != "{":
        raise BrokenCall
    source.take(1)
    name: str | None = None
    early: list[str] | None = None  # arguments that came before the name
    given = False
    while True:
        yield from source.spaces()
        key = yield from json_key(source)
        yield from source.spaces()
        if key == "name" and name is None:
            pieces: list[str] = []
            yield from json_string(source, pieces.append)
            name = decoded("".join(pieces))
            if early is not None:
                calls.begin(name)
                calls.arguments("".join(early))
        elif key in _ARGUMENTS and not given:
            given = True
            if name is None:
                early = []
                yield from _arguments(calls, early)
            else:
                calls.begin(name)
                yield from _arguments(calls, None)
        else:
            yield from json_value(source, _drop, limits.depth)
        yield from source.spaces()
        character = yield from source.character()
        if character not in (",", "}"):
            raise BrokenCall
        source.take(1)
        if character == "}":
            break
    if name is None:
        raise BrokenCall
    if not given:
        calls.begin(name, sure=False)
        calls.arguments("{}")
    calls.end()


def call_list(calls: CallWriter) -> Reading[None]:
    """``[call, call, …]``"""
    source = calls.source
    if (yield from source.character()) != "[":
        raise BrokenCall
    source.take(1)
    while True:
        yield from source.spaces()
        yield from call_object(calls)
        yield from source.spaces()
        if (yield from source.character()) == "]":
            source.take(1)
            return
        calls.expect()
        if (yield from source.character()) != ",":
            raise BrokenCall
        source.take(1)


def call_arguments(calls: CallWriter) -> Reading[None]:
    """Only the object of arguments, after the name."""
    if (yield from calls.source.character()) != "{":
        raise BrokenCall
    yield from json_value(calls.source, calls.arguments, calls.limits.depth)


def _arguments(calls: CallWriter, early: list[str] | None) -> Reading[None]:
    """An object; or, as some models write, its text in a JSON string, or null."""
    source, out = calls.source, calls.arguments if early is None else early.append
    character = yield from source.character()
    if character == "{":
        yield from json_value(source, out, calls.limits.depth)
        return
    pieces: list[str] = []
    yield from json_value(source, pieces.append, 0)
    text = "".join(pieces)
    if character == '"':
        out(_object(decoded(text)))
    elif text == "null":
        out("{}")
    else:
        raise BrokenCall


def _object(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise BrokenCall from None
    if not isinstance(value, dict):
        raise BrokenCall
    return text


def _drop(text: str) -> None:
    pass


def call_object_rule(grammar: Grammar, name: str, schema: Schema, *, strict: bool, arguments: str = "arguments") -> str:
    begin = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": '
    return grammar.rule(f'{quoted(begin)} {arguments_rule(grammar, schema, strict=strict)} "}}"')


def arguments_rule(grammar: Grammar, schema: Schema, *, strict: bool) -> str:
    return grammar.json({"type": "object", **schema}, None, strict=strict)
