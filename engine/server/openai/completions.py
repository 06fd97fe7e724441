"""`POST /v1/completions`: text or token ids, one or many prompts, with echo and log-probabilities."""

from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from msgspec import UNSET
from starlette.requests import Request

from engine.core.params import SamplingParams
from engine.errors import InvalidRequestError
from engine.server.http.body import read_request
from engine.server.http.limits import Limits
from engine.server.ipc.messages import EngineInfo
from engine.server.openai import replies as r
from engine.server.openai.chat import usage_so_far
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
from engine.server.openai.logprobs import completion_logprobs, prompt_logprobs
from engine.server.openai.sampling import answer_room, check_length_before_encoding, check_token, sampling_params
from engine.server.openai.schema import CompletionRequest
from engine.server.openai.serving import Gateway, ServedModel
from engine.text.detok import Detokenizer
from engine.text.tokenizer import TextTokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint


async def completions(request: Request) -> Any:
    return await admitted(request, _completions)


async def _completions(request: Request, admission: ExitStack) -> Any:
    gateway, caller = gateway_of(request), caller_of(request)
    body = await read_request(request, CompletionRequest, gateway.limits)
    model = gateway.model(body.model)
    check_common(body, gateway.limits)
    info = model.ready(gateway.limits)
    priority = priority_of(body, caller, info)
    prompts = await _prompts(gateway, model, info, body)
    params = _sampling(body, info, gateway.limits, model, max(map(len, prompts)))
    if len(prompts) * params.n > gateway.limits.max_choices:
        raise InvalidRequestError(
            f"{len(prompts)} prompts × n={params.n} is more than {gateway.limits.max_choices} choices.", "n"
        )
    reply = _CompletionReply(body, model, Generation(
        model, gateway.metrics, prompts, params, priority=priority,
        cache_salt=cache_salt(body, caller, gateway),
    ))
    if body.stream:
        return await stream_reply(reply.events(), gateway.limits, admission)
    return json_reply(await unless_disconnected(request, reply.whole()))


