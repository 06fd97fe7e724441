"""`/v1/responses`: the same answers as a chat, in the other API's items and events, as the real client reads them."""

import json
from typing import Any

import httpx
import httpx2
import openai
import pytest
from gateways import RunningServer
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import Response
from questions import ANSWER, QUESTION
from test_tool_calls import ARGUMENTS, CALL, Service

from engine.errors import InvalidRequestError
from engine.server.openai.request.responses_schema import ResponsesRequest
from engine.server.openai.responses.as_chat import as_chat

TOOL: Any = {"type": "function", "name": "get_weather", "description": "d", "strict": None, "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
SAID = f"I need it.\n</think>\n\nLet me see.\n\n{CALL}"


def client_of(service: Service) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url="http://t/v1", api_key="x", max_retries=0, _strict_response_validation=True,
        http_client=openai.DefaultAsyncHttpxClient(transport=httpx2.ASGITransport(service.app)))


def items_of(response: Response) -> list[Any]:
    items = []
    for item in response.output:
        if item.type == "message":
            items.append("".join(part.text for part in item.content if part.type == "output_text"))
        elif item.type == "reasoning":
            items.append([part.text for part in item.content or ()])
        elif item.type == "function_call":
            items.append((item.name, json.loads(item.arguments)))
    return items


EXPECTED = [["I need it."], "Let me see.", ("get_weather", ARGUMENTS)]


async def test_a_whole_response() -> None:
    response = await client_of(Service(SAID)).responses.create(
        model="m", input="Weather?", tools=[TOOL], instructions="Be brief.", metadata={"k": "v"}, max_output_tokens=900)
    assert items_of(response) == EXPECTED
    assert (response.status, response.instructions, response.metadata) == ("completed", "Be brief.", {"k": "v"})
    assert all(item.status == "completed" for item in response.output)  # type: ignore[union-attr]
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 12
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.output[-1].call_id.startswith("call_")  # type: ignore[union-attr]


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_a_stream_tells_of_every_item_from_its_beginning_to_its_end(step: int) -> None:
    stream = await client_of(Service(SAID, step=step)).responses.create(
        model="m", input="Weather?", tools=[TOOL], stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if not event.type.endswith(".delta")]
    text = ["response.content_part.added", "response.output_text.done", "response.content_part.done"]
    reasoning = [kind.replace("output_text", "reasoning_text") for kind in text]
    item = ("response.output_item.added", "response.output_item.done")
    assert kinds == [
        "response.created", "response.in_progress", item[0], *reasoning, item[1], item[0], *text, item[1], item[0],
        "response.function_call_arguments.done", item[1], "response.completed"]
    last = events[-1]
    assert last.type == "response.completed"
    assert items_of(last.response) == EXPECTED
    said = {}
    for event in events:
        if event.type.endswith(".delta"):
            said[event.output_index] = said.get(event.output_index, "") + event.delta  # type: ignore[union-attr]
    assert list(said.values()) == ["I need it.", "Let me see.", json.dumps(ARGUMENTS)]


