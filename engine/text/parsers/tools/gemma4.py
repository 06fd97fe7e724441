"""Gemma 4: ``<|tool_call>call:NAME{key:<|"|>text<|"|>,other:2,more:{a:[1,true]}}<tool_call|>``.

Strings are enclosed in quote tokens and contain anything else unescaped. Bare values are typed by the function's
schema.
"""

from collections.abc import Sequence
from typing import Any

from engine.text.parsers.calls import CallWriter, Schema, ToolFormat
from engine.text.parsers.lark_grammar import Grammar, either, quoted
from engine.text.parsers.schema_values import (
    STRING,
    in_json,
    items_of,
    json_of,
    literal,
    property_of,
    typed,
    types_of,
)
from engine.text.parsers.source import BrokenCall, Reading
from engine.text.parsers.tools.gemma4_grammar import GemmaValues

_QUOTE, _END = '<|"|>', "<tool_call|>"
_CLOSERS = {"{": "}", "(": ")"}


class Gemma4(ToolFormat):
    openers = ("<|tool_call>",)
    marks = ("<|tool_call>", _END, _QUOTE, "<|tool_response>")

    def read(self, calls: CallWriter) -> Reading[None]:
        source = calls.source
        yield from source.spaces()
        prefix = yield from source.word(":{(\n", calls.limits.name)
        if (yield from source.character()) != ":" or prefix.strip() not in ("call", ""):
            raise BrokenCall
        source.take(1)
        name = (yield from source.word("{(\n", calls.limits.name)).strip()
        closer = _CLOSERS.get((yield from source.character()))
        if closer is None:
            raise BrokenCall
        calls.begin(name)
        schema = calls.tools.get(name)
        yield from _Values(calls, schema).members(schema, closer, 1)
        calls.end()
        yield from source.spaces()
        while (mark := source.mark()) is not None and mark.literal == _END:
            source.take_mark()
            yield from source.spaces()

    def call_rule(self, grammar: Grammar, name: str, schema: Schema, *, strict: bool) -> str:
        values = GemmaValues(grammar, schema, strict=strict)
        return grammar.rule(f"{quoted(f'call:{name}')} {values.object({'type': 'object', **schema})}")

    def calls_rule(self, grammar: Grammar, calls: Sequence[str], *, parallel: bool) -> str:
        one = f"{grammar.mark('<|tool_call>')} {either(calls)} {grammar.mark(_END)}"
        return f"{one} ({one})*" if parallel else one


class _Values:
    """Reads the syntax, writes JSON. `root`: the schema in which references are resolved."""

    def __init__(self, calls: CallWriter, root: Any) -> None:
        self._calls, self._source, self._root = calls, calls.source, root

    def members(self, schema: Any, closer: str, depth: int) -> Reading[None]:
        """``{key:value,…}``"""
        source, calls = self._source, self._calls
        self._deeper(depth)
        source.take(1)
        calls.arguments("{")
        first = True
        while not (yield from self._closed(closer, depth)):
            key = yield from self._key()
            calls.arguments(f"{'' if first else ', '}{json_of(key)}: ")
            first = False
            yield from self._value(property_of(schema, self._root, key), closer, depth)
            yield from self._comma(closer)
        calls.arguments("}")

    def _value(self, schema: Any, closer: str, depth: int) -> Reading[None]:
        source, calls = self._source, self._calls
        yield from source.spaces()
        character = yield from source.character()
        mark = None if character else source.mark()
        if mark is not None and mark.literal == _QUOTE:
            calls.arguments('"')
            yield from self._string(lambda text: calls.arguments(in_json(text)))
            calls.arguments('"')
        elif character == "{":
            yield from self.members(schema, "}", depth + 1)
        elif character == "[":
            yield from self._items(schema, depth + 1)
        elif character:
            text = (yield from source.word(f",{closer}", calls.limits.characters)).strip()
            if calls.cut and not (yield from source.character()) and source.mark() is None:
                raise BrokenCall  # the number might go on
            types = types_of(schema, self._root)
            value = text if types == STRING else typed(text, types) if types else literal(text)
            calls.arguments(json_of(value))
        else:
            raise BrokenCall

    def _items(self, schema: Any, depth: int) -> Reading[None]:
        calls = self._calls
        self._deeper(depth)
        self._source.take(1)
        calls.arguments("[")
        first, of_item = True, items_of(schema, self._root)
        while not (yield from self._closed("]", depth)):
            if not first:
                calls.arguments(", ")
            first = False
            yield from self._value(of_item, "]", depth)
            yield from self._comma("]")
        calls.arguments("]")

    def _string(self, out: Any) -> Reading[None]:
        source = self._source
        source.take_mark()
        with source.value():
            yield from source.text_until((), out)
        mark = source.mark()
        if mark is None or mark.literal != _QUOTE:
            raise BrokenCall
        source.take_mark()

    def _key(self) -> Reading[str]:
        source = self._source
        if not (yield from source.character()):
            pieces: list[str] = []
            mark = source.mark()
            if mark is None or mark.literal != _QUOTE:
                raise BrokenCall
            yield from self._string(pieces.append)
            key = "".join(pieces)
        else:
            key = (yield from source.word(":", self._calls.limits.characters)).strip()
        yield from source.spaces()
        if (yield from source.character()) != ":":
            raise BrokenCall
        source.take(1)
        return key

    def _closed(self, closer: str, depth: int) -> Reading[bool]:
        """Whether the object or list is over; the outermost one may end with the call, without a closer."""
        source = self._source
        yield from source.spaces()
        character = yield from source.character()
        if character == closer:
            source.take(1)
            return True
        if character or depth > 1:
            return False
        mark = source.mark()
        return mark.literal == _END if mark is not None else not self._calls.cut

    def _comma(self, closer: str) -> Reading[None]:
        yield from self._source.spaces()
        character = yield from self._source.character()
        if character == ",":
            self._source.take(1)
        elif character and character != closer:
            raise BrokenCall

    def _deeper(self, depth: int) -> None:
        if depth > self._calls.limits.depth:
            raise BrokenCall
