"""However an answer is cut, whatever it holds: the same result, and never an exception."""

import json
from typing import Any

import pytest
from answers import FAMILIES, calls_of, cut, events_of, marks_of, parser, parts_of, streamed
from hypothesis import given, settings
from hypothesis import strategies as st
from marked_tokenizer import bytes_and
from tokenizers import AddedToken

from engine.core.params import SamplingParams
from engine.text.detok import Detokenizer
from engine.text.marks import MARKS
from engine.text.parsers.events import ParserLimits, parsed
from engine.text.parsers.registry import output_format
from engine.text.parsers.source import Part
from engine.text.tokenizer import TextTokenizer

# What answers are made of: whole calls, their pieces in any order, and text.
FRAGMENTS = [
    "call:get_weather{", 'city:<|"|>Paris<|"|>', ",", "days:2", "}", "(", ")", ":", "[1,", "]", "thought\n", "null",
    "<function=get_weather>", "<function=", "<parameter=city>", "<parameter=days>\n2", "</parameter>", "</function>",
    "\n", " ", '{"name": "get_weather", "arguments": {"city": "x\\n"}}', '{"name": "f", ', '"arguments": {', '"a": 1',
    '"', "\\", '[{"name"', "get_weather", '{"a": [true', ";", "é한😀", "<", "<tool_", "Hello", "0.5", "\\u00e9", "\t",
]  # fmt: skip


def answers(family: str) -> st.SearchStrategy[str]:
    marks = marks_of(family)
    return st.lists(st.sampled_from([*FRAGMENTS, *marks, *marks]) | st.text(max_size=4), max_size=25).map("".join)


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=6)
LIMITS = ParserLimits(calls=3, characters=60, depth=3, name=12)


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_any_chunking_gives_the_same_result(family: str, data: Any) -> None:
    text = data.draw(answers(family))
    options = {"thinking": data.draw(st.booleans()), "limits": data.draw(st.sampled_from([ParserLimits(), LIMITS]))}
    cut_short, literal = data.draw(st.booleans()), data.draw(st.booleans())
    parts: list[Part] = [text] if literal else parts_of(text, family)
    whole = events_of(parser(family, literal=literal, **options), [parts], cut_short=cut_short)
    pieces = events_of(parser(family, literal=literal, **options), cut(parts, data.draw(SIZES)), cut_short=cut_short)
    assert streamed(pieces) == streamed(whole)
    for call in parsed(whole).calls:
        assert isinstance(json.loads(call.arguments), dict)


def byte_tokenizer(family: str) -> TextTokenizer:
    """Every byte is a token, and so is every mark of the family."""
    marks = [AddedToken(mark, special=i % 2 == 0, normalized=False) for i, mark in enumerate(marks_of(family))]
    return TextTokenizer(bytes_and(marks), template_source="{{ tools }}")


TOKENIZERS = {family: byte_tokenizer(family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_tokens_in_any_steps_give_the_same_result(family: str, data: Any) -> None:
    """Through the detokenizer, with stop strings: a step may bring any number of tokens."""
    tokenizer = TOKENIZERS[family]
    form = output_format(tokenizer, *(name or "none" for name in FAMILIES[family]))
    text = data.draw(answers(family))
    ids = tokenizer.encode_trusted(text, add_special_tokens=False)
    stop = data.draw(st.sampled_from([[], ["</f"], ["l>"], ["call>x", "Hello"]]))

    def said(sizes: list[int]) -> tuple[list[Any], int]:
        detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stop), form.watched(calls=True))
        parse = form.parser(calls=True, schemas={"get_weather": {}}, thinking=False, limits=ParserLimits())
        events, thinking, i, at, over = [], 0, 0, 0, False
        while not over:
            step = ids[at : at + sizes[i % len(sizes)]]
            at, i = at + len(step), i + 1
            delta = detokenizer.push(step, finished=at == len(ids))
            for parts in delta.parts:
                thinking += parse.thinking
                events += parse.push(parts)
            over = delta.stopped or at == len(ids)
        return streamed(events + parse.finish()), thinking

    assert said(data.draw(SIZES)) == said([max(1, len(ids))])


# Marks of engine.text.marks become U+FFFD before a template sees them.
CHARACTERS = st.characters(codec="utf-8", exclude_characters=MARKS)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.text(CHARACTERS, max_size=12)
    | st.sampled_from(["</parameter>", "\n", "\nx\n", "a, {b}: [c]", "<|", '"quoted" \\ ', "null", "2", "<parameter="]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text("abc한", min_size=1, max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(arguments=st.dictionaries(st.text("abcé_", min_size=1, max_size=5), VALUES, max_size=4), sizes=SIZES)
@settings(max_examples=200, deadline=None)
def test_json_arguments_arrive_as_they_were_written(arguments: dict, sizes: list[int]) -> None:
    call = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    for family, text in [
        ("qwen3", f"<tool_call>\n{call}\n</tool_call>"),
        ("llama3", json.dumps({"name": "f", "parameters": arguments}, indent=1)),
        ("mistral", f"[TOOL_CALLS]f[ARGS]{json.dumps(arguments)}"),
    ]:
        events = events_of(parser(family), cut(parts_of(text, family), sizes))
        assert calls_of(parsed(events)) == [("f", arguments)]
