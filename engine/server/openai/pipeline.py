"""The pipeline of every generating endpoint: request → checked request → prompt ids → streams of deltas → reply or
events.

An endpoint supplies its own stages; their order, admission, cache salts and aborts are here.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from engine.core.params import SamplingParams
from engine.errors import InvalidRequestError
from engine.server.http.documented import READ
from engine.server.http.limits import Limits
from engine.server.ipc.messages import EngineInfo
from engine.server.openai.answer import Answer
from engine.server.openai.endpoint import (
    admission,
    cache_salt,
    caller_of,
    check_common,
    gateway_of,
    json_reply,
    priority_of,
    stream_reply,
    unless_disconnected,
)
from engine.server.openai.generation import Generation
from engine.server.openai.request.body import read_request
from engine.server.openai.request.schema import SamplingFields
from engine.server.openai.serving import Gateway, ServedModel

GENERATING_ERRORS = (404, *READ, 422, 429, 500, 503)


def generating_router() -> APIRouter:
    """A router for a generating endpoint: a request counts against the limits before its body is read."""
    return APIRouter(tags=["Generate"], dependencies=[Depends(admission)])


Body = TypeVar("Body", bound=SamplingFields)


@dataclass(frozen=True, slots=True)
class Pipeline(Generic[Body]):
    """The stages of one endpoint. Each may refuse with InvalidRequestError or ApiError, before the engine gets
    anything.

    `body` is the type of the request body; `translate` converts it to what the stages work with, and `explain` an error
    of theirs to the words of the request.
    """

    body: type[Any]
    prompts: Callable[[Gateway, ServedModel, EngineInfo, Body], Awaitable[list[list[int]]]]
    sampling: Callable[[Body, EngineInfo, Limits, ServedModel, list[list[int]]], SamplingParams]
    answer: type[Answer[Body]]
    check: Callable[[Body, Limits], None] | None = None
    options: Callable[[Body, ServedModel, list[list[int]]], dict[str, Any]] = lambda body, model, prompts: {}
    translate: Callable[[Any], Body] = lambda body: body
    explain: Callable[[Any, InvalidRequestError], InvalidRequestError] = lambda body, error: error

    async def __call__(self, request: Request) -> Response:
        body = self.translate(await read_request(request, self.body, gateway_of(request).limits))
        try:
            return await self._answer(request, body)
        except InvalidRequestError as error:
            raise self.explain(body, error) from None

    async def _answer(self, request: Request, body: Body) -> Response:
        gateway, caller = gateway_of(request), caller_of(request)
        model = gateway.model(body.model)
        check_common(body, gateway.limits)
        if self.check is not None:
            self.check(body, gateway.limits)
        info = gateway.ready(model, caller.key_id)
        priority = priority_of(body, caller, info)
        prompts = await self.prompts(gateway, model, info, body)
        params = self.sampling(body, info, gateway.limits, model, prompts)
        answer = self.answer(body, model, Generation(
            model, gateway, caller, prompts, params, priority=priority, cache_salt=cache_salt(body, caller, gateway),
            on_end=lambda tokens: gateway.spent(caller, tokens), **self.options(body, model, prompts),
        ), gateway.limits)
        if body.stream:
            return await stream_reply(
                answer.events(), gateway.limits, named=answer.named_events, compiles=params.grammar is not None)
        return json_reply(await unless_disconnected(request, answer.whole()))
