"""The answer to one generating request, whole or as a stream of events: the part that all endpoints share."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from msgspec import UNSET

from engine.server.http.limits import Limits
from engine.server.openai.generation import ChoiceDelta, Generation
from engine.server.openai.reply import replies as r
from engine.server.openai.reply.logprobs import prompt_logprobs
from engine.server.openai.request.schema import SamplingFields
from engine.server.openai.serving import ServedModel

Body = TypeVar("Body", bound=SamplingFields)
Addition = tuple[str, Any, list[int]]  # text, log-probabilities in the endpoint's format or None, token ids


@dataclass(slots=True)
class Choice:
    """What one choice has produced so far."""

    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    end: ChoiceDelta | None = None
    of_prompt: r.PromptLogprobs | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Answer(ABC, Generic[Body]):
    """An endpoint's subclass defines how its events and its whole reply are written, and what a delta adds."""

    id_prefix: ClassVar[str]
    named_events: ClassVar[bool] = False  # True: `events` yields complete server-sent events, not just their data

    def __init__(self, body: Body, model: ServedModel, generation: Generation, limits: Limits) -> None:
        self.body, self.generation, self.tokenizer = body, generation, model.tokenizer
        self.model = body.model or model.name
        self.id, self.created = f"{self.id_prefix}-{uuid.uuid4().hex}", int(time.time())
        self.num_choices = len(generation.prompts) * generation.params.n

    # -- defined by the endpoint

    @abstractmethod
    def addition(self, delta: ChoiceDelta) -> Addition:
        """Called once for each delta, in order."""

    def opening(self) -> Iterable[bytes]:
        """Events before the first delta."""
        return ()

    @abstractmethod
    def text_event(self, index: int, addition: Addition) -> bytes: ...

    def delta_events(self, delta: ChoiceDelta, addition: Addition) -> Iterable[bytes]:
        """The events that a delta adds to the stream, except its end."""
        text, logprobs, token_ids = addition
        if text or logprobs is not None or (self.body.return_token_ids and token_ids):
            yield self.text_event(delta.index, addition)

    def note(self, delta: ChoiceDelta) -> None:
        """Called for each delta of an answer that is not streamed, after `addition`."""

    @abstractmethod
    def end_event(self, delta: ChoiceDelta) -> bytes: ...

    @abstractmethod
    def usage_event(self) -> bytes: ...

    @abstractmethod
    def reply(self, choices: list[Choice]) -> Any: ...

    # -- common

    async def events(self) -> AsyncIterator[bytes]:
        """For each choice its text, then its finish reason in a separate event; at the end the usage, if requested."""
        begun = False
        deltas = aiter(self.generation)
        try:
            async for delta in deltas:
                if not begun:
                    begun = True
                    for event in self.opening():
                        yield event
                for event in self.delta_events(delta, self.addition(delta)):
                    yield event
                if delta.finish_reason is not None:
                    yield self.end_event(delta)
        finally:
            await deltas.aclose()  # type: ignore[attr-defined]
        options = self.body.stream_options
        if options is not None and options.include_usage:
            yield self.usage_event()

    async def whole(self) -> Any:
        choices = [Choice(index) for index in range(self.num_choices)]
        async for delta in self.generation:
            choice = choices[delta.index]
            text, logprobs, token_ids = self.addition(delta)
            self.note(delta)
            choice.texts.append(text)
            choice.token_ids += token_ids
            if logprobs is not None:
                choice.logprobs.append(logprobs)
            if self.body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
                choice.of_prompt = prompt_logprobs(self.prompt_of(delta.index), delta.prompt_logprobs, self.tokenizer)
            if delta.finish_reason is not None:
                choice.end = delta
        return self.reply(choices)

    def prompt_of(self, index: int) -> list[int]:
        """The prompt ids of a choice."""
        return self.generation.prompts[index // self.generation.params.n]

    def usage_so_far(self) -> Any:
        """The `usage` of an event that is not the last: absent by default, null if usage was requested, numbers if it
        was requested for every event.

        Null, because some clients take any event with a usage for the last one.
        """
        options = self.body.stream_options
        if options is None or not options.include_usage:
            return UNSET
        return self.generation.usage if options.continuous_usage_stats else None
