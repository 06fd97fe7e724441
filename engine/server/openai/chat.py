"""`POST /v1/chat/completions`."""

from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request

from engine.core.params import SamplingParams
from engine.errors import InvalidRequestError
from engine.server.http.body import read_request
from engine.server.http.limits import Limits
from engine.server.ipc.messages import EngineInfo
from engine.server.openai import replies as r
from engine.server.openai.endpoint import (
    admitted,
    cache_salt,
    caller_of,
    check_common,
    gateway_of,
    json_reply,
    new_id,
    priority_of,
    stream_reply,
    unless_disconnected,
)
from engine.server.openai.generation import ChoiceDelta, Generation
from engine.server.openai.logprobs import chat_logprobs, prompt_logprobs
from engine.server.openai.sampling import answer_room, check_length_before_encoding, sampling_params
from engine.server.openai.schema import ChatRequest, Message, TokenizeRequest
from engine.server.openai.serving import Gateway, ServedModel
from engine.text.conversation import encode_chat
from engine.text.template import checked_kwargs


async def chat_completions(request: Request) -> Any:
    return await admitted(request, _chat)


async def _chat(request: Request, admission: ExitStack) -> Any:
    gateway, caller = gateway_of(request), caller_of(request)
    body = await read_request(request, ChatRequest, gateway.limits)
    model = gateway.model(body.model)
    _check(body, gateway.limits)
    info = model.ready(gateway.limits)
    priority = priority_of(body, caller, info)
    prompt = await chat_prompt(gateway, model, info, body)
    reply = _ChatReply(body, model, Generation(
        model, gateway.metrics, [prompt], _sampling(body, info, gateway.limits, model, len(prompt)),
        priority=priority, cache_salt=cache_salt(body, caller, gateway),
    ))
    if body.stream:
        return await stream_reply(reply.events(), gateway.limits, admission)
    return json_reply(await unless_disconnected(request, reply.whole()))


async def chat_prompt(
    gateway: Gateway, model: ServedModel, info: EngineInfo, body: ChatRequest | TokenizeRequest
) -> list[int]:
    """The prompt ids of a chat. Raises InvalidRequestError."""
    messages = [msgspec.to_builtins(message) for message in body.messages or []]
    check_length_before_encoding(
        sum(_characters(message) for message in body.messages or []), model.tokenizer.longest_token, info.max_model_len,
        "messages",
    )
    kwargs = _template_kwargs(body, model)
    generate = body.add_generation_prompt
    return await gateway.off_loop(
        encode_chat, model.tokenizer, messages, tools=body.tools,
        add_generation_prompt=not body.continue_final_message if generate is None else generate,
        continue_final_message=bool(body.continue_final_message), kwargs=kwargs,
    )


def _template_kwargs(body: ChatRequest | TokenizeRequest, model: ServedModel) -> dict[str, Any]:
    """Raises InvalidRequestError for what the model's template would drop, unless it switches off what is not there."""
    given = checked_kwargs(body.chat_template_kwargs)
    reads = model.tokenizer.template.variables if model.tokenizer.template else frozenset(given)
    effort = body.reasoning_effort
    if effort == "none" and "reasoning_effort" not in reads:
        given.setdefault("enable_thinking", False)
    elif effort is not None:
        given.setdefault("reasoning_effort", effort)
    for name in given.keys() - reads:
        if given.pop(name) not in (False, "none"):
            param = name if name == "reasoning_effort" and effort is not None else f"chat_template_kwargs.{name}"
            raise InvalidRequestError(f"{param}: this model's chat template does not use it; leave it out.", param)
    return given


def check_chat_size(body: ChatRequest | TokenizeRequest, limits: Limits) -> None:
    """Bounds on messages and tools. Raises InvalidRequestError."""
    if len(body.messages or []) > limits.max_messages:
        raise InvalidRequestError(f"At most {limits.max_messages} messages are allowed.", "messages")
    if len(body.tools or []) > limits.max_tools:
        raise InvalidRequestError(f"At most {limits.max_tools} tools are allowed.", "tools")
    for i, tool in enumerate(body.tools or []):
        function = tool.get("function")
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if tool.get("type") != "function" or not named:
            raise InvalidRequestError(f'tools.{i} must be {{"type": "function", "function": {{"name": …}}}}.',
                                      f"tools.{i}")


def _check(body: ChatRequest, limits: Limits) -> None:
    check_common(body, limits)
    check_chat_size(body, limits)
    check_content(body.messages)
    if body.tools and body.tool_choice != "none":
        raise InvalidRequestError(
            'tools: this server does not parse tool calls yet; send tool_choice "none" to show the tools to the model '
            "without calling them.", "tools",
        )
    if body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequestError("tool_choice: this server does not make tool calls yet.", "tool_choice")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs set to true.", "top_logprobs")


def check_content(messages: list[Message]) -> None:
    """Every message says something; only an assistant's may consist of tool calls (or of reasoning, a refusal) alone.

    Raises InvalidRequestError.
    """
    for i, message in enumerate(messages):
        if message.content is not None or message.role == "function":
            continue
        if message.role == "assistant" and (message.tool_calls or message.refusal or message.reasoning
                                            or message.reasoning_content):
            continue
        raise InvalidRequestError(f"messages.{i}.content is required for the role {message.role!r}.",
                                  f"messages.{i}.content")


