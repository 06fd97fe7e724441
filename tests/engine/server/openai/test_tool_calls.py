"""Tools and reasoning at the endpoint: what a client gets of an answer in the model's own syntax, streamed and whole.

The engine is a script that says a given text (a real model's answers are in test_openai_client.py); tokenizer, chat
template, parsers and everything above them are real.
"""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from gateways import RunningServer
from marked_tokenizer import marked_tokenizer
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from test_openai_stream import ScriptedClient

from engine.core.request import EngineRequest, FinishReason, StepOutput
from engine.server.gateway.app import create_app
from engine.server.http.limits import Limits
from engine.server.openai.serving import ServedModel

TOKENIZERS = {family: marked_tokenizer(family) for family in ("qwen3.6", "gemma4")}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER], "max_tokens": 2000}
CALL = ("<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>")
ANSWER = f"I need it.\n</think>\n\nLet me see.\n\n{CALL}"
ARGUMENTS = {"city": "Paris", "days": 2}


class Service:
    """An endpoint whose model says `text`."""

    def __init__(self, text: str, family: str = "qwen3.6", *, step: int = 3, cut: bool = False,
                 **settings: Any) -> None:
        self.tokenizer = TOKENIZERS[family]
        self._ids, self._step, self._cut = self.tokenizer.encode_trusted(text, False), step, cut
        self.client = ScriptedClient(self._say)
        assert self.client.info is not None
        self.client.info.max_model_len = 100_000
        self.app = create_app({"m": ServedModel("m", self.client, self.tokenizer, **settings)},
                               limits=Limits(max_call_depth=8))

    async def _say(self, request: EngineRequest) -> AsyncIterator[StepOutput]:
        for i in range(0, len(self._ids), self._step):
            yield StepOutput(request.request_id, self._ids[i : i + self._step])
        if self._cut:
            yield StepOutput(request.request_id, finish_reason=FinishReason.LENGTH)
        else:
            yield StepOutput(request.request_id, [*self.tokenizer.eos_token_ids], finish_reason=FinishReason.STOP)

    async def post(self, body: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t", timeout=30) as http:
            return await http.post("/v1/chat/completions", json=body)

    async def whole(self, **fields: Any) -> ChatCompletion:
        reply = await self.post({**ASKED, **fields})
        assert reply.status_code == 200, reply.text
        return ChatCompletion.model_validate_json(reply.content, strict=True)

    async def stream(self, **fields: Any) -> list[ChatCompletionChunk]:
        reply = await self.post({**ASKED, "stream": True, **fields})
        assert reply.status_code == 200, reply.text
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [ChatCompletionChunk.model_validate_json(line, strict=True) for line in lines[:-1]]

    async def refusal(self, **fields: Any) -> tuple[int, str]:
        reply = await self.post({**ASKED, **fields})
        return reply.status_code, reply.json()["error"]["param"]


def reasoning_tokens(reply: ChatCompletion | ChatCompletionChunk) -> int | None:
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    return reply.usage.completion_tokens_details.reasoning_tokens


def extra(value: Any, name: str) -> Any:
    return (value.model_extra or {}).get(name)


async def test_a_whole_answer() -> None:
    reply = await Service(ANSWER).whole()
    choice, message = reply.choices[0], reply.choices[0].message
    assert (message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert extra(message, "reasoning") == extra(message, "reasoning_content") == "I need it."
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
    assert call.id.startswith("call_")
    assert reasoning_tokens(reply) == len("I need it.\n") + 1, "its end counts"


async def test_a_stream_says_the_same_in_pieces_of_one_kind() -> None:
    chunks = await Service(ANSWER, step=1).stream(stream_options={"include_usage": True})
    text, reasoning, arguments, names, ids = "", "", [], [], []
    for chunk in chunks[1:-2]:
        delta = chunk.choices[0].delta
        kinds = [delta.content is not None, extra(delta, "reasoning") is not None, delta.tool_calls is not None]
        assert sum(kinds) == 1, chunk
        assert extra(delta, "reasoning") == extra(delta, "reasoning_content")
        text += delta.content or ""
        reasoning += extra(delta, "reasoning") or ""
        for call in delta.tool_calls or ():
            assert call.function is not None
            if call.id:
                ids.append(call.id)
                names.append(call.function.name)
                assert (call.type, call.function.arguments) == ("function", "")
            else:
                arguments.append(call.function.arguments)
            assert call.index == 0
    assert (text, reasoning, names, len(ids)) == ("Let me see.", "I need it.", ["get_weather"], 1)
    assert json.loads("".join(arguments)) == ARGUMENTS
    assert len(arguments) > 5, "arguments come as they are written"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-2].choices[0].delta.tool_calls is None
    assert reasoning_tokens(chunks[-1]) == 12


async def test_gemma_with_its_special_tokens_hidden_from_text() -> None:
    text = ('<|channel>thought\nhm\n<channel|>Yes.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'
            "<|tool_call>call:get_weather{}<tool_call|>")
    for skip in (True, False):
        choice = (await Service(text, "gemma4").whole(skip_special_tokens=skip)).choices[0]
        calls = [json.loads(call.function.arguments) for call in choice.message.tool_calls or ()]  # type: ignore[union-attr]
        assert (choice.message.content, calls) == ("Yes.", [ARGUMENTS, {}])
        assert extra(choice.message, "reasoning") == "hm"
    choice = (await Service(text, "gemma4").whole(parallel_tool_calls=False)).choices[0]
    assert len(choice.message.tool_calls or ()) == 1


async def test_without_tools_reasoning_alone_is_taken_apart() -> None:
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        message = (await Service(ANSWER).whole(**fields)).choices[0]
        assert message.finish_reason == "stop"
        assert message.message.content == f"Let me see.\n\n{CALL}"
        assert extra(message.message, "reasoning") == "I need it."
    message = (await Service(ANSWER).whole(include_reasoning=False)).choices[0].message
    assert (extra(message, "reasoning"), message.content) == (None, "Let me see.")
    plain = (await Service("Hi.").whole(chat_template_kwargs={"enable_thinking": False})).choices[0].message
    assert (plain.content, extra(plain, "reasoning")) == ("Hi.", None)


async def test_the_parsers_can_be_switched_off() -> None:
    choice = (await Service(ANSWER, reasoning_parser="none").whole(tools=None)).choices[0]
    assert choice.message.content == ANSWER
    assert await Service(ANSWER, tool_call_parser="none").refusal() == (400, "tools")
    assert await Service(ANSWER, auto_tools=False).refusal() == (400, "tool_choice")
    limited = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    assert await Service(ANSWER, auto_tools=False).refusal(
        tool_choice={"type": "allowed_tools", "allowed_tools": limited}) == (400, "tool_choice")
    named = Service('</think><tool_call>{"name": "get_weather", "arguments": {}}</tool_call>',
                    tool_call_parser="hermes")
    assert (await named.whole()).choices[0].message.tool_calls


async def test_hostile_tools_are_refused_in_a_moment() -> None:
    """Far beyond the bound, or within it and a bomb for the template."""
    deep: Any = {"type": "string"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    wide = {"type": "object", "properties": {f"k{i}": {"type": "string", "description": "x" * 20} for i in range(5000)}}
    for family in TOKENIZERS:
        for parameters in (deep, wide, {"type": "object", "properties": {"a": {"enum": ["x" * 2**20]}}}):
            tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}
            began = time.monotonic()
            reply = await Service("x", family).post({**ASKED, "tools": [tool]})
            assert time.monotonic() - began < 15
            assert reply.status_code == 400, reply.text[:300]
            assert reply.json()["error"]["param"] in ("tools", "messages")


async def test_a_cut_or_malformed_call() -> None:
    cut = (await Service(ANSWER[:-60], cut=True).whole()).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
    assert cut.message.content == f"Let me see.{CALL[:-60]}"
    chunks = await Service(ANSWER[:-60], cut=True).stream()
    assert chunks[-1].choices[0].finish_reason == "length"
    bad = "</think>\n\n<tool_call>\nget_weather(Paris)\n</tool_call>"
    choice = (await Service(bad).whole()).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", bad[10:])
    deep = CALL.replace("2", "[" * 90_000)
    reply = (await Service(deep, step=5000).whole()).choices[0]
    assert reply.message.tool_calls, "a string: it is no number"


async def test_stop_strings_and_log_probabilities_beside_calls() -> None:
    choice = (await Service(ANSWER).whole(stop=["see."])).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", "Let me ")
    chunks = await Service(ANSWER, step=1).stream(return_token_ids=True)
    ids = [i for chunk in chunks[:-1] if chunk.choices for i in extra(chunk.choices[0], "token_ids") or ()]
    assert ids == TOKENIZERS["qwen3.6"].encode_trusted(ANSWER, False) + TOKENIZERS["qwen3.6"].eos_token_ids


async def test_several_choices_are_parsed_apart() -> None:
    chunks = await Service(ANSWER, step=2).stream(n=3)
    said: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                said[choice.index] = said.get(choice.index, "") + (call.function.arguments or "")
    assert [json.loads(said[i]) for i in range(3)] == [ARGUMENTS] * 3


@pytest.mark.parametrize("effort, family, thinking", [
    ("none", "qwen3.6", False), ("low", "qwen3.6", True), ("high", "gemma4", True), ("none", "gemma4", False),
])  # fmt: skip
async def test_reasoning_effort_switches_thinking(effort: str, family: str, thinking: bool) -> None:
    service = Service("x", family)
    await service.whole(reasoning_effort=effort)
    prompt = service.tokenizer.decode(service.client.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert ("<|think|>" in prompt if family == "gemma4" else prompt.endswith("<think>\n")) == thinking


async def test_history_in_both_spellings_reaches_the_template() -> None:
    history: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"},
               {"role": "assistant", "content": None, "reasoning": "need tool", "tool_calls": [
                   {"id": "c1", "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]},
               {"role": "tool", "tool_call_id": "c1", "content": "18C"}]
    prompts = []
    for name in ("reasoning", "reasoning_content"):
        history[1] = {key if key != "reasoning" else name: value for key, value in history[1].items()}
        service = Service("x")
        await service.whole(messages=history)
        prompts.append(service.tokenizer.decode(service.client.requests[0].prompt_token_ids, skip_special_tokens=False))
        history[1]["reasoning"] = history[1].pop(name)
    assert prompts[0] == prompts[1]
    assert "<think>\nneed tool\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nPar" in prompts[0]
    assert "<tool_response>\n18C\n</tool_response>" in prompts[0]


# -- thinking budgets


THOUGHT = "one two three four"


@pytest.mark.parametrize("budget", [0, 1, 7, len(THOUGHT) - 1])
@pytest.mark.parametrize("step", [1, 4, 100])
async def test_a_budget_ends_the_reasoning(budget: int, step: int) -> None:
    service = Service(f"{THOUGHT}\n</think>\n\nDone.", step=step)
    reply = await service.whole(thinking_token_budget=budget, max_tokens=100)
    first = service.client.requests[0].prompt_token_ids if budget else None
    message = reply.choices[0].message
    assert (extra(message, "reasoning") or "") == THOUGHT[:budget].strip()
    rest = service.client.requests[-1]  # the script says its text again, as content this time
    assert service.tokenizer.decode(rest.prompt_token_ids).endswith(f"<think>\n{THOUGHT[:budget]}\n</think>\n\n")
    assert first is None or rest.prompt_token_ids[: len(first)] == first
    assert rest.params.max_tokens == 100 - budget - 4
    assert service.client.aborted == ([service.client.requests[0].request_id] if budget else [])
    assert message.content is not None
    assert message.content.startswith(THOUGHT)


async def test_a_budget_that_is_not_spent_or_not_allowed_changes_nothing() -> None:
    for budget in (-1, 100):
        message = (await Service(ANSWER).whole(thinking_token_budget=budget)).choices[0].message
        assert extra(message, "reasoning") == "I need it."
        assert message.tool_calls
    opened = Service(f"<|channel>thought\n{THOUGHT}<channel|>Done.", "gemma4")
    await opened.whole(thinking_token_budget=12)
    rest = opened.tokenizer.decode(opened.client.requests[1].prompt_token_ids, skip_special_tokens=False)
    assert rest.endswith("<|turn>model\n<|channel>thought\none \n<channel|>"), "the label counts, the opener does not"
    tight = await Service(THOUGHT).whole(thinking_token_budget=5, max_tokens=7)
    assert (tight.choices[0].finish_reason, tight.usage and tight.usage.completion_tokens) == ("length", 7)
    assert await Service("x").refusal(thinking_token_budget=-2) == (400, "thinking_token_budget")
    unmarked = Service("x", reasoning_parser="none")
    assert await unmarked.refusal(thinking_token_budget=5) == (400, "thinking_token_budget")


# -- the real small model, whose template and vocabulary know no tools


def test_a_template_without_tools_gets_them_in_the_system_message(smol_server: RunningServer) -> None:
    """Shown in Hermes' form; the history's calls and results are text of the same form, and answers are read in it."""
    history = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "18C"},
        {"role": "tool", "tool_call_id": "c1", "content": "dry"},
    ]
    shown = httpx.post(f"{smol_server.url}/tokenize", json={"messages": history, "tools": [WEATHER]}).json()["tokens"]
    prompt = httpx.post(f"{smol_server.url}/detokenize", json={"tokens": shown}).json()["prompt"]
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in prompt
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>' in prompt
    assert "user\n<tool_response>\n18C\n</tool_response>\n<tool_response>\ndry\n</tool_response><|im_end|>" in prompt
    client = OpenAI(base_url=f"{smol_server.url}/v1", api_key="x", max_retries=0, _strict_response_validation=True)
    asked: Any = {"model": "smollm2", "messages": history[:2], "tools": [WEATHER], "temperature": 0, "max_tokens": 60}
    whole = client.chat.completions.create(**asked).choices[0]
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == (whole.message.content or "")
    calls = [call for delta in deltas for call in delta.tool_calls or () if call.id]
    assert len(calls) == len(whole.message.tool_calls or ())
