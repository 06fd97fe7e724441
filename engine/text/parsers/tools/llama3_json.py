"""Llama 3.1 and later: the answer is ``{"name": …, "parameters": {…}}``, several are separated by semicolons.

Nothing marks a call unless the model writes ``<|python_tag|>`` first, so only an answer that begins with a call of an
offered function is one.
"""

from engine.text.parsers.calls import CallWriter, ToolFormat
from engine.text.parsers.json_calls import call_object
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
