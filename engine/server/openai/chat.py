"""`POST /v1/chat/completions`."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from engine.core.params import SamplingParams
from engine.errors import InvalidRequestError
from engine.server.http.documented import documented
from engine.server.http.limits import Limits
from engine.server.ipc.messages import EngineInfo
from engine.server.openai import replies as r
from engine.server.openai.answer import Addition, Answer, Choice
from engine.server.openai.generation import ChoiceDelta
from engine.server.openai.logprobs import chat_logprobs
from engine.server.openai.pipeline import GENERATING_ERRORS, Pipeline, generating_router
from engine.server.openai.sampling import answer_room, check_length_before_encoding, sampling_params
from engine.server.openai.schema import ChatRequest, Message, TokenizeRequest
from engine.server.openai.serving import Gateway, ServedModel
from engine.text.conversation import encode_chat
from engine.text.template import checked_kwargs


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


async def _prompts(gateway: Gateway, model: ServedModel, info: EngineInfo, body: ChatRequest) -> list[list[int]]:
    return [await chat_prompt(gateway, model, info, body)]


def _sampling(
    body: ChatRequest, info: EngineInfo, limits: Limits, model: ServedModel, prompts: list[list[int]]
) -> SamplingParams:
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    room = answer_room(len(prompts[0]), info.max_model_len, getattr(body, field), field, "messages")
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


class ChatAnswer(Answer[ChatRequest]):
    id_prefix = "chatcmpl"

    def addition(self, delta: ChoiceDelta) -> Addition:
        logprobs = chat_logprobs(delta.logprobs, self.tokenizer) if self.body.logprobs and delta.logprobs else None
        return delta.text, logprobs, delta.token_ids

    def opening(self) -> Iterable[bytes]:
        """The role of each choice."""
        role = r.ChatDelta("assistant", "")
        prompt = self.prompt_of(0) if self.body.return_token_ids else UNSET
        return [self._event(r.ChatChunkChoice(index, role), prompt) for index in range(self.num_choices)]

    def text_event(self, index: int, addition: Addition) -> bytes:
        text, logprobs, token_ids = addition
        return self._event(r.ChatChunkChoice(
            index, r.ChatDelta(content=text), logprobs, token_ids=token_ids if self.body.return_token_ids else UNSET))

    def end_event(self, delta: ChoiceDelta) -> bytes:
        reason: Any = delta.finish_reason.value if delta.finish_reason else None
        return self._event(r.ChatChunkChoice(delta.index, r.ChatDelta(), None, reason, delta.stop_reason))

    def usage_event(self) -> bytes:
        return r.to_json(r.ChatCompletionChunk(
            self.id, "chat.completion.chunk", self.created, self.model, [], self.generation.usage))

    def reply(self, choices: list[Choice]) -> r.ChatCompletion:
        wants_ids, of_prompt = self.body.return_token_ids, choices[0].of_prompt
        return r.ChatCompletion(
            self.id, "chat.completion", self.created, self.model,
            [self._choice(choice, choice.end) for choice in choices if choice.end is not None], self.generation.usage,
            prompt_logprobs=UNSET if of_prompt is None else of_prompt,
            prompt_token_ids=self.prompt_of(0) if wants_ids else UNSET,
        )

    def _choice(self, choice: Choice, end: ChoiceDelta) -> r.ChatChoice:
        entries = [entry for logprobs in choice.logprobs for entry in logprobs.content]
        reason: Any = end.finish_reason.value if end.finish_reason else None
        return r.ChatChoice(
            choice.index, r.ChatMessage("assistant", choice.text),
            r.ChatLogprobs(entries) if self.body.logprobs else None, reason, end.stop_reason,
            choice.token_ids if self.body.return_token_ids else UNSET,
        )

    def _event(self, choice: r.ChatChunkChoice, prompt: Any = UNSET) -> bytes:
        return r.to_json(r.ChatCompletionChunk(
            self.id, "chat.completion.chunk", self.created, self.model, [choice], self.usage_so_far(), prompt))


_PIPELINE = Pipeline(ChatRequest, _prompts, _sampling, ChatAnswer, _check)
router = generating_router()


@router.post("/v1/chat/completions", **documented(
    "Answer a conversation", body=ChatRequest, reply=r.ChatCompletion, event=r.ChatCompletionChunk,
    errors=GENERATING_ERRORS))
async def chat_completions(request: Request) -> Response:
    return await _PIPELINE(request)