async def test_a_response_that_is_cut_is_incomplete() -> None:
    service = Service("no end in sight", cut=True)
    response = await client_of(service).responses.create(model="m", input="x", reasoning={"effort": "none"})
    assert (response.status, response.incomplete_details and response.incomplete_details.reason) == (
        "incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
    events = [event async for event in await client_of(service).responses.create(model="m", input="x", stream=True)]
    assert events[-1].type == "response.incomplete"


async def test_the_items_of_a_history_reach_the_template_as_turns() -> None:
    service = Service("x")
    first = await client_of(Service(SAID)).responses.create(model="m", input="Weather?", tools=[TOOL])
    call = first.output[-1]
    history: Any = [{"role": "user", "content": "Weather?"},
                    *(item.model_dump(exclude_none=True) for item in first.output),
                    {"type": "function_call_output", "call_id": call.call_id, "output": "18C"}]  # type: ignore[union-attr]
    await client_of(service).responses.create(model="m", input=history, tools=[TOOL], instructions="Be brief.")
    prompt = service.tokenizer.decode(service.client.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert "</IMPORTANT>\n\nBe brief.<|im_end|>" in prompt
    assert f"<think>\nI need it.\n</think>\n\nLet me see.\n\n{CALL}<|im_end|>" in prompt
    assert "<tool_response>\n18C\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n" in prompt


@pytest.mark.parametrize("fields, param", [
    ({"input": []}, "input"), ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
    ({"input": [{"role": "alien", "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": "user"}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0.type"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"), ({"store": True}, "store"), ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"), ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"max_tokens": 5}, "max_tokens"), ({"n": 2}, "n"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"), ({"tool_choice": "required"}, "tool_choice"),
    ({"input": "x" * 200_000}, "input"), ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"top_logprobs": 2}, "top_logprobs"),
])  # fmt: skip
async def test_what_it_cannot_do_is_refused_by_name(fields: dict, param: str) -> None:
    service = Service("x")
    transport = httpx.ASGITransport(service.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t", timeout=30) as http:
        reply = await http.post("/v1/responses", json={"input": "hi", **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
CHOICE = {"type": "function", "name": "get_weather"}
NO_JSON = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}


@pytest.mark.parametrize("fields, param, words", [
    ({"instructions": "i", "input": [{"role": "user", "content": "a"}, IMAGE]}, "input.1.content.0.type",
     "input.1.content.0: "),
    ({"input": [{"type": "reasoning"}, {"role": "user", "content": "a"}, IMAGE]}, "input.2.content.0.type", "input.2."),
    ({"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, NO_JSON]}, "input.2.arguments",
     "input.2.arguments must be"),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input.0.output", "input.0.output must be"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1"),
    ({"max_output_tokens": 10**6}, "max_output_tokens", "(max_output_tokens)"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", ".schema is required"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name", '{"type": "function", "name": …}'),
    ({"tools": [TOOL, TOOL]}, "tools.1.name", "same name"),
    ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", '{"type": "function", "name": …}'),
    *(({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", **given}}, f"tool_choice.{where}", words)
      for given, where, words in (
          ({"mode": "none", "tools": [CHOICE]}, "mode", 'tool_choice.mode must be "auto" or "required"'),
          ({"mode": "auto", "tools": []}, "tools", "tool_choice.tools must list at least one"),
          ({"mode": "auto"}, "tools", "tool_choice.tools must list at least one"),
          ({"mode": "auto", "tools": [CHOICE, {"type": "mcp"}]}, "tools.1", '{"type": "function", "name": …}'),
          ({"mode": "auto", "tools": [{**CHOICE, "name": "rm"}]}, "tools.0", "tool_choice.tools.0 names a function"))),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [CHOICE]}}, "tool_choice", "are no tools"),
    ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens", "not a field"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning.context", 'must be "auto"'),
    ({"text": {"formats": {}, "format_": 1}}, "text.format_", "did you mean format?"),
    ({"store": True}, "store", "it stores no answers"), ({"truncation": "auto"}, "truncation", "shorten the input"),
    ({"messages": [{"role": "user"}]}, "messages", "did you mean input?"),
])  # fmt: skip
async def test_refusals_speak_of_the_request_as_it_was_sent(fields: dict, param: str, words: str) -> None:
    """Not of the chat that it was converted to."""
    service = Service("x")
    transport = httpx.ASGITransport(service.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t", timeout=30) as http:
        error = (await http.post("/v1/responses", json={"input": "hi", **fields})).json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert not any(name in error["message"] for name in ("messages.", "response_format", "max_completion", "function."))


def test_reasoning_that_holds_no_text_is_no_message() -> None:
    """It comes from a server that encrypts it."""
    chat = as_chat(ResponsesRequest(input=[{"role": "user", "content": "a"}, {"type": "reasoning", "summary": []},
                                           {"role": "user", "content": "b"}]))
    assert [(message.role, message.content) for message in chat.messages] == [("user", "a"), ("user", "b")]
    assert chat.places == ["input.0", "input.2"]


def test_leading_system_items_are_one_message() -> None:
    chat = as_chat(ResponsesRequest(input=[{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}],
                                    instructions="i"))
    assert [(message.role, message.content) for message in chat.messages] == [("system", "i\n\na"), ("user", "b")]
    with pytest.raises(InvalidRequestError):
        as_chat(ResponsesRequest(input=[{"type": "computer_call"}]))


def test_the_real_model_answers(smol_server: RunningServer) -> None:
    client = OpenAI(base_url=f"{smol_server.url}/v1", api_key="x", max_retries=0, _strict_response_validation=True)
    response = client.responses.create(model="smollm2", input=QUESTION, temperature=0, max_output_tokens=24)
    assert response.output_text == ANSWER
    with client.responses.stream(model="smollm2", input=QUESTION, temperature=0, max_output_tokens=24) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == ANSWER