def _sampling(
    body: ChatRequest, info: EngineInfo, limits: Limits, model: ServedModel, prompt_tokens: int
) -> SamplingParams:
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    room = answer_room(prompt_tokens, info.max_model_len, getattr(body, field), field, "messages")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
        raise InvalidRequestError("top_logprobs must be at least 0 and at most 20.", "top_logprobs")
    return sampling_params(
        body, info, limits, model.defaults, max_tokens=room,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None, prompt_logprobs=body.prompt_logprobs,
    )


def _characters(message: Message) -> int:
    content = message.content or ""
    if isinstance(content, str):
        return len(content)
    return sum(len(text) for part in content if isinstance(text := part.get("text"), str))


class _ChatReply:
    """The answer to one chat request, whole or as a stream of chunks."""

    def __init__(self, body: ChatRequest, model: ServedModel, generation: Generation) -> None:
        self._body, self._generation = body, generation
        self._tokenizer = model.tokenizer
        self._model = body.model or model.name
        self._id, self._created = new_id("chatcmpl")

    async def whole(self) -> r.ChatCompletion:
        count = self._generation.params.n
        texts: list[list[str]] = [[] for _ in range(count)]
        entries: list[list[r.TokenLogprob]] = [[] for _ in range(count)]
        token_ids: list[list[int]] = [[] for _ in range(count)]
        last: list[ChoiceDelta | None] = [None] * count
        of_prompt = None
        async for delta in self._generation:
            texts[delta.index].append(delta.text)
            token_ids[delta.index] += delta.token_ids
            if (logprobs := self._logprobs(delta)) is not None:
                entries[delta.index] += logprobs.content
            if delta.prompt_logprobs is not None and delta.index == 0:
                of_prompt = prompt_logprobs(self._generation.prompts[0], delta.prompt_logprobs, self._tokenizer)
            last[delta.index] = delta
        choices = [
            r.ChatChoice(
                index,
                r.ChatMessage("assistant", "".join(texts[index])),
                r.ChatLogprobs(entries[index]) if self._body.logprobs else None,
                delta.finish_reason.value,  # type: ignore[union-attr, arg-type]
                delta.stop_reason,
                token_ids[index] if self._body.return_token_ids else UNSET,
            )
            for index, delta in enumerate(last)
            if delta is not None
        ]
        return r.ChatCompletion(
            self._id, "chat.completion", self._created, self._model, choices, self._generation.usage,
            prompt_logprobs=UNSET if of_prompt is None else of_prompt,
            prompt_token_ids=self._generation.prompts[0] if self._body.return_token_ids else UNSET,
        )

    async def events(self) -> AsyncIterator[bytes]:
        """For each choice: the role, then text, then the finish reason in a chunk of its own; last the usage."""
        count, begun = self._generation.params.n, False
        deltas = aiter(self._generation)
        try:
            async for delta in deltas:
                if not begun:
                    begun = True
                    for index in range(count):
                        yield self._chunk(index, r.ChatDelta("assistant", ""), first=True)
                if delta.text or (delta.token_ids and (self._body.logprobs or self._body.return_token_ids)):
                    yield self._chunk(
                        delta.index, r.ChatDelta(content=delta.text), logprobs=self._logprobs(delta),
                        token_ids=delta.token_ids,
                    )
                if delta.finish_reason is not None:
                    yield self._chunk(delta.index, r.ChatDelta(), finish=delta)
        finally:
            await deltas.aclose()  # type: ignore[attr-defined]
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield r.to_json(r.ChatCompletionChunk(
                self._id, "chat.completion.chunk", self._created, self._model, [], self._generation.usage
            ))

    def _chunk(
        self, index: int, delta: r.ChatDelta, *, first: bool = False, logprobs: r.ChatLogprobs | None = None,
        token_ids: list[int] | None = None, finish: ChoiceDelta | None = None,
    ) -> bytes:
        wanted = self._body.return_token_ids
        choice = r.ChatChunkChoice(
            index, delta, logprobs,
            finish.finish_reason.value if finish and finish.finish_reason else None,  # type: ignore[arg-type]
            finish.stop_reason if finish else UNSET,
            token_ids if wanted and token_ids is not None else UNSET,
        )
        return r.to_json(r.ChatCompletionChunk(
            self._id, "chat.completion.chunk", self._created, self._model, [choice],
            usage_so_far(self._body, self._generation),
            self._generation.prompts[0] if wanted and first else UNSET,
        ))

    def _logprobs(self, delta: ChoiceDelta) -> r.ChatLogprobs | None:
        if not self._body.logprobs or delta.logprobs is None:
            return None
        return chat_logprobs(delta.logprobs, self._tokenizer)


def usage_so_far(body: Any, generation: Generation) -> Any:
    """The `usage` of a chunk that is not the last: absent; null once usage was asked for; numbers if asked for always.

    Some clients take any chunk with a usage for the last one, hence null.
    """
    options = body.stream_options
    if options is None or not options.include_usage:
        return UNSET
    return generation.usage if options.continuous_usage_stats else None
