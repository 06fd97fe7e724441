"""`POST /v1/chat/completions`."""

from collections.abc import Iterable
from dataclasses import replace
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
from engine.server.openai.answer import Addition, Answer, Choice
from engine.server.openai.chat.grammar import chat_grammar, grammar_field
from engine.server.openai.chat.spoken import SpokenChoice
from engine.server.openai.chat.tool_use import ToolUse, check_tools, tool_use
from engine.server.openai.generation import ChoiceDelta, Generation
from engine.server.openai.pipeline import GENERATING_ERRORS, Pipeline, generating_router
from engine.server.openai.reply import replies as r
from engine.server.openai.reply.logprobs import chat_logprobs
from engine.server.openai.request.sampling import (
    answer_room,
    check_length_before_encoding,
    constrained,
    sampling_params,
)
from engine.server.openai.request.schema import ChatRequest, Message, TokenizeRequest
from engine.server.openai.request.structured import answer_field
from engine.server.openai.serving import Gateway, ServedModel
from engine.server.openai.thinking_budget import thinking_budget
from engine.text.conversation import encode_chat
from engine.text.parsers.events import CallArguments, CallBegun, CallEnded, Content, Event, Parsed, Reasoning, parsed
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
    """The template's variables. Raises InvalidRequestError for one that the model's template ignores, unless it
    switches off something that the model does not have anyway."""
    given = checked_kwargs(body.chat_template_kwargs)
    reads = model.tokenizer.template.variables if model.tokenizer.template else frozenset(given)
    effort = body.reasoning_effort
    if effort is not None and "reasoning_effort" not in reads and (effort == "none" or "enable_thinking" in reads):
        given.setdefault("enable_thinking", effort != "none")
    elif effort is not None:
        given.setdefault("reasoning_effort", effort)
    for name in given.keys() - reads:
        if given.pop(name) not in (False, "none"):
            param = name if name == "reasoning_effort" and effort is not None else f"chat_template_kwargs.{name}"
            raise InvalidRequestError(f"{param}: this model's chat template does not use it; leave it out.", param)
    return given


def check_chat_size(body: ChatRequest | TokenizeRequest, limits: Limits) -> None:
    """Check the limits on messages and tools. Raises InvalidRequestError."""
    if len(body.messages or []) > limits.max_messages:
        raise InvalidRequestError(f"At most {limits.max_messages} messages are allowed.", "messages")
    check_tools(body.tools, getattr(body, "tool_choice", None), limits)


def check(body: ChatRequest, limits: Limits) -> None:
    check_chat_size(body, limits)
    check_content(body.messages)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs set to true.", "top_logprobs")


