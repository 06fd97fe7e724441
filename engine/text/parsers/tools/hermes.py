"""Hermes, Qwen2.5, Qwen3: ``<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>``."""

from engine.text.parsers.calls import CallWriter, ToolFormat
from engine.text.parsers.json_calls import call_list, call_object
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
