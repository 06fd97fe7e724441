"""Answers in every family's syntax, almost right, in any chunking: the same result, calls that are objects, no more
output than input, and never an exception."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from answers import FAMILIES, cut, events_of, marks_of, parser, parts_of, streamed
from fuzzing import Defect, Target
from mutations import Chance

from engine.text.parsers.events import CallArguments, Content, ParserLimits, Reasoning, parsed

GOOD = {
    "gemma4": ['<|channel>thought\nhm<channel|>Hi<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>',
               '<|tool_call>call:f{a:[1,{b:<|"|>x<|"|>}],c:true,d:null,e:-0.5e3}<tool_call|>'],
    "qwen3.6": ["<think>\nhm\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
                "<parameter=opts>\n{\"a\": [1]}\n</parameter>\n</function>\n</tool_call>"],
    "qwen3": ['<think>\nhm\n</think>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa\\u0301ris"}}\n'
              '</tool_call>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'],
    "llama3": ['<|python_tag|>{"name": "get_weather", "parameters": {"city": "x", "list": ["a\\n"]}}',
               '{"name": "f", "parameters": {"a": {"b": [1, 2.5, null]}}}; {"name": "f", "parameters": {}}'],
    "mistral": ['[THINK]hm[/THINK]Hi[TOOL_CALLS]get_weather[ARGS]{"city": "x"}[TOOL_CALLS]f[ARGS]{}',
                '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'],
}  # fmt: skip
SMALL = ParserLimits(calls=2, characters=50, depth=3, name=8)


def answer(chance: Chance, family: str) -> str:
    marks, text = marks_of(family), chance.choice(GOOD[family])
    for _ in range(chance.choice((0, 1, 2, 5))):
        at, kind = chance.randint(0, len(text)), chance.randint(0, 5)
        if kind == 0:
            text = text[:at] + chance.choice(marks) + text[at:]
        elif kind == 1:
            text = text[:at] + chance.text() + text[at:]
        elif kind == 2:
            text = text[:at] + text[at + chance.randint(1, 30) :]
        elif kind == 3:
            text = text[:at] + text[at : at + chance.randint(1, 40)] * chance.choice((2, 3, 200)) + text[at:]
        elif kind == 4:
            text = text[:at]
        else:
            text += chance.choice(GOOD[chance.choice(list(GOOD))])
    return text


def attempt(chance: Chance) -> None:
    family = chance.choice(list(FAMILIES))
    text, literal, ended = answer(chance, family), chance.often(0.3), chance.often(0.5)
    options = {"thinking": chance.often(0.3), "tools": chance.often(0.8), "literal": literal,
               "limits": SMALL if chance.often(0.3) else ParserLimits()}
    parts = [text] if literal else parts_of(text, family)
    sizes = [chance.randint(1, chance.choice((1, 3, 40))) for _ in range(5)]
    whole = events_of(parser(family, **options), [parts], cut_short=not ended)
    pieces = events_of(parser(family, **options), cut(parts, sizes), cut_short=not ended)
    if streamed(pieces) != streamed(whole):
        raise Defect(f"{family} {options}: the answer {text!r} reads otherwise in pieces of {sizes}")
    for call in parsed(whole).calls:
        if not isinstance(json.loads(call.arguments), dict):
            raise Defect(f"{family}: the arguments of a call in {text!r} are no object: {call.arguments!r}")
    said = sum(len(event.text) for event in whole if isinstance(event, Content | Reasoning | CallArguments))
    if said > 8 * len(text) + 100:  # (a control character is six characters in JSON)
        raise Defect(f"{family}: {len(text)} characters became {said}")


@contextmanager
def session() -> Iterator[Callable[[Chance], None]]:
    yield attempt


TARGET = Target("parsers", session)
