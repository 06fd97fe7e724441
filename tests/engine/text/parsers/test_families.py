"""Golden answers of each family: what the model writes, and what a client gets."""

import json
import time

import pytest
from answers import answer, calls_of, cut, events_of, parser, parts_of

from engine.text.parsers.events import ParserLimits, parsed

ARGUMENTS = {"city": "Paris", "days": 2, "opts": {"b": True, "a": [1, "x"]}}
QWEN = ("<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n"
        '<parameter=opts>\n{"b": true, "a": [1, "x"]}\n</parameter>\n</function>\n</tool_call>')
GEMMA = ('<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2,opts:{a:[1,<|"|>x<|"|>],b:true}}<tool_call|>')
HERMES = f'<tool_call>\n{json.dumps({"name": "get_weather", "arguments": ARGUMENTS})}\n</tool_call>'
LLAMA = json.dumps({"name": "get_weather", "parameters": ARGUMENTS})
MISTRAL = f'[TOOL_CALLS][{json.dumps({"name": "get_weather", "arguments": ARGUMENTS, "id": "abcdefghi"})}]'
MISTRAL_NEW = f"[TOOL_CALLS]get_weather[ARGS]{json.dumps(ARGUMENTS)}"
CALLS = {"gemma4": GEMMA, "qwen3.6": QWEN, "qwen3": HERMES, "llama3": LLAMA, "mistral": MISTRAL}
THINKING = {"gemma4": ("<|channel>thought\n", "\n<channel|>"), "qwen3.6": ("<think>\n", "\n</think>\n\n"),
            "qwen3": ("<think>\n", "\n</think>\n\n"), "mistral": ("[THINK]", "[/THINK]")}


@pytest.mark.parametrize("family", CALLS)
def test_one_call(family: str) -> None:
    result = answer(CALLS[family], family)
    assert calls_of(result) == [("get_weather", ARGUMENTS)]
    assert (result.content, result.reasoning) == ("", "")


@pytest.mark.parametrize("family, text", [
    ("gemma4", GEMMA + GEMMA), ("qwen3.6", f"{QWEN}\n{QWEN}"), ("qwen3", f"{HERMES}\n{HERMES}"),
    ("qwen3", f"<tool_call>[{HERMES[12:-13]}, {HERMES[12:-13]}]</tool_call>"), ("llama3", f"{LLAMA}; {LLAMA}"),
    ("llama3", f"<|python_tag|>{LLAMA};{LLAMA}"), ("mistral", f"{MISTRAL[:-1]}, {MISTRAL[13:]}"),
    ("mistral", MISTRAL_NEW * 2),
])  # fmt: skip
def test_parallel_calls(family: str, text: str) -> None:
    result = answer(text, family)
    assert calls_of(result) == [("get_weather", ARGUMENTS)] * 2
    assert result.content == ""


@pytest.mark.parametrize("family", THINKING)
def test_reasoning_then_content_then_a_call(family: str) -> None:
    opener, closer = THINKING[family]
    result = answer(f"{opener}need a\n\ntool{closer}Let me see.\n\n{CALLS[family]}", family)
    assert (result.reasoning, result.content) == ("need a\n\ntool", "Let me see.")
    assert calls_of(result) == [("get_weather", ARGUMENTS)]
    inside = answer(f"need{closer}Answer.\n", family, thinking=True)
    assert (inside.reasoning, inside.content.strip(), inside.calls) == ("need", "Answer.", [])


@pytest.mark.parametrize("family", THINKING)
def test_a_call_ends_open_reasoning(family: str) -> None:
    result = answer(f"hm\n{CALLS[family]}", family, thinking=True)
    assert (result.reasoning, result.content) == ("hm", "")
    assert calls_of(result) == [("get_weather", ARGUMENTS)]
    unfinished = answer("hm, so\n", family, thinking=True, cut_short=True)
    assert (unfinished.reasoning, unfinished.content) == ("hm, so", "")


@pytest.mark.parametrize("family", [*CALLS])
def test_text_that_spells_a_mark_is_text(family: str) -> None:
    """A user has the model repeat the syntax: only the token itself begins a call or reasoning."""
    said = f"You wrote:\n{CALLS[family]} {''.join(THINKING.get(family, ()))}!"
    parse = parser(family)
    result = parsed([*parse.push([said]), *parse.finish()])
    assert (result.content, result.reasoning, result.calls) == (said, "", [])


