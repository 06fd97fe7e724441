"""Grammars of forced calls: what they allow is a call that the parser reads and the schema accepts; what the templates
write is allowed."""

import contextlib
import json
import random
from typing import Any

import jsonschema_rs
import pytest
from answers import FAMILIES, WEATHER, marks_of, parts_of
from llguidance import LLMatcher, LLTokenizer
from marked_tokenizer import bytes_and
from test_families import CALLS, MISTRAL_NEW, THINKING
from tokenizers import AddedToken

from engine.core.params import SamplingParams
from engine.errors import InvalidRequestError
from engine.text.detok import Detokenizer
from engine.text.grammar import forms
from engine.text.parsers.answer_grammar import calls_grammar
from engine.text.parsers.events import Parsed, ParserLimits, parsed
from engine.text.parsers.registry import OutputFormat, output_format
from engine.text.tokenizer import TextTokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"type": "string", "enum": ["c", "f", "a <b>"]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{1,3}$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "share": {"type": "number"},
        "fine": {"type": "boolean"},
        "nothing": {"type": "null"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/place"}, "minItems": 1, "maxItems": 3},
        "either": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days", "list"],
    "additionalProperties": False,
    "$defs": {"place": {
        "type": "object",
        "properties": {"name": {"enum": ["x", "y"]}, "inside": {"$ref": "#/$defs/place"}},
        "required": ["name"], "additionalProperties": False,
    }},
}  # fmt: skip
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS: dict[str, dict] = {"get_weather": SCHEMA, "now": NOTHING}


