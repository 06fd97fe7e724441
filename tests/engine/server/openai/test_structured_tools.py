"""Demanded, named and strict calls, formats behind reasoning, and `/v1/responses`, through the real `openai` client and
a real engine whose weights are random: whatever is right here, the grammar made right."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
import openai
import pytest
from gateways import RunningServer, engine_process
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field
from schemas import NAME, SCHEMAS, read, record
from tokenizers import AddedToken, Tokenizer

from engine.server.http.limits import Limits
from engine.server.ipc.client import EngineClient
from engine.server.openai.serving import ServedModel

HI: Any = [{"role": "user", "content": "Weather?"}]
WEATHER = record(city=NAME, days={"type": "integer", "minimum": 1, "maximum": 14}, unit={"enum": ["c", "f"]})
CLOCK = record(zone={"enum": ["UTC", "Asia/Seoul"]})
PARAMETERS = {"get_weather": WEATHER, "get_time": CLOCK}


def tools(*, strict: bool = True) -> list[Any]:
    return [{"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
            for name, schema in PARAMETERS.items()]


@pytest.fixture(scope="module")
def thinking_dir(tiny_llama_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template opens the reasoning, and whose tokenizer knows <think> and <tool_call>."""
    directory = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(tiny_llama_dir("gqa", max_position_embeddings=4096, vocab_size=384), directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False)
                          for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
        "{{ tools }}<tool_call></tool_call><think>\n{% if enable_thinking is false %}\n</think>\n\n{% endif %}")
    return directory


def serve(directory: Path) -> Iterator[RunningServer]:
    with engine_process(directory, "--served-model-name", "tiny") as socket:
        server = RunningServer({"tiny": ServedModel.load("tiny", directory, EngineClient(socket))}, limits=Limits())
        server.wait_ready()
        yield server
        server.stop()


@pytest.fixture(scope="module")
def plain(tiny_llama_dir: Callable[..., Path]) -> Iterator[RunningServer]:
    """A model without reasoning, whose marks are text."""
    yield from serve(tiny_llama_dir("gqa", max_position_embeddings=4096))


@pytest.fixture(scope="module")
def thinking(thinking_dir: Path) -> Iterator[RunningServer]:
    yield from serve(thinking_dir)


def client_of(server: RunningServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, _strict_response_validation=True)


def ask(server: RunningServer, seed: int = 0, **fields: Any) -> Any:
    return client_of(server).chat.completions.create(
        **{"model": "tiny", "messages": HI, "seed": seed, "temperature": 1.0, "max_tokens": 2500, **fields})


def check_calls(message: Any) -> list[str]:
    for call in message.tool_calls:
        jsonschema_rs.validate(PARAMETERS[call.function.name], json.loads(call.function.arguments))
    return [call.function.name for call in message.tool_calls]


@pytest.mark.parametrize("seed", range(4))
def test_a_demanded_call_is_made_and_fits_its_schema(plain: RunningServer, seed: int) -> None:
    choice = ask(plain, seed, tools=tools(), tool_choice="required", parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert len(check_calls(choice.message)) == 1
    assert not choice.message.content
    several = ask(plain, seed, tools=tools(), tool_choice="required").choices[0]
    assert check_calls(several.message)


def test_a_named_function_is_the_one_that_is_called(plain: RunningServer) -> None:
    for seed in range(3):
        named: Any = {"type": "function", "function": {"name": "get_time"}}
        choice = ask(plain, seed, tools=tools(), tool_choice=named).choices[0]
        assert check_calls(choice.message) == ["get_time"]
        assert choice.finish_reason == "stop"


def allowed(mode: str, *names: str) -> Any:
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


def test_a_demanded_call_is_of_an_allowed_tool(plain: RunningServer) -> None:
    free, limited = set(), set()
    for seed in range(4):
        asked: Any = {"tools": tools(strict=False), "parallel_tool_calls": seed % 2 == 0}
        free.update(check_calls(ask(plain, seed, **asked, tool_choice="required").choices[0].message))
        choice = ask(plain, seed, **asked, tool_choice=allowed("required", "get_time")).choices[0]
        limited.update(check_calls(choice.message))
        assert choice.finish_reason == "tool_calls", "not as for a function by name, even if it is the only one"
    assert (free, limited) == ({"get_weather", "get_time"}, {"get_time"})
    both = ask(plain, tools=tools(), tool_choice=allowed("required", "get_time", "get_weather", "get_time"))
    assert check_calls(both.choices[0].message)


def test_a_free_answer_calls_allowed_tools_or_none(thinking: RunningServer) -> None:
    """The bias makes the model begin calls, or none; the prompt shows all tools either way, as without a choice."""
    tokens = thinking.gateway.models["tiny"].tokenizer
    opener, closer = str(tokens.token_id("<tool_call>")), str(tokens.token_id("</think>"))
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS["person"], "strict": True}}
    off: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    asked: Any = {"tools": tools(strict=False), "max_tokens": 400}
    for more in (off, {**off, "response_format": form}, {}):  # the last reasons first
        called: list[str] = []
        for seed in range(4):
            answer = ask(thinking, seed, **asked, **more, tool_choice=allowed("auto", "get_time"),
                         logit_bias={opener: 8, closer: 5})
            calls = answer.choices[0].message.tool_calls or []
            called += [call.function.name for call in calls]
            silent = ask(thinking, seed, **asked, **more, tool_choice=allowed("auto", "get_time"),
                         logit_bias={opener: -100, closer: 5}).choices[0]
            assert not silent.message.tool_calls
            assert silent.message.content
        assert set(called) == {"get_time"}
        free = ask(thinking, **asked | {"max_tokens": 1}, **more)
        assert free.usage.prompt_tokens == answer.usage.prompt_tokens