def test_without_offered_tools_a_call_is_text() -> None:
    assert answer(LLAMA, "llama3", tools=False).content == LLAMA
    assert answer(f"<think>\nx\n</think>\n\n{LLAMA}", "qwen3", tools=False).reasoning == "x"


def test_marks_that_the_vocabulary_lacks_are_found_in_text() -> None:
    result = answer(f"Well.\n{HERMES} <tool_", "qwen3", literal=True)
    assert (result.content, calls_of(result)) == ("Well.<tool_", [("get_weather", ARGUMENTS)])
    unknown = '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'
    assert answer(unknown, "qwen3", literal=True).content == unknown, "text alone calls offered functions only"


# -- Qwen3.6


def call(*parameters: str) -> str:
    return "<tool_call>\n<function=get_weather>\n" + "".join(parameters) + "</function>\n</tool_call>"


@pytest.mark.parametrize("value, kind, expected", [
    ("Paris", "city", "Paris"), ("\nParis\n", "city", "\nParis\n"), ("", "city", ""), ("null", "city", "null"),
    ("2", "days", 2), ("two", "days", "two"), ("2.5", "share", 2.5), ("2.0", "share", 2), ("nan", "share", "nan"),
    ("-1e999", "share", -1.7976931348623157e308), ("True", "fine", True), ("0", "fine", False), ("null", "maybe", None),
    ("x", "maybe", "x"), ('{"a": 1}', "opts", {"a": 1}), ("{'a': 1}", "opts", "{'a': 1}"), ("7", "either", 7),
    ("seven", "either", "seven"), ("5", "unknown", "5"), ('["é한"]', "list", ["é한"]),
    ("if a < b:\n    return '</parameter> x <parameter=x> </function>'", "city",
     "if a < b:\n    return '</parameter> x <parameter=x> </function>'"),
    ('quote " back \\ tab \t', "city", 'quote " back \\ tab \t'), ("9" * 5000, "days", "9" * 5000),
])  # fmt: skip
def test_qwen_values(value: str, kind: str, expected: object) -> None:
    text = call(f"<parameter={kind}>\n{value}\n</parameter>\n")
    assert calls_of(answer(text, "qwen3.6")) == [("get_weather", {kind: expected})]


@pytest.mark.parametrize("text, arguments", [
    (call(), {}),
    (call("<parameter=city>\nParis\n<parameter=days>\n2\n</parameter>\n"), {"city": "Paris", "days": 2}),
    (call("<parameter=city>\nParis\n"), {"city": "Paris"}),
    (call("<parameter=city>Paris</parameter>"), {"city": "Paris"}),
    (call("<parameter=city>\nParis\n</parameter>\n").replace("</function>\n", ""), {"city": "Paris"}),
    (call("<parameter=city>\nParis\n</parameter>\n").removesuffix("</function>\n</tool_call>"), {"city": "Paris"}),
    (call("<parameter=city>\nParis\n</parameter>\n")[12:-13], {"city": "Paris"}),
])  # fmt: skip
def test_qwen_forgets_tags(text: str, arguments: dict) -> None:
    assert calls_of(answer(text, "qwen3.6")) == [("get_weather", arguments)]


@pytest.mark.parametrize("text", [
    "Use <function=get_weather> like this", "<function=unknown>\n</function>", "<function=get_weather",
    "<tool_call>\nnothing\n</tool_call>", "<tool_call>", "<tool_call>\n<function=get\nx>\n</tool_call> and more ",
])  # fmt: skip
def test_what_is_no_call_comes_back_as_content(text: str) -> None:
    result = answer(text, "qwen3.6")
    assert (result.content, result.calls) == (text, [])


def test_a_value_may_name_the_marks_of_reasoning() -> None:
    text = call("<parameter=city>\nif '<think>' in x: </think>\n</parameter>\n")
    assert calls_of(answer(text, "qwen3.6")) == [("get_weather", {"city": "if '<think>' in x: </think>"})]


# -- Gemma 4