def check_content(messages: list[Message]) -> None:
    """Check that every message has content; an assistant's may instead have tool calls, reasoning or a refusal.

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


def _tool_use(body: ChatRequest, model: ServedModel) -> ToolUse:
    return tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, model)


def options(body: ChatRequest, model: ServedModel, prompts: list[list[int]]) -> dict[str, Any]:
    """Options of the generation: the tokens that mark structure (None if an answer is only text), and the thinking
    budget."""
    use = _tool_use(body, model)
    budget, after = thinking_budget(body.thinking_token_budget, model, prompts[0]), None
    if budget is not None:
        after = chat_grammar(body, use, model, prompts[0], reasons=False)
        budget = replace(budget, grammar=None if after is None else after[0])
    return {
        "marks": model.output.watched(calls=use.calls) if use.calls or model.output.reasoning is not None else None,
        "budget": budget,
        "grammar_field": grammar_field(body, use),
    }


async def prompts(gateway: Gateway, model: ServedModel, info: EngineInfo, body: ChatRequest) -> list[list[int]]:
    _tool_use(body, model)  # refuse before the work
    return [await chat_prompt(gateway, model, info, body)]


def sampling(
    body: ChatRequest, info: EngineInfo, limits: Limits, model: ServedModel, prompts: list[list[int]]
) -> SamplingParams:
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    room = answer_room(len(prompts[0]), info.max_model_len, getattr(body, field), field, "messages")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
        raise InvalidRequestError("top_logprobs must be at least 0 and at most 20.", "top_logprobs")
    params = sampling_params(
        body, info, limits, model.defaults, max_tokens=room,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None, prompt_logprobs=body.prompt_logprobs,
    )
    return constrained(params, chat_grammar(body, _tool_use(body, model), model, prompts[0]), info)


def _characters(message: Message) -> int:
    content = message.content or ""
    if isinstance(content, str):
        return len(content)
    return sum(len(text) for part in content if isinstance(text := part.get("text"), str))


class ChatAnswer(Answer[ChatRequest]):
    """If the model reasons or may call tools, each choice is parsed (`SpokenChoice`); otherwise it is plain text."""

    id_prefix = "chatcmpl"

    def __init__(self, body: ChatRequest, model: ServedModel, generation: Generation, limits: Limits) -> None:
        super().__init__(body, model, generation, limits)
        self._use, form = _tool_use(body, model), model.output
        self._spoken: list[SpokenChoice] = []
        self._said: list[list[Event]] = [[] for _ in range(self.num_choices)]  # of a whole answer
        if self._use.calls or form.reasoning is not None:
            thinking = form.thinks_after(self.prompt_of(0), self.tokenizer)
            self._spoken = [
                SpokenChoice(form, self._use, thinking=thinking, reasoning=body.include_reasoning is not False,
                             limits=limits, formatted=bool(answer_field(body))) for _ in range(self.num_choices)]
            generation.reasoning_tokens = 0

    def addition(self, delta: ChoiceDelta) -> Addition:
        logprobs = chat_logprobs(delta.logprobs, self.tokenizer) if self.body.logprobs and delta.logprobs else None
        return delta.text, logprobs, delta.token_ids

    def note(self, delta: ChoiceDelta) -> None:
        if self._spoken:
            self._said[delta.index] += self._read(delta)

    def _read(self, delta: ChoiceDelta) -> list[Event]:
        events = self._spoken[delta.index].read(delta)
        self.generation.reasoning_tokens = sum(choice.reasoning_tokens for choice in self._spoken)
        return events

    # -- a stream

    def opening(self) -> Iterable[bytes]:
        """The role of each choice."""
        role = r.ChatDelta("assistant", "")
        prompt = self.prompt_of(0) if self.body.return_token_ids else UNSET
        return [self._event(r.ChatChunkChoice(index, role), prompt) for index in range(self.num_choices)]

    def delta_events(self, delta: ChoiceDelta, addition: Addition) -> Iterable[bytes]:
        """One event for each kind of addition. Log-probabilities and ids go into the first event, even if the delta
        adds nothing else."""
        if not self._spoken:
            yield from super().delta_events(delta, addition)
            return
        _, logprobs, token_ids = addition
        wants_ids = bool(self.body.return_token_ids and token_ids)
        news = [added for event in self._read(delta) if (added := self._delta(delta.index, event)) is not None]
        if not news and (logprobs is not None or wants_ids):
            news = [r.ChatDelta()]
        for i, added in enumerate(news):
            first = i == 0
            yield self._event(r.ChatChunkChoice(delta.index, added, logprobs if first else None,
                                                token_ids=token_ids if wants_ids and first else UNSET))

    def _delta(self, index: int, event: Event) -> r.ChatDelta | None:
        match event:
            case Content(text):
                return r.ChatDelta(content=text)
            case Reasoning(text):
                return r.ChatDelta(reasoning=text, reasoning_content=text)
            case CallBegun(call, name):
                made = r.ToolCallDelta(call, self._spoken[index].call_id(), "function", r.FunctionDelta(name, ""))
            case CallArguments(call, text):
                made = r.ToolCallDelta(call, function=r.FunctionDelta(arguments=text))
            case CallEnded():  # if the call is broken, the part that was sent cannot be taken back
                return None
        return r.ChatDelta(tool_calls=[made])

    def text_event(self, index: int, addition: Addition) -> bytes:
        text, logprobs, token_ids = addition
        return self._event(r.ChatChunkChoice(
            index, r.ChatDelta(content=text), logprobs, token_ids=token_ids if self.body.return_token_ids else UNSET))

    def end_event(self, delta: ChoiceDelta) -> bytes:
        called = bool(self._spoken) and self._spoken[delta.index].called
        return self._event(r.ChatChunkChoice(
            delta.index, r.ChatDelta(), None, self._reason(delta, called), delta.stop_reason))

    def usage_event(self) -> bytes:
        return r.to_json(r.ChatCompletionChunk(
            self.id, "chat.completion.chunk", self.created, self.model, [], self.generation.usage))

    def _event(self, choice: r.ChatChunkChoice, prompt: Any = UNSET) -> bytes:
        return r.to_json(r.ChatCompletionChunk(
            self.id, "chat.completion.chunk", self.created, self.model, [choice], self.usage_so_far(), prompt))

    # -- a whole answer

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
        said = parsed(self._said[choice.index]) if self._spoken else Parsed(content=choice.text)
        return r.ChatChoice(
            choice.index, self._message(choice.index, said), r.ChatLogprobs(entries) if self.body.logprobs else None,
            self._reason(end, bool(said.calls)), end.stop_reason,
            choice.token_ids if self.body.return_token_ids else UNSET,
        )

    def _message(self, index: int, said: Parsed) -> r.ChatMessage:
        message = r.ChatMessage("assistant", None if said.calls and not said.content else said.content)
        if said.reasoning:
            message.reasoning = message.reasoning_content = said.reasoning
        if said.calls:
            message.tool_calls = [
                r.ToolCall(self._spoken[index].call_id(), "function", r.FunctionCall(call.name, call.arguments))
                for call in said.calls]
        return message

    def _reason(self, end: ChoiceDelta, called: bool) -> Any:
        return self._use.finish_reason(end.finish_reason.value, called) if end.finish_reason else None


_PIPELINE = Pipeline(ChatRequest, prompts, sampling, ChatAnswer, check, options)
router = generating_router()


@router.post("/v1/chat/completions", **documented(
    "Answer a conversation", body=ChatRequest, reply=r.ChatCompletion, event=r.ChatCompletionChunk,
    errors=GENERATING_ERRORS))
async def chat_completions(request: Request) -> Response:
    return await _PIPELINE(request)