@pytest.mark.parametrize("choice, param, words", [
    (allowed("required", "get_time", "rm"), ".tools.1", "not among tools"), (allowed("auto"), ".tools", "at least one"),
    (allowed("none", "get_time"), ".mode", '"auto" or "required"'),
], ids=lambda value: str(value)[:60])  # fmt: skip
def test_allowed_tools_that_cannot_be_meant_are_refused(
    plain: RunningServer, choice: Any, param: str, words: str
) -> None:
    param = f"tool_choice.allowed_tools{param}"
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        ask(plain, tools=tools(), tool_choice=choice)
    assert refused.value.param == param
    assert param in str(refused.value)
    with pytest.raises(openai.BadRequestError, match="there are no tools") as refused:
        ask(plain, tool_choice=choice)
    assert refused.value.param == "tool_choice"


def test_a_streamed_call_is_the_same_call(plain: RunningServer) -> None:
    asked: Any = {"tools": tools(), "tool_choice": "required"}
    whole = ask(plain, 2, **asked).choices[0].message.tool_calls
    calls: dict[int, list[str]] = {}
    for chunk in ask(plain, 2, stream=True, **asked):
        for delta in chunk.choices[0].delta.tool_calls or ():
            calls.setdefault(delta.index, ["", ""])
            calls[delta.index][0] += delta.function.name or ""
            calls[delta.index][1] += delta.function.arguments or ""
    assert list(calls.values()) == [[call.function.name, call.function.arguments] for call in whole]


def test_a_strict_function_is_called_rightly_or_not_at_all(thinking: RunningServer) -> None:
    """The model likes to begin a call (by a bias), and nothing demands one."""
    opener = thinking.gateway.models["tiny"].tokenizer.token_id("<tool_call>")
    called = 0
    for seed in range(4):
        choice = ask(thinking, seed, tools=tools(), max_tokens=150, logit_bias={str(opener): 6},
                     extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0]
        if choice.finish_reason == "tool_calls":
            called += len(check_calls(choice.message))
        elif choice.message.tool_calls:  # the last may be cut short
            choice.message.tool_calls.pop()
            called += len(check_calls(choice.message))
    assert called


class Step(BaseModel):
    model_config = ConfigDict(extra="forbid")
    text: str = Field(max_length=10)
    sure: bool


class Solution(BaseModel):
    model_config = ConfigDict(extra="forbid")
    steps: list[Step] = Field(max_length=2)
    kind: Literal["sum", "product"]
    answer: int


def test_parse_returns_an_instance_of_the_class(plain: RunningServer) -> None:
    for seed in range(3):
        message = client_of(plain).chat.completions.parse(
            model="tiny", messages=HI, response_format=Solution, seed=seed, temperature=1.0, max_tokens=1500,
        ).choices[0].message
        assert isinstance(message.parsed, Solution)


def test_responses_with_a_text_format(plain: RunningServer) -> None:
    client = client_of(plain)
    made = client.responses.parse(model="tiny", input="Hi", text_format=Solution, temperature=1.0)
    assert isinstance(made.output_parsed, Solution)
    form: Any = {"type": "json_schema", "name": "x", "schema": SCHEMAS["invoice"], "strict": True}
    text: Any = {"format": form}
    answer = client.responses.create(model="tiny", input="Hi", text=text)
    jsonschema_rs.validate(SCHEMAS["invoice"], read(answer.output_text))
    with pytest.raises(openai.BadRequestError) as refused:
        text["format"] = {**form, "schema": {"type": "nonsense"}}
        client.responses.create(model="tiny", input="Hi", text=text)
    assert refused.value.param == "text.format.schema"


