"""Hermes, Qwen2.5, Qwen3: ``<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>``."""

from collections.abc import Sequence

from engine.text.parsers.calls import CallWriter, Schema, ToolFormat
from engine.text.parsers.json_calls import call_list, call_object, call_object_rule
from engine.text.parsers.lark_grammar import Grammar, either
from engine.text.parsers.source import Reading


class Hermes(ToolFormat):
    openers = ("<tool_call>",)
    marks = ("<tool_call>", "</tool_call>")

    def read(self, calls: CallWriter) -> Reading[None]:
        source = calls.source
        yield from source.spaces()
        if (yield from source.character()) == "[":  # SmolLM2 writes all its calls as one list
            yield from call_list(calls)
        else:
            yield from call_object(calls)
        yield from source.spaces()
        mark = source.mark()
        if mark is not None and mark.literal == "</tool_call>":
            source.take_mark()

    def call_rule(self, grammar: Grammar, name: str, schema: Schema, *, strict: bool) -> str:
        return call_object_rule(grammar, name, schema, strict=strict)

    def calls_rule(self, grammar: Grammar, calls: Sequence[str], *, parallel: bool) -> str:
        one = f'{grammar.mark("<tool_call>")} "\\n" {either(calls)} "\\n" {grammar.mark("</tool_call>")}'
        return f'{one} ("\\n" {one})*' if parallel else one
