"""`POST /v1/completions`: text or token ids, one or many prompts, with echo and log-probabilities."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.core.params import SamplingParams
from engine.errors import InvalidRequestError
from engine.server.http.documented import documented
from engine.server.http.limits import Limits
from engine.server.ipc.messages import EngineInfo
from engine.server.openai.answer import Addition, Answer, Choice
from engine.server.openai.generation import ChoiceDelta, Generation
from engine.server.openai.pipeline import GENERATING_ERRORS, Pipeline, generating_router
from engine.server.openai.prompts import encoded
from engine.server.openai.reply import replies as r
from engine.server.openai.reply.logprobs import completion_logprobs
from engine.server.openai.request.sampling import answer_room, constrained, sampling_params
from engine.server.openai.request.schema import CompletionRequest
from engine.server.openai.request.structured import answer_field, answer_form
from engine.server.openai.serving import Gateway, ServedModel
from engine.text.detok import Detokenizer
from engine.text.grammar import forms
from engine.text.tokenizer import TextTokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint


async def _prompts(gateway: Gateway, model: ServedModel, info: EngineInfo, body: CompletionRequest) -> list[list[int]]:
    special = body.add_special_tokens if body.add_special_tokens is not None else True
    return await encoded(gateway, model, info, body.prompt, gateway.limits.max_prompts, "prompt", special=special)


def _sampling(
    body: CompletionRequest, info: EngineInfo, limits: Limits, model: ServedModel, prompts: list[list[int]]
) -> SamplingParams:
    # max_tokens 0 with echo asks only for the prompt's log-probabilities: the engine makes one token, which is dropped.
    asked = 1 if _prompt_only(body) else body.max_tokens
    room = answer_room(
        max(map(len, prompts)), info.max_model_len, asked, "max_tokens", "prompt", DEFAULT_MAX_TOKENS)
    of_prompt = body.prompt_logprobs
    if of_prompt is None and body.echo:
        of_prompt = body.logprobs
    params = sampling_params(
        body, info, limits, model.defaults, max_tokens=room, logprobs=body.logprobs, prompt_logprobs=of_prompt
    )
    if len(prompts) * params.n > limits.max_choices:
        raise InvalidRequestError(
            f"{len(prompts)} prompts × n={params.n} is more than {limits.max_choices} choices.", "n"
        )
    form = answer_form(body)
    return constrained(params, None if form is None else (forms.whole(form[0]), form[1]), info)


def _prompt_only(body: CompletionRequest) -> bool:
    return bool(body.echo) and body.max_tokens == 0


class CompletionAnswer(Answer[CompletionRequest]):
    """With `echo`, each choice begins with its prompt, as part of its first delta."""

    id_prefix = "cmpl"

    def __init__(self, body: CompletionRequest, model: ServedModel, generation: Generation, limits: Limits) -> None:
        super().__init__(body, model, generation, limits)
        self._prompt_only = _prompt_only(body)
        self._echoed: dict[int, int] = {}  # choice -> characters of its prompt
        self._ids_told: set[int] = set()   # choices whose prompt ids have been sent

    def addition(self, delta: ChoiceDelta) -> Addition:
        text, logprobs, token_ids = "", None, []
        wanted = self.body.logprobs
        if self.body.echo and delta.index not in self._echoed:
            prompt = self.prompt_of(delta.index)
            text, offsets = self._echo(delta.index)
            self._echoed[delta.index] = len(text)
            if wanted is not None:
                entries = delta.prompt_logprobs or [None] * len(prompt)
                logprobs = completion_logprobs(prompt, entries, offsets, self.tokenizer, wanted)
        if not self._prompt_only:
            text += delta.text
            token_ids = delta.token_ids
            if wanted is not None and delta.logprobs:
                before = self._echoed.get(delta.index, 0)
                offsets = [before + offset for offset in delta.offsets]
                added = completion_logprobs(token_ids, delta.logprobs, offsets, self.tokenizer, wanted)
                logprobs = added if logprobs is None else joined(logprobs, added)
        return text, logprobs, token_ids

    def text_event(self, index: int, addition: Addition) -> bytes:
        text, logprobs, token_ids = addition
        choice = r.CompletionChoice(index, text, logprobs, None)
        if self.body.return_token_ids:
            choice.token_ids = token_ids
            if index not in self._ids_told:
                self._ids_told.add(index)
                choice.prompt_token_ids = self.prompt_of(index)
        return self._event([choice], self.usage_so_far())

    def end_event(self, delta: ChoiceDelta) -> bytes:
        choice = r.CompletionChoice(delta.index, "", None, None)
        self._end(choice, delta)
        return self._event([choice], self.usage_so_far())

    def usage_event(self) -> bytes:
        return self._event([], self._usage())

    def reply(self, choices: list[Choice]) -> r.Completion:
        return r.Completion(
            self.id, "text_completion", self.created, self.model, [self._choice(choice) for choice in choices],
            self._usage())

    def _choice(self, said: Choice) -> r.CompletionChoice:
        choice = r.CompletionChoice(said.index, said.text, None, None)
        if self.body.logprobs is not None:
            choice.logprobs = r.CompletionLogprobs()
            for logprobs in said.logprobs:
                joined(choice.logprobs, logprobs)
        if said.of_prompt is not None:
            choice.prompt_logprobs = said.of_prompt
        if self.body.return_token_ids:
            choice.token_ids = said.token_ids
            choice.prompt_token_ids = self.prompt_of(said.index)
        if said.end is not None:
            self._end(choice, said.end)
        return choice

    def _end(self, choice: r.CompletionChoice, delta: ChoiceDelta) -> None:
        assert delta.finish_reason is not None
        choice.finish_reason = "length" if self._prompt_only else delta.finish_reason.value  # type: ignore[assignment]
        choice.stop_reason = None if self._prompt_only else delta.stop_reason

    def _event(self, choices: list[r.CompletionChoice], usage: Any) -> bytes:
        return r.to_json(r.Completion(self.id, "text_completion", self.created, self.model, choices, usage))

    def _usage(self) -> r.Usage:
        usage = self.generation.usage
        if self._prompt_only:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage

    def _echo(self, index: int) -> tuple[str, list[int]]:
        """(text, offset of each token) of a choice's prompt. A prompt that was sent as text is echoed unchanged."""
        number = index // self.generation.params.n
        text, offsets = decoded_prompt(self.tokenizer, self.generation.prompts[number])
        prompt = self.body.prompt
        if isinstance(prompt, str):
            return prompt, offsets
        return (prompt[number] if isinstance(prompt[0], str) else text), offsets


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


_PIPELINE = Pipeline(
    CompletionRequest, _prompts, _sampling, CompletionAnswer,
    options=lambda body, model, prompts: {"grammar_field": answer_field(body)})
router = generating_router()


@router.post("/v1/completions", **documented(
    "Continue a text", body=CompletionRequest, reply=r.Completion, event=r.Completion, errors=GENERATING_ERRORS))
async def completions(request: Request) -> Response:
    return await _PIPELINE(request)
