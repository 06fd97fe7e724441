"""Qwen3.5, Qwen3.6, Qwen3-Coder: calls as tags, values as raw text, typed by the function's schema.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.text.parsers.calls import CallWriter, Schema, ToolFormat
from engine.text.parsers.lark_grammar import Grammar, either, escaped, quoted, regex, string_regex
from engine.text.parsers.schema_values import STRING, in_json, json_of, property_of, resolved, typed, types_of
from engine.text.parsers.source import BrokenCall, Reading, Source

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MOST_SPACE = 256  # characters between two tags


class Qwen3Coder(ToolFormat):
    openers = ("<tool_call>",)
    marks = ("<tool_call>", "</tool_call>")
    bare = _FUNCTION  # models sometimes forget the opener

    def read(self, calls: CallWriter) -> Reading[None]:
        source = calls.source
        yield from source.spaces()
        if not (yield from source.starts_with(_FUNCTION)):
            raise BrokenCall
        source.take(len(_FUNCTION))
        name = yield from _name(calls)
        calls.begin(name)
        schema = calls.tools.get(name)
        first = True
        while (yield from source.text_until((_PARAMETER, _FUNCTION_END), _drop)) == _PARAMETER:
            source.take(len(_PARAMETER))
            key = yield from _name(calls)
            calls.arguments(f"{'{' if first else ', '}{json_of(key)}: ")
            first = False
            types = types_of(property_of(schema, schema, key), schema) or STRING
            if types == STRING:
                calls.arguments('"')
                yield from _value(calls, lambda text: calls.arguments(in_json(text)))
                calls.arguments('"')
            else:
                pieces: list[str] = []
                yield from _value(calls, pieces.append)
                calls.arguments(json_of(typed("".join(pieces), types)))
        if (yield from source.starts_with(_FUNCTION_END)):
            source.take(len(_FUNCTION_END))
        elif calls.cut and source.mark() is None:
            raise BrokenCall
        calls.arguments("{}" if first else "}")
        calls.end()
        yield from source.spaces()
        mark = source.mark()
        if mark is not None and mark.literal == "</tool_call>":
            source.take_mark()

    def call_rule(self, grammar: Grammar, name: str, schema: Schema, *, strict: bool) -> str:
        schema = resolved(schema, schema) or {}
        properties, required = schema.get("properties"), schema.get("required")
        parameters = []
        if isinstance(properties, Mapping) and properties:
            for key, value in properties.items():
                optional = "" if isinstance(required, list) and key in required else "?"
                parameters.append(_parameter_rule(grammar, key, value, schema, strict=strict) + optional)
        elif schema.get("additionalProperties", not strict):
            parameters.append(grammar.rule(f'"<parameter=" /[^>\\n]{{1,64}}/ ">\\n" {_raw(grammar, None)}') + "*")
        return grammar.rule(f'{quoted(f"<function={name}>" + chr(10))} {" ".join(parameters)} "</function>\\n"')

    def calls_rule(self, grammar: Grammar, calls: Sequence[str], *, parallel: bool) -> str:
        one = f'{grammar.mark("<tool_call>")} "\\n" {either(calls)} {grammar.mark("</tool_call>")}'
        return f'{one} ("\\n" {one})*' if parallel else one


def _parameter_rule(grammar: Grammar, key: str, schema: Any, root: Schema, *, strict: bool) -> str:
    schema = resolved(schema, root)
    types = types_of(schema, root) or STRING
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(schema, Mapping) and "const" in schema:
        values = [schema["const"]]
    end = quoted(f"\n{_PARAMETER_END}\n")
    if isinstance(values, list) and values:
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        value = f"{either([quoted(text) for text in texts])} {end}"
    elif "string" in types:
        value = _raw(grammar, string_regex(schema) if types == STRING else None)
    else:
        value = f"{grammar.json(schema, root, strict=strict)} {end}"
    return grammar.rule(f"{quoted(f'{_PARAMETER}{key}>' + chr(10))} {value}")


def _raw(grammar: Grammar, pattern: str | None) -> str:
    """Any text, or text that matches a pattern, up to the closing tag."""
    end = f"\n{_PARAMETER_END}\n"
    if pattern is None:
        return grammar.rule(regex(f"(.|\\n)*{escaped(end)}"), "[lazy]")
    return f"{grammar.rule(regex(pattern))} {quoted(end)}"


def _name(calls: CallWriter) -> Reading[str]:
    """The name, up to the end of the tag."""
    name = yield from calls.source.word(">\n", calls.limits.name)
    if (yield from calls.source.character()) != ">":
        raise BrokenCall
    calls.source.take(1)
    return name.strip()


def _value(calls: CallWriter, out: Callable[[str], None]) -> Reading[None]:
    """Pass the value on, without the line breaks after its opening and before its closing tag.

    A value may contain anything, even tags, so a closing tag counts only if the call can continue after it. If it is
    missing, the value ends where the next tag begins a line.
    """
    source = calls.source
    if (yield from source.character()) == "\n":
        source.take(1)
    held, line_begins = "", True  # held: a line break that may be the last one

    def say(text: str) -> None:
        nonlocal held, line_begins
        text = held + text
        held = "\n" if text[-1] == "\n" else ""
        line_begins = bool(held)
        if text := text[: len(text) - len(held)]:
            out(text)

    with source.value():
        while found := (yield from source.text_until((_PARAMETER_END, _PARAMETER, _FUNCTION_END), say)):
            if found == _PARAMETER_END:
                if (yield from _goes_on(source, len(found))):
                    source.take(len(found))
                    return
            elif line_begins and (found == _PARAMETER or (yield from _ends(source, len(found)))):
                return
            say(source.take(len(found)))
    if calls.cut and source.mark() is None:
        raise BrokenCall


def _goes_on(source: Source, at: int) -> Reading[bool]:
    """Whether a tag of the call, a mark or the end follows `at` characters ahead."""
    after = yield from _skip(source, at)
    if after is None:
        return True
    return (yield from source.starts_with(_PARAMETER, after)) or (yield from source.starts_with(_FUNCTION_END, after))


def _ends(source: Source, at: int) -> Reading[bool]:
    return (yield from _skip(source, at)) is None


def _skip(source: Source, at: int) -> Reading[int | None]:
    """Where the text continues after space, from `at` characters ahead; None if a mark or the end comes first."""
    for ahead in range(at, at + _MOST_SPACE):
        if not (character := (yield from source.ahead(ahead))).isspace():
            return ahead if character else None
    return at


def _drop(text: str) -> None:
    pass