def parse_prompt(prompt: str | list[Any], max_prompts: int) -> list[str] | list[list[int]]:
    """The four forms of `prompt` as a list of texts or a list of id lists. Raises InvalidRequestError."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("prompt must not be empty.", "prompt")
    if _is_ids(prompt):
        return [prompt]
    if len(prompt) > max_prompts:
        raise InvalidRequestError(f"At most {max_prompts} prompts are allowed, got {len(prompt)}.", "prompt")
    if all(isinstance(item, str) for item in prompt):
        return prompt
    for i, item in enumerate(prompt):
        if not isinstance(item, list) or not _is_ids(item):
            raise InvalidRequestError(
                "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids.",
                f"prompt.{i}",
            )
    return prompt


def _is_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


async def _prompts(gateway: Gateway, model: ServedModel, info: EngineInfo, body: CompletionRequest) -> list[list[int]]:
    prompts = parse_prompt(body.prompt, gateway.limits.max_prompts)
    special = body.add_special_tokens if body.add_special_tokens is not None else True
    encoded: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            check_length_before_encoding(len(prompt), model.tokenizer.longest_token, info.max_model_len, "prompt")
            prompt = await gateway.off_loop(model.tokenizer.encode_text, prompt, special)
        else:
            for token_id in (min(prompt, default=0), max(prompt, default=0)):
                check_token(token_id, info.vocab_size, "prompt")
        if not prompt:
            raise InvalidRequestError("prompt must not be empty.", "prompt" if len(prompts) == 1 else f"prompt.{i}")
        encoded.append(prompt)
    return encoded


def _sampling(
    body: CompletionRequest, info: EngineInfo, limits: Limits, model: ServedModel, longest_prompt: int
) -> SamplingParams:
    # max_tokens 0 with echo asks for the prompt's log-probabilities only; the engine then makes one token, unseen.
    asked = 1 if _prompt_only(body) else body.max_tokens
    room = answer_room(longest_prompt, info.max_model_len, asked, "max_tokens", "prompt", DEFAULT_MAX_TOKENS)
    of_prompt = body.prompt_logprobs
    if of_prompt is None and body.echo:
        of_prompt = body.logprobs
    return sampling_params(
        body, info, limits, model.defaults, max_tokens=room, logprobs=body.logprobs, prompt_logprobs=of_prompt
    )


def _prompt_only(body: CompletionRequest) -> bool:
    return bool(body.echo) and body.max_tokens == 0


class _Choice:
    """One choice as it grows. With `echo` it begins with its prompt, which then counts as its first delta."""

    def __init__(self, index: int, reply: "_CompletionReply") -> None:
        self.index = index
        self._reply = reply
        self._prompt = reply.generation.prompts[index // reply.generation.params.n]
        self._base = 0  # characters of the echoed prompt
        self._begun = False
        self.of_prompt: r.PromptLogprobs | None = None

    def take(self, delta: ChoiceDelta) -> tuple[str, r.CompletionLogprobs | None, list[int]]:
        """(text, logprobs, token ids) that this delta adds."""
        body, tokenizer = self._reply.body, self._reply.tokenizer
        text, logprobs, token_ids = "", None, []
        if not self._begun:
            self._begun = True
            if body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
                self.of_prompt = prompt_logprobs(self._prompt, delta.prompt_logprobs, tokenizer)
            if body.echo:
                text, offsets = self._reply.echo(self.index)
                self._base = len(text)
                if body.logprobs is not None:
                    entries = delta.prompt_logprobs or [None] * len(self._prompt)
                    logprobs = completion_logprobs(self._prompt, entries, offsets, tokenizer, body.logprobs)
        if not _prompt_only(body):
            text += delta.text
            token_ids = delta.token_ids
            if body.logprobs is not None and delta.logprobs is not None:
                offsets = [self._base + offset for offset in delta.offsets]
                added = completion_logprobs(token_ids, delta.logprobs, offsets, tokenizer, body.logprobs)
                logprobs = added if logprobs is None else joined(logprobs, added)
        return text, logprobs, token_ids


class _CompletionReply:
    """The answer to one completions request, whole or as a stream of chunks."""

    def __init__(self, body: CompletionRequest, model: ServedModel, generation: Generation) -> None:
        self.body, self.generation, self.tokenizer = body, generation, model.tokenizer
        self._model = body.model or model.name
        self._id, self._created = new_id("cmpl")
        self._choices = [_Choice(i, self) for i in range(len(generation.prompts) * generation.params.n)]

    def echo(self, index: int) -> tuple[str, list[int]]:
        """(text, offset of each token) of the prompt of a choice. A prompt that came as text is echoed as it came."""
        number = index // self.generation.params.n
        text, offsets = decoded_prompt(self.tokenizer, self.generation.prompts[number])
        prompt = self.body.prompt
        if isinstance(prompt, str):
            return prompt, offsets
        return (prompt[number] if isinstance(prompt[0], str) else text), offsets

    async def whole(self) -> r.Completion:
        choices = [r.CompletionChoice(c.index, "", None, None) for c in self._choices]
        texts: list[list[str]] = [[] for _ in choices]
        token_ids: list[list[int]] = [[] for _ in choices]
        async for delta in self.generation:
            state, choice = self._choices[delta.index], choices[delta.index]
            text, logprobs, ids = state.take(delta)
            texts[delta.index].append(text)
            token_ids[delta.index] += ids
            if logprobs is not None:
                choice.logprobs = logprobs if choice.logprobs is None else joined(choice.logprobs, logprobs)
            if delta.finish_reason is not None:
                self._finish(choice, delta)
        for choice, state in zip(choices, self._choices, strict=True):
            choice.text = "".join(texts[choice.index])
            if state.of_prompt is not None:
                choice.prompt_logprobs = state.of_prompt
            if self.body.return_token_ids:
                choice.token_ids = token_ids[choice.index]
                choice.prompt_token_ids = self._prompt_ids(choice.index)
        return r.Completion(self._id, "text_completion", self._created, self._model, choices, self._usage())

    async def events(self) -> AsyncIterator[bytes]:
        """For each choice: text, then the finish reason in a chunk of its own; last the usage."""
        deltas = aiter(self.generation)
        begun: set[int] = set()
        try:
            async for delta in deltas:
                text, logprobs, token_ids = self._choices[delta.index].take(delta)
                if text or logprobs is not None or (token_ids and self.body.return_token_ids):
                    choice = r.CompletionChoice(delta.index, text, logprobs, None)
                    if self.body.return_token_ids:
                        choice.token_ids = token_ids
                        if delta.index not in begun:
                            choice.prompt_token_ids = self._prompt_ids(delta.index)
                    begun.add(delta.index)
                    yield self._chunk([choice])
                if delta.finish_reason is not None:
                    choice = r.CompletionChoice(delta.index, "", None, None)
                    self._finish(choice, delta)
                    yield self._chunk([choice])
        finally:
            await deltas.aclose()  # type: ignore[attr-defined]
        options = self.body.stream_options
        if options is not None and options.include_usage:
            yield self._chunk([], self._usage())

    def _finish(self, choice: r.CompletionChoice, delta: ChoiceDelta) -> None:
        assert delta.finish_reason is not None
        choice.finish_reason = "length" if _prompt_only(self.body) else delta.finish_reason.value  # type: ignore[assignment]
        choice.stop_reason = None if _prompt_only(self.body) else delta.stop_reason

    def _chunk(self, choices: list[r.CompletionChoice], usage: Any = UNSET) -> bytes:
        if usage is UNSET:
            usage = usage_so_far(self.body, self.generation)
        return r.to_json(
            r.Completion(self._id, "text_completion", self._created, self._model, choices, usage)
        )

    def _usage(self) -> r.Usage:
        usage = self.generation.usage
        if _prompt_only(self.body):
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage

    def _prompt_ids(self, index: int) -> list[int]:
        return self.generation.prompts[index // self.generation.params.n]


def decoded_prompt(tokenizer: TextTokenizer, prompt: list[int]) -> tuple[str, list[int]]:
    """(text, characters before each token) of prompt ids, special tokens left out."""
    delta = Detokenizer(tokenizer, SamplingParams()).push(prompt, finished=True)
    return delta.text, delta.offsets


def joined(first: r.CompletionLogprobs, second: r.CompletionLogprobs) -> r.CompletionLogprobs:
    """`first`, extended in place: copying at every token would be quadratic."""
    first.tokens += second.tokens
    first.token_logprobs += second.token_logprobs
    first.top_logprobs += second.top_logprobs
    first.text_offset += second.text_offset
    return first
