"""A history with calls goes through the model's own template; what the model would have said comes back the same."""

import json
from typing import Any

import pytest
from answers import WEATHER, calls_of
from hypothesis import given, settings
from hypothesis import strategies as st
from marked_tokenizer import TEMPLATES, marked_tokenizer
from test_chunking import CHARACTERS, VALUES

from engine.core.params import SamplingParams
from engine.text.conversation import encode_chat
from engine.text.detok import Detokenizer
from engine.text.parsers.events import Parsed, ParserLimits, parsed
from engine.text.parsers.registry import OutputFormat, output_format
from engine.text.tokenizer import TextTokenizer

TOKENIZERS = {family: marked_tokenizer(family) for family in TEMPLATES}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": WEATHER}}]
USER = {"role": "user", "content": "Weather?"}


def answer_ids(
    tokenizer: TextTokenizer, message: dict[str, Any], kwargs: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """(prompt, what the model says after it), with thinking as `kwargs` say."""
    prompt = encode_chat(tokenizer, [USER], tools=TOOLS, kwargs=kwargs)
    whole = encode_chat(tokenizer, [USER, message], tools=TOOLS, add_generation_prompt=False, kwargs=kwargs)
    assert whole[: len(prompt)] == prompt
    return prompt, whole[len(prompt) :]


def parse(tokenizer: TextTokenizer, form: OutputFormat, prompt: list[int], ids: list[int]) -> Parsed:
    detokenizer = Detokenizer(tokenizer, SamplingParams(), form.watched(calls=True))
    parser = form.parser(calls=True, schemas={"get_weather": WEATHER}, limits=ParserLimits(),
                         thinking=form.thinks_after(prompt, tokenizer))
    delta = detokenizer.push(ids, finished=True)
    events = [event for parts in delta.parts for event in parser.push(parts)]
    return parsed([*events, *parser.finish()])


def assistant(calls: list[dict], content: str = "", reasoning: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(call)}}
        for call in calls]}


@pytest.mark.parametrize("family, tools, reasoning", [
    ("gemma4", "Gemma4", "<|channel>"), ("gemma4-31b", "Gemma4", "<|channel>"), ("qwen3.6", "Qwen3Coder", "<think>"),
])  # fmt: skip
def test_the_template_says_which_parsers_a_model_needs(family: str, tools: str, reasoning: str) -> None:
    form = output_format(TOKENIZERS[family])
    assert (type(form.tools).__name__, form.reasoning and form.reasoning.opener) == (tools, reasoning)
    assert output_format(TOKENIZERS[family], "none", "none").watched(calls=True) == {}


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("thinking", [True, False])
def test_the_prompt_says_whether_it_ends_inside_the_reasoning(family: str, thinking: bool) -> None:
    tokenizer = TOKENIZERS[family]
    form = output_format(tokenizer)
    prompt = encode_chat(tokenizer, [USER], tools=TOOLS, kwargs={"enable_thinking": thinking})
    assert form.thinks_after(prompt, tokenizer) == (thinking and family == "qwen3.6")
    history = [USER, assistant([{"city": "x"}], reasoning="r"),
               {"role": "tool", "tool_call_id": "c", "content": "18C <think> <|channel>"}]
    prompt = encode_chat(tokenizer, history, tools=TOOLS, kwargs={"enable_thinking": thinking})
    assert form.thinks_after(prompt, tokenizer) == thinking


@pytest.mark.parametrize("family", TEMPLATES)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_what_the_template_writes_is_what_the_parser_reads(family: str, data: Any) -> None:
    text = st.text("aé한 \n<{\"'", min_size=0, max_size=10).map(str.strip)
    typed = {
        "city": st.text(CHARACTERS, max_size=10)
        | st.sampled_from(["</parameter>x", "<|\"|>", "</tool_call>", "a, {b}: [c]", "\nx\n"]),
        "days": st.integers(), "share": st.floats(allow_nan=False, allow_infinity=False), "fine": st.booleans(),
        "opts": st.dictionaries(st.text("abc", min_size=1, max_size=3), VALUES, max_size=3),
        "list": st.lists(st.text(CHARACTERS, max_size=4), max_size=3),
    }  # fmt: skip
    calls = data.draw(st.lists(st.fixed_dictionaries({}, optional=typed), min_size=1, max_size=3))
    content, reasoning = data.draw(text) if family == "qwen3.6" else "", data.draw(text)
    tokenizer = TOKENIZERS[family]
    prompt, ids = answer_ids(tokenizer, assistant(calls, content, reasoning), {"enable_thinking": True})
    result = parse(tokenizer, output_format(tokenizer), prompt, ids)
    assert [arguments for _, arguments in calls_of(result)] == calls
    assert (result.content, result.reasoning) == (content, reasoning)
