"""`thinking_token_budget`: the gateway ends the reasoning when it has used up its budget.

It aborts the engine's request, and sends a second one that continues after the end of the reasoning. The prefix cache
holds what both have in common, so this costs about one step.
"""

import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from engine.core.request import EngineRequest, FinishReason, StepOutput
from engine.errors import InvalidRequestError
from engine.server.ipc.client import EngineClient
from engine.server.openai.serving import ServedModel


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """`open`: the prompt ends inside the reasoning. `closing`: the tokens that end it. `grammar`: what the answer after
    it must follow."""

    tokens: int
    opener: int
    enders: frozenset[int]
    closing: list[int]
    open: bool
    grammar: str | None = None


def thinking_budget(tokens: int | None, model: ServedModel, prompt: Sequence[int]) -> ThinkingBudget | None:
    """The budget of a request. Raises InvalidRequestError if this model does not mark its reasoning by tokens."""
    if tokens is None or tokens == -1:
        return None
    name = "thinking_token_budget"
    if tokens < -1:
        raise InvalidRequestError(f"{name} must be at least 0, or -1 for none.", name)
    form, tokenizer = model.output, model.tokenizer
    reasoning = form.reasoning
    if reasoning is None or reasoning.opener not in form.ids or reasoning.closer not in form.ids:
        raise InvalidRequestError(f"{name}: this model does not mark its reasoning; leave it out.", name)
    enders = {form.ids[reasoning.closer]}
    enders |= {form.ids[mark] for mark in (form.tools.openers if form.tools is not None else ()) if mark in form.ids}
    closing = tokenizer.encode_trusted(reasoning.ending, add_special_tokens=False)
    return ThinkingBudget(tokens, form.ids[reasoning.opener], frozenset(enders), closing,
                          form.thinks_after(prompt, tokenizer))


async def within_budget(
    client: EngineClient, request: EngineRequest, budget: ThinkingBudget
) -> AsyncIterator[StepOutput]:
    """The engine's outputs, with the reasoning no longer than allowed."""
    said: list[int] = []
    clock = _Clock(budget)
    if not clock.spent:
        outputs = client.generate(request)
        try:
            async for output in outputs:
                ids = output.new_token_ids
                keep = clock.read(ids) if output.finish_reason is None else len(ids)
                said += ids[:keep]
                yield output if keep == len(ids) else dataclasses.replace(
                    output, new_token_ids=ids[:keep], logprobs=output.logprobs[:keep] if output.logprobs else None)
                if output.finish_reason is not None:
                    return
                if clock.spent:
                    break
            else:
                return  # the engine is gone; the caller reports it
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]
    params = request.params
    room = None if params.max_tokens is None else params.max_tokens - len(said) - len(budget.closing)
    if room is not None and room < 1:
        last = budget.closing[: len(budget.closing) + room]
        yield StepOutput(request.request_id, last, finish_reason=FinishReason.LENGTH)
        return
    yield StepOutput(request.request_id, budget.closing)
    rest = EngineRequest(
        f"{request.request_id}-after", [*request.prompt_token_ids, *said, *budget.closing],
        dataclasses.replace(
            params, grammar=budget.grammar, max_tokens=room, prompt_logprobs=None,
            min_tokens=max(0, params.min_tokens - len(said) - len(budget.closing))),
        request.priority, request.cache_salt, owner=request.owner)
    outputs = client.generate(rest)
    try:
        async for output in outputs:
            yield dataclasses.replace(output, num_cached_tokens=0)
    finally:
        await outputs.aclose()  # type: ignore[attr-defined]


class _Clock:
    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget, self._open, self._left = budget, budget.open, budget.tokens

    @property
    def spent(self) -> bool:
        return self._open and self._left <= 0

    def read(self, ids: Sequence[int]) -> int:
        """How many of these tokens to keep: those until the budget is used up."""
        for i, token in enumerate(ids):
            if self._open:
                self._open = token not in self._budget.enders
                self._left -= self._open
            elif token == self._budget.opener:
                self._open = True
            if self.spent:
                return i + 1
        return len(ids)