@pytest.mark.parametrize("inside, arguments", [
    ("", {}),
    ('city:<|"|>a, {b}: [c] "d" \\ \n<|"|>', {"city": 'a, {b}: [c] "d" \\ \n'}),
    ('<|"|>city<|"|>:<|"|>x<|"|>', {"city": "x"}),
    ("days:2,fine:true,maybe:null", {"days": 2, "fine": True, "maybe": None}),
    ("share:-1.5e3", {"share": -1500}), ("city:123", {"city": "123"}), ("days:two", {"days": "two"}),
    ("other:123,word:abc,none:null,yes:true", {"other": 123, "word": "abc", "none": None, "yes": True}),
    ("opts:{a:{b:[1,[true,{c:null}]]}},list:[<|\"|>x<|\"|>,5]",
     {"opts": {"a": {"b": [1, [True, {"c": None}]]}}, "list": ["x", "5"]}),
    ("opts:{},list:[]", {"opts": {}, "list": []}), (" city : <|\"|>x<|\"|> , days : 2 ", {"city": "x", "days": 2}),
])  # fmt: skip
def test_gemma_values(inside: str, arguments: dict) -> None:
    text = f"<|tool_call>call:get_weather{{{inside}}}<tool_call|>"
    assert calls_of(answer(text, "gemma4")) == [("get_weather", arguments)]


@pytest.mark.parametrize("text", [
    '<|tool_call>:get_weather{city:<|"|>x<|"|>}<tool_call|>',
    '<|tool_call>call:get_weather(city:<|"|>x<|"|>)<tool_call|>', '<|tool_call>call:get_weather{city:<|"|>x<|"|>',
    '<|tool_call>call:get_weather{city:<|"|>x<|"|>}<tool_call|><tool_call|>',
    '<channel|><|tool_call>call:get_weather{city:<|"|>x<|"|>}<tool_call|><|tool_response>',
    '<|tool_call>call:get_weather{city:<|"|>x<|"|><tool_call|>',
])  # fmt: skip
def test_gemma_slips(text: str) -> None:
    result = answer(text, "gemma4")
    assert calls_of(result) == [("get_weather", {"city": "x"})]
    assert result.content == ""


def test_gemma_reasoning_slips() -> None:
    assert answer("thought\nhm<channel|>Hi", "gemma4").reasoning == "hm", "the opener is forgotten"
    both = answer("<|channel>thought\na<channel|>one<|channel>thought\nb<channel|>two", "gemma4")
    assert (both.reasoning, both.content) == ("ab", "onetwo")
    assert answer("<|channel>thought\n<channel|>Hi", "gemma4").content == "Hi"
    assert answer("though", "gemma4").content == "though"


# -- JSON families


@pytest.mark.parametrize("inside, arguments", [
    ('{"arguments": {"city": "x"}, "name": "get_weather"}', {"city": "x"}),
    ('{"name": "get_weather"}', {}), ('{"name": "get_weather", "arguments": null}', {}),
    ('{"name": "get_weather", "arguments": "{\\"city\\": \\"x\\"}"}', {"city": "x"}),
    ('{"id": 1, "name": "get_weather", "extra": [{"a": 1}], "parameters": {"city": "x"}}', {"city": "x"}),
    ('{"name": "get_weather", "arguments": {"city": "two\nlines\t"}}', {"city": "two\nlines\t"}),
    ('{"name": "get_weather", "arguments": {"city": "\\u00e9\\ud83d\\ude00"}}', {"city": "é😀"}),
    ('{"name":"get_weather","arguments":{"city":"</tool_call >"}}', {"city": "</tool_call >"}),
])  # fmt: skip
def test_hermes_forms(inside: str, arguments: dict) -> None:
    assert calls_of(answer(f"<tool_call>{inside}</tool_call>", "qwen3")) == [("get_weather", arguments)]
    assert calls_of(answer(f"<tool_call>\n{inside}", "qwen3")) == [("get_weather", arguments)], "no closing tag"


@pytest.mark.parametrize("inside", [
    "not json", '{"name": 5, "arguments": {}}', '{"arguments": {}}', '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": {"a": nul}}', '{"name": "f", "arguments": {"a": 01}}', "{'name': 'f'}",
    '{"name": "f", "arguments": {"a" 1}}', '{"name": "f", "arguments": {"a": "\\x"}}', '{"name": ""}',
    '{"name": "f", "arguments": {"a": NaN}}', '{"name": "f", "arguments": "[1]"}', '{"name": "f" "arguments": {}}',
    '{"name": "f", "arguments": {"a": 1,}}', "[]", "",
])  # fmt: skip
def test_malformed_calls_come_back_as_content(inside: str) -> None:
    text = f"Look: <tool_call>\n{inside}\n</tool_call> done."
    result = answer(text, "qwen3")
    assert result.calls == []
    assert "".join(result.content.split()) == "".join(text.split())


def test_a_call_that_is_cut_short_comes_back_as_content() -> None:
    for family, text in CALLS.items():
        for end in range(1, len(text) - 20):
            result = answer(text[:end], family, cut_short=True)
            assert result.calls == []


