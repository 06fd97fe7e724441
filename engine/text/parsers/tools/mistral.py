"""Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, newer tokenizers ``[TOOL_CALLS]name[ARGS]{…}``."""

from collections.abc import Sequence

from engine.text.parsers.calls import CallWriter, Schema, ToolFormat
from engine.text.parsers.json_calls import (
    arguments_rule,
    call_arguments,
    call_list,
    call_object,
    call_object_rule,
)
from engine.text.parsers.lark_grammar import Grammar, either, quoted
from engine.text.parsers.source import BrokenCall, Reading


class Mistral(ToolFormat):
    openers = ("[TOOL_CALLS]",)
    marks = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    id_prefix, id_characters = "", 9  # the templates refuse any other form of id

    def read(self, calls: CallWriter) -> Reading[None]:
        source = calls.source
        yield from source.spaces()
        character = yield from source.character()
        if character == "[":
            yield from call_list(calls)
        elif character == "{":
            yield from call_object(calls)
        else:
            yield from self._named(calls)

    def _named(self, calls: CallWriter) -> Reading[None]:
        source = calls.source
        name = (yield from source.word("{", calls.limits.name)).strip()
        mark = source.mark()
        if mark is not None and mark.literal == "[CALL_ID]":
            source.take_mark()
            yield from source.word("{", calls.limits.name)  # skip the model's id: we make our own
            mark = source.mark()
        if mark is not None:
            if mark.literal != "[ARGS]":
                raise BrokenCall
            source.take_mark()
            yield from source.spaces()
        calls.begin(name)
        yield from call_arguments(calls)
        calls.end()

    def call_rule(self, grammar: Grammar, name: str, schema: Schema, *, strict: bool) -> str:
        if not grammar.has("[ARGS]"):
            return call_object_rule(grammar, name, schema, strict=strict)
        return grammar.rule(f"{quoted(name)} {grammar.mark('[ARGS]')} {arguments_rule(grammar, schema, strict=strict)}")

    def calls_rule(self, grammar: Grammar, calls: Sequence[str], *, parallel: bool) -> str:
        opener, one = grammar.mark("[TOOL_CALLS]"), either(calls)
        if grammar.has("[ARGS]"):
            return f"{opener} {one} ({opener} {one})*" if parallel else f"{opener} {one}"
        return f'{opener} "[" {one} (", " {one})* "]"' if parallel else f'{opener} "[" {one} "]"'
