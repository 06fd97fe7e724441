"""One API request as engine requests: fanned out into choices, decoded to text, counted, and aborted together."""

import asyncio
import dataclasses
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec import UNSET

from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, FinishReason, StepOutput, TokenLogprobs
from engine.errors import AtollError, EngineDeadError, InvalidRequestError, QuarantinedError
from engine.server.access.caller import Caller, Work
from engine.server.ipc.replicas import Replica
from engine.server.observe.metrics import RequestTracker
from engine.server.openai.reply.replies import CompletionTokensDetails, PromptTokensDetails, Usage
from engine.server.openai.serving import Gateway, ServedModel
from engine.server.openai.thinking_budget import ThinkingBudget, within_budget
from engine.text.detok import Detokenizer
from engine.text.parsers.source import Part

log = logging.getLogger("atoll.server")

T = TypeVar("T")
_MERGE_AHEAD = 4  # outputs that may be read ahead of the writer for each choice


@dataclass(slots=True)
class ChoiceDelta:
    """What one step added to one choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # characters of the choice's text before each token
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None         # STOP or LENGTH
    stop_reason: int | str | None = None
    parts: list[list[Part]] = field(default_factory=list)  # the text and its marker tokens, see `TextDelta`


class Generation:
    """Iterate over it once. Closing the iterator aborts unfinished choices. `usage` counts what was yielded so far.

    Choice `i` of prompt `p` has index ``p * n + i`` and, with a seed, the seed ``seed + i``.
    """

    def __init__(self, model: ServedModel, gateway: Gateway, caller: Caller, prompts: Sequence[list[int]],
                 params: SamplingParams, *, priority: int = 0, cache_salt: str = "",
                 on_end: Callable[[int], None] = lambda _: None, marks: Mapping[int, str] | None = None,
                 budget: ThinkingBudget | None = None, grammar_field: str = "") -> None:
        """`on_end` is called with the token counts of prompts and answers when the iteration ends, however it ends.
        `marks`: the tokens that the deltas' `parts` separate from text; None for no parts. `grammar_field`: the
        request's field that asked for the grammar in `params`."""
        self.prompts = prompts
        self.params = params
        self._model, self._gateway, self._caller = model, gateway, caller
        self._priority, self._cache_salt = priority, cache_salt
        self._on_end = on_end
        self._marks, self._budget, self._grammar_field = marks, budget, grammar_field
        self.reasoning_tokens: int | None = None  # set by the parser, which knows them
        self._id = uuid.uuid4().hex
        self._trackers: list[RequestTracker] = []
        self._completion_tokens = 0
        self._cached = [0] * len(prompts)
        self._reasons: list[str] = []
        self._engines: dict[int, Replica] = {}  # by prompt: its choices share an engine and its cached prefix

    @property
    def usage(self) -> Usage:
        prompt, completion = sum(map(len, self.prompts)), self._completion_tokens
        reasoning = self.reasoning_tokens
        details = UNSET if reasoning is None else CompletionTokensDetails(reasoning)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(sum(self._cached)), details)

    async def __aiter__(self) -> AsyncIterator[ChoiceDelta]:
        n = self.params.n
        choices = [self._choice(p * n + i, p, i) for p in range(len(self.prompts)) for i in range(n)]
        stream: Any = choices[0] if len(choices) == 1 else merge(choices)
        try:
            async for delta in stream:
                self._completion_tokens += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self._reasons.append(delta.finish_reason.value)
                yield delta
        finally:
            self._note_longest()
            self._on_end(self.usage.total_tokens)
            self._caller.work = self._work()
            await stream.aclose()

    def _note_longest(self) -> None:
        """Observe the longest answer to each prompt. If no request ran, there are no trackers, and nothing to do."""
        n = self.params.n
        for first in range(0, len(self._trackers), n):
            longest = max(tracker.generated for tracker in self._trackers[first : first + n])
            self._gateway.metrics.longest_answer(self._model.name, longest)

    def _work(self) -> Work:
        usage, firsts = self.usage, [t.first for t in self._trackers if t.first]
        gaps = sum(max(0, t.generated - 1) for t in self._trackers)
        return Work(
            self._model.name, usage.prompt_tokens, usage.completion_tokens,
            min(firsts, default=None),
            sum(t.last - t.first for t in self._trackers) / gaps if gaps else None,
            sum(self._cached), tuple(self._reasons))

    async def _choice(self, index: int, prompt: int, child: int) -> AsyncIterator[ChoiceDelta]:
        params, prompt_ids = self.params, self.prompts[prompt]
        seed = None if params.seed is None else _child_seed(params.seed, child)
        request = EngineRequest(  # stop strings are found here; the engine never sees text
            f"{self._id}-{index}", prompt_ids, dataclasses.replace(params, n=1, seed=seed, stop=[]),
            self._priority, self._cache_salt, owner=self._caller.key_id,
        )
        detokenizer = Detokenizer(self._model.tokenizer, params, self._marks)
        engine = self._engines.get(prompt) or self._model.replicas.choose(prompt_ids, self._cache_salt)
        self._engines[prompt] = engine
        tracker = self._gateway.metrics.track(
            self._model.name, prompt_tokens=len(prompt_ids), params=params, engine=engine.number)
        self._trackers.append(tracker)
        client, budget = engine.client, self._budget
        self._gateway.active.add(self._model.name, self._caller, request, client, tracker)
        outputs = client.generate(request) if budget is None else within_budget(client, request, budget)
        try:
            async for output in outputs:
                tracker.on_output(output)
                if output.new_token_ids and not child:
                    self._cached[prompt] = max(self._cached[prompt], output.num_cached_tokens)
                delta = self._delta(index, output, detokenizer)
                if delta.finish_reason is not None:
                    tracker.finish(delta.finish_reason)
                yield delta
                if delta.finish_reason is not None:
                    return
            raise EngineDeadError("The engine ended the answer without a reason.")
        except (EngineDeadError, QuarantinedError) as error:
            if isinstance(error, QuarantinedError):
                self._gateway.metrics.refused("quarantined", self._model.name)
            tracker.finish(FinishReason.ERROR)
            raise
        except InvalidRequestError as error:
            tracker.finish(FinishReason.ERROR)
            if error.param == "grammar":  # the engine's name for the field
                raise InvalidRequestError(f"{self._grammar_field}: {error}", self._grammar_field, error.code) from None
            raise
        finally:
            tracker.finish(FinishReason.ABORT)
            self._gateway.active.remove(request)
            await outputs.aclose()  # type: ignore[attr-defined]

    def _delta(self, index: int, output: StepOutput, detokenizer: Detokenizer) -> ChoiceDelta:
        raise_if_failed(output)
        reason = output.finish_reason
        text = detokenizer.push(
            output.new_token_ids, reason is not None, stop_token=reason is FinishReason.STOP and not output.complete
        )
        used = text.num_tokens
        return ChoiceDelta(
            index,
            text.text,
            output.new_token_ids[:used],
            text.offsets,
            output.logprobs[:used] if output.logprobs is not None else None,
            output.prompt_logprobs,
            FinishReason.STOP if text.stopped else reason,
            text.stop_string if text.stopped else output.stop_reason,
            text.parts,
        )