def test_llama_answers_json_that_is_no_call() -> None:
    for text in ('{"name": "Ada", "parameters": {}}', '{"a": 1}', "{", '{"name": "f"}', f"So: {LLAMA}"):
        assert answer(text, "llama3").content == text
    assert calls_of(answer(f"  {LLAMA}\n", "llama3")) == [("get_weather", ARGUMENTS)]
    assert answer("<|python_tag|>print(1)", "llama3").content == "<|python_tag|>print(1)"


def test_mistral_forms() -> None:
    for text in (MISTRAL_NEW, MISTRAL_NEW.replace("[ARGS]", "[CALL_ID]abcdefghi[ARGS]"),
                 MISTRAL_NEW.replace("[ARGS]", ""), MISTRAL.replace("][", "] [", 1)):
        assert calls_of(answer(text, "mistral")) == [("get_weather", ARGUMENTS)]


# -- bounds


def test_a_bound_in_the_middle_of_a_tag_does_not_depend_on_the_chunking() -> None:
    text = "<function=get_weather>call:get_weather{call:get_weather{call:get_weather{"
    for characters in range(1, len(text) + 2):
        answer(text, "qwen3.6", limits=ParserLimits(characters=characters))
        answer(QWEN, "qwen3.6", limits=ParserLimits(characters=characters))
        answer(GEMMA, "gemma4", limits=ParserLimits(characters=characters))
        answer(HERMES, "qwen3", limits=ParserLimits(characters=characters))
        escapes = '<tool_call>{"name": "f", "arguments": {"a": "\\u00e9\\n\\\\"}}</tool_call>'
        answer(escapes, "qwen3", limits=ParserLimits(characters=characters))


def test_a_word_without_an_end_does_not_depend_on_the_chunking() -> None:
    """Found by the fuzzer: as much of it was given up with the call as had come by then."""
    for length in (399, 400, 401, 402, 900):
        said = answer(f'<tool_call>{{"name": "f", "arguments": {{"a": {"1" * length}, "b": 1}}}}</tool_call>', "qwen3")
        assert len(said.calls) == (length <= 400)


def test_bounds_make_a_call_content() -> None:
    limits = ParserLimits(calls=2, characters=200, depth=4, name=16)
    deep = '{"name": "f", "arguments": {"a": [[[[1]]]]}}'
    for family, text in [
        ("qwen3", f"<tool_call>{deep}</tool_call>"), ("gemma4", "<|tool_call>call:f{a:[[[[[1]]]]]}<tool_call|>"),
        ("qwen3", f'<tool_call>{{"name": "{"f" * 17}", "arguments": {{}}}}</tool_call>'),
        ("qwen3.6", f"<tool_call>\n<function={'f' * 17}>\n</function>\n</tool_call>"),
        ("qwen3.6", f"<tool_call>\n<function=f>\n<parameter=a>\n{'x' * 300}\n</parameter>\n</function>\n</tool_call>"),
        ("mistral", f'[TOOL_CALLS]f[ARGS]{{"a": "{"x" * 300}"}}'),
    ]:
        result = answer(text, family, limits=limits)
        assert result.calls == [], text
        assert "".join(result.content.split()) == "".join(text.split())
    assert len(answer(GEMMA.replace("days:2,", "") * 3, "gemma4", limits=limits).calls) == 2


@pytest.mark.parametrize("family, text", [
    ("qwen3", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000),
    ("gemma4", "<|tool_call>call:f{a:" + "{a:" * 100_000),
    ("qwen3.6", "<tool_call>\n<function=f>\n<parameter=a>\n" + "</parameter>" * 80_000),
    ("qwen3.6", "<tool_call>\n<function=get_weather>\n<parameter=opts>\n" + "[" * 1_000_000),
    ("qwen3", '<tool_call>{"name": "f", "arguments": {"a": "' + "\\n" * 500_000),
    ("qwen3", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 1_000_000),
    ("llama3", '{"name": "f", "x": [' + "1," * 500_000), ("mistral", "[TOOL_CALLS]" + "f" * 1_000_000),
])  # fmt: skip
def test_a_megabyte_of_hostile_text_takes_a_moment(family: str, text: str) -> None:
    began = time.process_time()
    for sizes in ([1 << 20], [50]):
        events_of(parser(family), cut(parts_of(text, family), sizes))
    assert time.process_time() - began < 10
