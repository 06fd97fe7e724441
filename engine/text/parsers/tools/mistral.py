"""Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, newer tokenizers ``[TOOL_CALLS]name[ARGS]{…}``."""

from engine.text.parsers.calls import CallWriter, ToolFormat
from engine.text.parsers.json_calls import call_arguments, call_list, call_object
from engine.text.parsers.source import BrokenCall, Reading


class Mistral(ToolFormat):
    openers = ("[TOOL_CALLS]",)
    marks = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    id_prefix, id_characters = "", 9  # the templates refuse any other id

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
            yield from source.word("{", calls.limits.name)  # our ids are our own
            mark = source.mark()
        if mark is not None:
            if mark.literal != "[ARGS]":
                raise BrokenCall
            source.take_mark()
            yield from source.spaces()
        calls.begin(name)
        yield from call_arguments(calls)
        calls.end()
