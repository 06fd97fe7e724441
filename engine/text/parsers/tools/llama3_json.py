"""Llama 3.1 and later: the answer is ``{"name": …, "parameters": {…}}``, several are separated by semicolons.

Calls are not marked unless the model writes ``<|python_tag|>`` first. So an answer counts as a call only if it begins
with a call of an offered function.
"""

from collections.abc import Sequence

from engine.text.parsers.calls import CallWriter, Schema, ToolFormat
from engine.text.parsers.json_calls import call_object, call_object_rule
from engine.text.parsers.lark_grammar import ANYTHING, SPACE, Grammar, containing, either, escaped
from engine.text.parsers.source import Reading


class Llama3Json(ToolFormat):
    openers = ("<|python_tag|>",)
    marks = openers
    bare = "{"

    def read(self, calls: CallWriter) -> Reading[None]:
        source = calls.source
        while True:
            yield from source.spaces()
            yield from call_object(calls)
            yield from source.spaces()
            if (yield from source.character()) != ";":
                return
            calls.expect()
            source.take(1)
            yield from source.spaces()
            if not (yield from source.character()):
                return

    def call_rule(self, grammar: Grammar, name: str, schema: Schema, *, strict: bool) -> str:
        return call_object_rule(grammar, name, schema, strict=strict, arguments="parameters")

    def calls_rule(self, grammar: Grammar, calls: Sequence[str], *, parallel: bool) -> str:
        return f'{either(calls)} ("; " {either(calls)})*' if parallel else either(calls)

    def text_and_calls(self, grammar: Grammar, calls: Sequence[str], marks: Sequence[str]) -> str:
        # Text after a mark could be read as the beginning of an answer.
        text = grammar.text(f"{SPACE}*{escaped(self.bare)}{ANYTHING}", containing(marks))
        tag = f"{grammar.mark('<|python_tag|>')}? " if grammar.has("<|python_tag|>") else ""
        return f"({text} | {tag}{self.calls_rule(grammar, calls, parallel=True)})"