def test_responses_with_a_demanded_call(plain: RunningServer) -> None:
    asked: Any = [{"type": "function", "name": name, "parameters": schema, "strict": True}
                  for name, schema in PARAMETERS.items()]
    made = client_of(plain).responses.create(model="tiny", input="Hi", tools=asked, tool_choice="required")
    calls = [item for item in made.output if item.type == "function_call"]
    assert calls
    for call in calls:
        jsonschema_rs.validate(PARAMETERS[call.name], json.loads(call.arguments))


def test_responses_with_allowed_tools(plain: RunningServer) -> None:
    asked: Any = {"model": "tiny", "input": "Hi", "tools": [
        {"type": "function", "name": name, "parameters": schema, "strict": False}
        for name, schema in PARAMETERS.items()]}
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    for _ in range(4):
        made = client_of(plain).responses.create(**asked, tool_choice=choice, temperature=1.0)
        assert {item.name for item in made.output if item.type == "function_call"} == {"get_time"}
        assert made.tool_choice.model_dump() == choice  # type: ignore[union-attr]
    choice["mode"] = "auto"
    free = client_of(plain).responses.create(**asked, tool_choice=choice, max_output_tokens=50)
    assert {item.type for item in free.output} <= {"message", "function_call"}


def test_the_format_begins_behind_the_reasoning(thinking: RunningServer) -> None:
    closer = thinking.gateway.models["tiny"].tokenizer.token_id("</think>")
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS["person"], "strict": True}}
    for seed in range(3):
        message = ask(thinking, seed, response_format=form, logit_bias={str(closer): 5}).choices[0].message
        assert message.model_extra["reasoning"], "it thinks, and not in JSON"
        jsonschema_rs.validate(SCHEMAS["person"], json.loads(message.content))
        off = ask(thinking, seed, response_format=form,
                  extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0].message
        assert "reasoning" not in (off.model_extra or {})
        jsonschema_rs.validate(SCHEMAS["person"], json.loads(off.content))


def test_a_spent_thinking_budget_leaves_the_answer_its_format(thinking: RunningServer) -> None:
    closer = thinking.gateway.models["tiny"].tokenizer.token_id("</think>")
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS["person"], "strict": True}}
    for budget in (0, 7):
        answer = ask(thinking, 1, response_format=form, logit_bias={str(closer): -100},
                     extra_body={"thinking_token_budget": budget})
        message = answer.choices[0].message
        assert answer.usage.completion_tokens_details.reasoning_tokens <= budget + 4
        jsonschema_rs.validate(SCHEMAS["person"], json.loads(message.content))
    demanded = ask(thinking, 1, tools=tools(), tool_choice="required", extra_body={"thinking_token_budget": 5})
    assert check_calls(demanded.choices[0].message)


def test_a_format_beside_free_tools_is_an_answer_or_a_call(thinking: RunningServer) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS["person"], "strict": True}}
    opener = thinking.gateway.models["tiny"].tokenizer.token_id("<tool_call>")
    seen = set()
    for seed in range(4):
        for bias in (-100, 100):
            message = ask(thinking, seed, tools=tools(), response_format=form, logit_bias={str(opener): bias},
                          parallel_tool_calls=False,
                          extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0].message
            if message.tool_calls:
                seen.add("call")
                check_calls(message)
            else:
                seen.add("answer")
                jsonschema_rs.validate(SCHEMAS["person"], json.loads(message.content))
    assert seen == {"answer", "call"}


def test_a_schema_of_a_function_that_cannot_be_enforced_is_refused_only_when_strict(plain: RunningServer) -> None:
    odd: Any = {"type": "object", "properties": {"a": {"type": "string", "format": "phone", "maxLength": 4}},
                "required": ["a"], "additionalProperties": False}
    function = {"name": "f", "parameters": odd}
    asked: Any = {"tool_choice": "required", "max_tokens": 300, "parallel_tool_calls": False}
    call = ask(plain, tools=[{"type": "function", "function": function}], **asked).choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments).keys() == {"a"}
    with pytest.raises(openai.BadRequestError, match="phone"):
        ask(plain, tools=[{"type": "function", "function": {**function, "strict": True}}], **asked)