def raise_if_failed(output: StepOutput) -> None:
    """Raises AtollError or EngineDeadError if `output` ends its request without an answer."""
    if output.finish_reason is FinishReason.ERROR:
        # The error is that of a whole step and may mention other requests: it is only for the operator.
        log.error("the engine failed on %s: %s", output.request_id, output.error)
        raise AtollError("The engine failed on this request; the server's log says why.")
    if output.finish_reason is FinishReason.ABORT:
        raise EngineDeadError("The engine gave this request up; it is stopping or restarting.")


async def merge(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Items of all streams as they arrive. The first exception ends the merge; closing it closes every stream."""
    queue: asyncio.Queue[tuple[T | None, BaseException | None]] = asyncio.Queue(_MERGE_AHEAD * len(streams))

    async def pump(stream: AsyncIterator[T]) -> None:
        error: BaseException | None = None
        try:
            async for item in stream:
                await queue.put((item, None))
        except Exception as caught:
            error = caught
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        await queue.put((None, error))

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:  # a task that was cancelled before its first step has not closed its stream
            await stream.aclose()  # type: ignore[attr-defined]


def _child_seed(seed: int, child: int) -> int:
    """A different seed for each choice, within the range that SamplingParams allows."""
    return seed + child if seed + child < 2**64 else seed + child - 2**64