class Model:
    """Writes whatever a grammar allows, at random, with a liking for what ends things."""

    def __init__(self, family: str, *, tokens: bool = True) -> None:
        marks = [*(marks_of(family) if tokens else ()), "<eos>"]
        tokenizer = bytes_and(AddedToken(mark, special=mark[0] == "[" or i % 2 == 0, normalized=False)
                              for i, mark in enumerate(marks))
        self.eos = tokenizer.token_to_id("<eos>") or 0
        self.matchers = LLTokenizer(tokenizer.to_str(), eos_token=self.eos)
        self.tokenizer = TextTokenizer(tokenizer, template_source="{{ tools }}")
        self.form = output_format(self.tokenizer, *(name or "none" for name in FAMILIES[family]))
        closing = self.tokenizer.encode_trusted("\"}]>/\n\\", False)
        self._likes = {*closing, self.eos, *self.form.ids.values()}

    def grammar(self, schemas: dict[str, dict] = SCHEMAS, **options: Any) -> Any:
        form = self.form
        assert form.tools is not None
        lark = calls_grammar(form.tools, form.reasoning, form.ids, schemas, **{
            "strict": frozenset(schemas), "forced": True, "parallel": True, "thinking": False, "may_think": True,
            **options})
        matcher = LLMatcher(self.matchers, LLMatcher.grammar_from_lark(lark))
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def write(self, matcher: Any, luck: random.Random, most: int = 3000) -> list[int]:
        ids: list[int] = []
        while len(ids) < most:
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(self.matchers.vocab_size) if mask[i // 8] >> (i % 8) & 1]
            liked = [i for i in allowed if i in self._likes]
            ascii_ = [i for i in allowed if len(text := self.tokenizer.token_text(i)) == 1 and " " <= text < "\x7f"]
            token = luck.choice(liked if liked and (luck.random() < 0.5 or not ascii_) else ascii_ or allowed)
            assert matcher.consume_token(token), matcher.get_error()
            if token == self.eos:
                return ids
            ids.append(token)
        pytest.skip("it wrote on and on")

    def parse(self, ids: list[int], schemas: dict[str, dict] = SCHEMAS, **options: Any) -> Parsed:
        return read(self.form, self.tokenizer, ids, schemas, **options)

    def beside(self, answer: dict[str, Any], **options: Any) -> Any:
        """The grammar of an answer in this format, or of calls."""
        form = self.form
        assert form.tools is not None
        lark = calls_grammar(form.tools, form.reasoning, form.ids, SCHEMAS, **{
            "strict": frozenset(SCHEMAS), "forced": False, "parallel": True, "thinking": False, "may_think": True,
            "answers": True, **options})
        matcher = LLMatcher(self.matchers, forms.whole(answer, lark))
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def allows(self, matcher: Any, text: str) -> bool:
        """Whether this can be the whole answer, token by token."""
        ids = [*self.tokenizer.encode_trusted(text, False), self.eos]
        return matcher.validate_tokens(ids) == len(ids)


def read(form: OutputFormat, tokenizer: TextTokenizer, ids: list[int], schemas: dict[str, dict], *,
         thinking: bool = False, formatted: bool = False) -> Parsed:
    parse = form.parser(calls=True, schemas=schemas, thinking=thinking, limits=ParserLimits(), formatted=formatted)
    delta = Detokenizer(tokenizer, SamplingParams(), form.watched(calls=True)).push(ids, finished=True)
    events = [event for parts in delta.parts for event in parse.push(parts)]
    return parsed([*events, *parse.finish()])


MODELS = {family: Model(family) for family in FAMILIES}
SPELLED = {family: Model(family, tokens=False) for family in FAMILIES if family != "gemma4"}  # marks are text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_grammar_allows_is_a_call_that_the_schema_accepts(family: str, seed: int) -> None:
    model, luck = MODELS[family], random.Random(seed)
    parallel = seed % 2 == 0
    ids = model.write(model.grammar(parallel=parallel), luck)
    result = model.parse(ids)
    assert result.calls, model.tokenizer.decode(ids, skip_special_tokens=False)
    assert result.content == ""
    assert parallel or len(result.calls) == 1
    for call in result.calls:
        arguments = json.loads(call.arguments, parse_float=lambda text: 0.5)  # 1e999 is a number too
        jsonschema_rs.validate(SCHEMAS[call.name], arguments)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("forced", [True, False])
def test_what_templates_write_is_allowed(family: str, forced: bool) -> None:
    model = MODELS[family]
    opener, closer = THINKING.get(family, ("", ""))
    call = MISTRAL_NEW if family == "mistral" else CALLS[family]
    said = f"{opener}hm{closer}" if opener else ""
    matcher = model.grammar({"get_weather": WEATHER, "f": {}}, forced=forced, strict=frozenset())
    ids = model.tokenizer.encode_trusted(said + call, False)
    assert matcher.validate_tokens(ids) == len(ids)
    assert matcher.consume_tokens(ids)
    assert matcher.is_accepting()
    assert model.parse(ids).calls[0].name == "get_weather"


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_demand_any_text_will_do_but_no_other_call(family: str) -> None:
    model = MODELS[family]
    ids = model.tokenizer.encode_trusted("Any text, even {\"name\": 1} <tool_call", False)
    ids = [i for i in ids if i not in model.form.ids.values()]
    assert model.grammar(forced=False).validate_tokens([*ids, model.eos]) == len(ids) + 1
    assert model.grammar(forced=True).validate_tokens(ids) == 0
    assert model.grammar(forced=True).validate_tokens([model.eos]) == 0
    begun = parts_of(CALLS[family], family)
    text = "".join(part if isinstance(part, str) else part.literal for part in begun).replace("get_weather", "rm")
    ids = model.tokenizer.encode_trusted(text, False)
    assert model.grammar(forced=False).validate_tokens(ids) < len(ids)


@pytest.mark.parametrize("forced", [True, False])
def test_marks_that_are_text_are_enforced_too(forced: bool) -> None:
    """The demonstration model has no token for <tool_call>."""
    model = Model("qwen3", tokens=False)
    for seed in range(5):
        matcher = model.grammar(forced=forced)
        if not forced:
            assert matcher.consume_tokens(model.tokenizer.encode_trusted("Well.\n<tool_call>", False))
            before = model.tokenizer.encode_trusted("Well.\n<tool_call>", False)
        else:
            before = []
        ids = [*before, *model.write(matcher, random.Random(seed))]
        result = model.parse(ids)
        assert result.calls, model.tokenizer.decode(ids)
        for call in result.calls:
            jsonschema_rs.validate(SCHEMAS[call.name], json.loads(call.arguments))


@pytest.mark.parametrize("family", ["gemma4", "qwen3.6"])
def test_hostile_schemas_are_refused_in_a_moment(family: str) -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    wide = {"type": "object", "properties": {f"k{i}": {"enum": [f"{i}"]} for i in range(5000)}}
    exponential = {"$ref": "#/$defs/a0", "$defs": {
        f"a{i}": {"type": "object", "properties": {key: {"$ref": f"#/$defs/a{i + 1}"} for key in "abcd"}}
        for i in range(40)}}
    model = MODELS[family]
    for schema in (deep, wide, exponential, {"$ref": "#"}, {"properties": {"a": {"$ref": "#/nowhere"}}}):
        assert model.form.tools is not None
        with contextlib.suppress(InvalidRequestError):  # what is not refused is finite
            calls_grammar(model.form.tools, None, model.form.ids, {"f": schema}, strict=frozenset(), forced=True,
                          parallel=True, thinking=False, may_think=False)


# -- in free answers: whatever the parser reads as a call is right, or the grammar refuses it


def qwen(city: str = "x", *, days: str = "1", item: str = '{"name": "x"}', opened: bool = True) -> str:
    call = (f"<function=get_weather>\n<parameter=city>\n{city}\n</parameter>\n<parameter=days>\n{days}\n</parameter>\n"
            f"<parameter=list>\n[{item}]\n</parameter>\n</function>")
    return f"<tool_call>\n{call}\n</tool_call>" if opened else call


RIGHT, WRONG = qwen(opened=False), "<function=get_weather>\n<parameter=city>\n7\n</parameter>\n</function>"
NAMED = '{"name": "get_weather", "arguments": {"city": 7}}'
LENIENT = {
    "qwen3.6": [WRONG, f"<tool_call>{WRONG}", qwen("a</parameter><parameter=days>99"), qwen("a</parameter></function>"),
                qwen("a\n<parameter=days>\n99"), qwen("<parameter=days>\n9"), qwen("</parameter>\n"),
                qwen("</tool_call>")],
    "qwen3": [f"<tool_call>{NAMED}", f"<tool_call>[{NAMED}]", '<tool_call>{"name": "now", "parameters": {"a": 1}}'],
    "llama3": [NAMED, NAMED.replace("arguments", "parameters"), f"<|python_tag|>{NAMED}",
               '{"parameters": {}, "name": "get_weather"}'],
    "mistral": [f"[TOOL_CALLS][{NAMED}]", f"[TOOL_CALLS]{NAMED}", "[TOOL_CALLS]get_weather[ARGS]{}",
                "[TOOL_CALLS]get_weather{}", "[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{}"],
    "gemma4": ["<|tool_call>call:get_weather{city:7}<tool_call|>", "<|tool_call>:get_weather{}",
               "<|tool_call>call:get_weather(city:7)<tool_call|>"],
}  # fmt: skip


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_form_of_a_call_escapes_its_schema(family: str, tokens: bool) -> None:
    if family == "gemma4" and not tokens:
        pytest.skip("its strings have no end if quotes are text")
    model = (MODELS if tokens else SPELLED)[family]
    opener, closer = THINKING.get(family, ("<think>", "</think>"))
    begun = [matcher(thinking=thinking) for thinking in (False, True) for matcher in (
        lambda **options: (model.grammar(forced=False, **options), options, False),
        lambda **options: (model.beside(forms.regex("(.|\n)*", "regex"), **options), options, True),
        lambda **options: (model.beside({"json_schema": {"type": "string"}}, **options), options, True))]
    read_as_calls = 0
    for call in LENIENT[family]:
        for before in ("", "\n", "\t ", "\u3000\x1c", "Hi ", f"{opener}hm{closer}", f"{opener}hm",
                       f"Hi{opener}hm{closer}", f"{opener}hm {call}{closer}", "</tool_call>", closer, f"so{closer}",
                       f"so {call}{closer}"):
            for text in (before + call, before + json.dumps(call)):
                ids = model.tokenizer.encode_trusted(text, False)
                for matcher, options, formatted in begun:
                    wrong = [called for called in model.parse(ids, **options, formatted=formatted).calls
                             if not jsonschema_rs.is_valid(SCHEMAS[called.name], json.loads(called.arguments))]
                    read_as_calls += bool(wrong)
                    assert not (wrong and model.allows(matcher, text)), (text, wrong)
    assert read_as_calls


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("text, calls, content", [
    (RIGHT, 1, ""), (f"\n {RIGHT}\n</tool_call>", 1, ""), (f"{RIGHT}</tool_call>\n{RIGHT}\nbye", 2, "bye"),
    (f"{RIGHT}\n{qwen()}\n{RIGHT}", 3, ""), (f"Hi\n{qwen()}\nand\n{qwen()}", 2, "Hiand"),
    (f"<think>\nhm\n</think>\n\n{RIGHT}", 1, ""), (f"<think>\nhm\n</think>\n\nSo: {qwen()}", 1, "So:"),
    ("<function=now>\n</function>", 1, ""), (qwen("<function="), 1, ""), (qwen("</function>"), 1, ""),
    (qwen("x", days="14"), 1, ""),
    ("Write <function=get_weather> first", 0, "Write <function=get_weather> first"), (f"Hi {WRONG}", 0, f"Hi {WRONG}"),
    ("<function", 0, "<function"), ("\n\n<b>", 0, "\n\n<b>"), ("a < b", 0, "a < b"),
    (WRONG, None, ""), (f"{qwen()}\n{WRONG}", None, ""), ("<function=rm>\n</function>", None, ""),
    (f"<think>\nhm\n</think>\n\n{WRONG}", None, ""), (qwen("thirteen char"), None, ""),
])  # fmt: skip
def test_qwen_forgets_the_opener_of_a_strict_call(text: str, calls: int | None, content: str, tokens: bool) -> None:
    """`calls` None: the grammar refuses it."""
    model = (MODELS if tokens else SPELLED)["qwen3.6"]
    for parallel in (True, False):
        matcher = model.grammar(forced=False, parallel=parallel)
        assert model.allows(matcher, text) == (calls is not None)
    if calls is not None:
        result = model.parse(model.tokenizer.encode_trusted(text, False))
        assert (len(result.calls), result.content) == (calls, content)
        for call in result.calls:
            jsonschema_rs.validate(SCHEMAS[call.name], json.loads(call.arguments))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_format_or_a_call(family: str) -> None:
    model, form = MODELS[family], forms.json_schema({"type": "object"}, "json", strict=True)
    spelled = [(SPELLED[family], "".join(marks_of(family)))] if family in SPELLED else []
    for answers, marks in [(model, ""), *spelled]:
        text = f'{{"name": "get_weather", "parameters": {{"a": "{marks} <function= "}}}}'
        assert answers.allows(answers.beside(form), text)
        result = answers.parse(answers.tokenizer.encode_trusted(text, False), formatted=True)
        assert (result.content, result.reasoning, result.calls) == (text, "", [])
    for seed in range(4):
        begin = [model.form.ids[model.form.tools.openers[0]]]  # type: ignore[union-attr]
        matcher = model.beside(form)
        assert matcher.consume_tokens(begin)
        result = model.parse(begin + model.write(matcher, random.Random(seed)), formatted=True)
        assert result.calls
        for call in result.calls:
            jsonschema_rs.validate(SCHEMAS[call.name], json.loads(call.arguments, parse_float=lambda text: 0.5))


def test_a_tag_in_a_string_of_json_is_part_of_it() -> None:
    lists = {"f": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}},
                   "required": ["a"], "additionalProperties": False}}
    for model in (MODELS["qwen3.6"], SPELLED["qwen3.6"]):
        for item in ('</parameter></function>', '</parameter><parameter=a>', 'a \\" </parameter><parameter=a>'):
            text = f'<function=f>\n<parameter=a>\n["{item}"]\n</parameter>\n</function>'
            assert model.allows(model.grammar(lists, forced=False), text)
            call = model.parse(model.tokenizer.encode_trusted(text, False), lists).calls[0]
            assert json.loads(call.arguments) == {"a": [json.loads(f'"{item}"')]}
    text = '<function=f>\n<parameter=a>\n["</tool_call>"]\n</parameter>\n</function>'
    call = model.parse(model.tokenizer.encode_trusted(text, False), lists).calls[0]
    assert json.loads(call.arguments) == {"a": ["</tool_call>"]}, "the mark is text, because it is no token"
