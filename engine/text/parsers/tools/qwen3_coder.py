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
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.text.parsers.calls import CallWriter, Schema, ToolFormat
from engine.text.parsers.lark_grammar import (
    ANYTHING,
    SPACE,
    Grammar,
    containing,
    either,
    escaped,
    quoted,
    string_regex,
)
from engine.text.parsers.schema_values import STRING, in_json, json_of, property_of, resolved, typed, types_of
from engine.text.parsers.source import BrokenCall, Reading, Source

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MOST_SPACE = 256  # characters between two tags
_IN_JSON = re.compile(r'\\[\s\S]|"')  # what decides where a string ends
# Where a value would end before its closing tag (`_value`)
_ENDS_EARLY = (f"({ANYTHING}\\n)?{escaped(_PARAMETER)}{ANYTHING}",
               f"{ANYTHING}{escaped(_PARAMETER_END)}{SPACE}*({escaped(_PARAMETER)}|{escaped(_FUNCTION_END)}){ANYTHING}")


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
                yield from _value(calls, pieces.append, as_json="string" not in types)
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
                rule = self._value_rule(grammar, value, schema, strict=strict)
                parameters.append(grammar.rule(f"{quoted(f'{_PARAMETER}{key}>' + chr(10))} {rule}") + optional)
        elif more := schema.get("additionalProperties", not strict):
            rule = self._value_rule(grammar, more, schema, strict=strict)
            parameters.append(grammar.rule(f'"<parameter=" /[^>\\n]{{1,64}}/ ">\\n" {rule}') + "*")
        return grammar.rule(f'{quoted(f"{name}>" + chr(10))} {" ".join(parameters)} {quoted(_FUNCTION_END)}')

    def calls_rule(self, grammar: Grammar, calls: Sequence[str], *, parallel: bool) -> str:
        begin, end = quoted(f"\n{_FUNCTION}"), grammar.mark("</tool_call>")
        one = f'{grammar.mark("<tool_call>")} {begin} {either(calls)} "\\n" {end}'
        return f'{one} ("\\n" {one})*' if parallel else one

    def text_and_calls(self, grammar: Grammar, calls: Sequence[str], marks: Sequence[str]) -> str:
        """The parser reads a call without an opener, too, so text must not begin like one. With a mark in it, the text
        behind the mark could be read as the beginning of an answer."""
        opener, closer = self.openers[0], "</tool_call>"
        begins = f"{SPACE}*{escaped(_FUNCTION)}"
        unlike = begins + ANYTHING, containing(mark for mark in marks if mark != opener)
        text = grammar.text(*unlike)
        one = self.calls_rule(grammar, calls, parallel=False)
        if grammar.has(opener):
            before, end = f"{text}?", f'"\\n"? {grammar.mark(closer)}'
        else:
            before = grammar.lexeme(f"{ANYTHING}{escaped(opener)}", *unlike, lazy=True)
            one, end = one.removeprefix(quoted(opener)), grammar.lexeme(f"\\n?{escaped(closer)}")
        bare = f"{grammar.lexeme(begins)} {either(calls)} ({end})?"
        return f"({before} {one} | {bare})* {text}?"

    def _value_rule(self, grammar: Grammar, schema: Any, root: Schema, *, strict: bool) -> str:
        """The value of a parameter, and its closing tag."""
        schema = resolved(schema, root)
        types = types_of(schema, root) or STRING
        values = schema.get("enum") if isinstance(schema, Mapping) else None
        if isinstance(schema, Mapping) and "const" in schema:
            values = [schema["const"]]
        end = f"\n{_PARAMETER_END}\n"
        if isinstance(values, list) and values:
            texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
            return f"{either([quoted(text) for text in texts])} {quoted(end)}"
        if "string" not in types:
            return f"{grammar.json(schema, root, strict=strict)} {quoted(end)}"
        pattern = string_regex(schema) if types == STRING else None
        marks = () if grammar.has(self.openers[0]) else self.marks
        # One lexeme with the tag: a lexeme of the value alone would go on into the tag.
        return grammar.lexeme(f"({pattern or ANYTHING}){escaped(end)}", *_ENDS_EARLY, containing(marks), lazy=True)


def _name(calls: CallWriter) -> Reading[str]:
    """The name, up to the end of the tag."""
    name = yield from calls.source.word(">\n", calls.limits.name)
    if (yield from calls.source.character()) != ">":
        raise BrokenCall
    calls.source.take(1)
    return name.strip()


class _JsonStrings:
    """Follows a value, to know whether it is inside a string of JSON. Only objects and arrays are read as JSON."""

    def __init__(self) -> None:
        self.inside = False
        self._begun = self._json = False
        self._held = ""  # a backslash whose escape goes on

    def read(self, text: str) -> None:
        if not self._begun and (begin := text.lstrip()):
            self._begun, self._json = True, begin[0] in "{["
        if not self._json:
            return
        text = self._held + text
        self._held = "\\" if (len(text) - len(text.rstrip("\\"))) % 2 else ""
        quotes = sum(found[0] == '"' for found in _IN_JSON.finditer(text))
        self.inside ^= quotes % 2 == 1


def _value(calls: CallWriter, out: Callable[[str], None], *, as_json: bool = False) -> Reading[None]:
    """Pass the value on, without the line breaks after its opening and before its closing tag.

    A value may contain anything, even tags, so a closing tag counts only if the call can continue after it. If it is
    missing, the value ends where the next tag begins a line. `as_json`: tags inside a string of JSON are part of it.
    """
    source = calls.source
    if (yield from source.character()) == "\n":
        source.take(1)
    held, line_begins = "", True  # held: a line break that may be the last one
    strings = _JsonStrings()

    def say(text: str) -> None:
        nonlocal held, line_begins
        if as_json:
            strings.read(text)
        text = held + text
        held = "\n" if text[-1] == "\n" else ""
        line_begins = bool(held)
        if text := text[: len(text) - len(held)]:
            out(text)

    with source.value():
        while (found := (yield from source.text_until((_PARAMETER_END, _PARAMETER, _FUNCTION_END), say))) or (
                strings.inside and source.text_mark()):
            if not found:
                continue
            if found == _PARAMETER_END and not strings.inside:
                if (yield from _goes_on(source, len(found))):
                    source.take(len(found))
                    return
            elif line_begins and not strings.inside and (
                    found == _PARAMETER or (yield from _ends(source, len(found)))):
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
