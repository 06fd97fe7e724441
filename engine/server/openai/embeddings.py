"""`POST /v1/embeddings`: vectors of texts or token ids, from the hidden states of the served model."""

import asyncio
import base64
import time
import uuid
from collections.abc import Callable

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, FinishReason
from engine.embedding import finished
from engine.errors import EngineDeadError, InvalidRequestError, QuarantinedError
from engine.server.access.caller import Caller, Work
from engine.server.access.scopes import caller_of
from engine.server.http.documented import documented
from engine.server.ipc.messages import EngineInfo
from engine.server.openai.endpoint import (
    admission,
    cache_salt,
    check_names,
    gateway_of,
    priority_of,
    unless_disconnected,
)
from engine.server.openai.generation import raise_if_failed
from engine.server.openai.pipeline import GENERATING_ERRORS
from engine.server.openai.prompts import encoded
from engine.server.openai.reply import replies as r
from engine.server.openai.request.body import read_request
from engine.server.openai.request.schema import EmbeddingRequest
from engine.server.openai.serving import Gateway, ServedModel

_PARAMS = SamplingParams(max_tokens=None)  # nothing is sampled

router = APIRouter(tags=["Embed"], dependencies=[Depends(admission)])


@router.post("/v1/embeddings", **documented(
    "Vectors of texts", body=EmbeddingRequest, reply=r.EmbeddingList, errors=GENERATING_ERRORS))
async def embeddings(request: Request) -> Response:
    gateway, caller = gateway_of(request), caller_of(request)
    limits = gateway.limits
    body = await read_request(request, EmbeddingRequest, limits)
    model = gateway.model(body.model)
    check_names(body, limits)
    info = gateway.ready(model, caller.key_id)
    priority = priority_of(body, caller, info)
    _check_dimensions(body, info)
    special = body.add_special_tokens if body.add_special_tokens is not None else True
    inputs = await encoded(gateway, model, info, body.input, limits.max_embedding_inputs, "input", special=special)
    _check_lengths(inputs, info)
    total = sum(map(len, inputs))
    vectors = Vectors(model, gateway, caller, inputs, priority=priority, cache_salt=cache_salt(body, caller, gateway),
                      at_a_time=limits.max_embeddings_at_a_time, on_end=lambda tokens: gateway.spent(caller, tokens))
    raw = await unless_disconnected(request, vectors.all())
    caller.work = Work(model.name, total)
    reply = await gateway.off_loop(_reply, body, model, raw, total)
    return Response(reply, media_type="application/json")


class Vectors:
    """The inputs of one request as engine requests, only a limited number at a time, so that other requests fit in
    between."""

    def __init__(self, model: ServedModel, gateway: Gateway, caller: Caller, inputs: list[list[int]], *,
                 priority: int, cache_salt: str, at_a_time: int, on_end: Callable[[int], None]) -> None:
        self._model, self._gateway, self._caller, self._inputs = model, gateway, caller, inputs
        self._priority, self._cache_salt = priority, cache_salt
        self._at_a_time, self._on_end = at_a_time, on_end
        self._id = uuid.uuid4().hex

    async def all(self) -> list[bytes]:
        """The vectors of all inputs, in their order. The first failure, or a cancellation, aborts all others."""
        found: dict[int, bytes] = {}
        left = iter(range(len(self._inputs)))

        async def work() -> None:
            for i in left:
                found[i] = await self._one(i)

        tasks = [asyncio.create_task(work()) for _ in range(min(self._at_a_time, len(self._inputs)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._on_end(sum(len(self._inputs[i]) for i in found))
        return [found[i] for i in range(len(self._inputs))]

    async def _one(self, i: int) -> bytes:
        ids = self._inputs[i]
        request = EngineRequest(f"{self._id}-{i}", ids, _PARAMS, self._priority, self._cache_salt,
                                pooling=self._model.pooling, owner=self._caller.key_id)
        engine = self._model.replicas.choose(ids, self._cache_salt)
        tracker = self._gateway.metrics.track(
            self._model.name, prompt_tokens=len(ids), params=_PARAMS, engine=engine.number)
        client = engine.client
        self._gateway.active.add(self._model.name, self._caller, request, client, tracker)
        outputs = client.generate(request)
        try:
            async for output in outputs:
                tracker.on_output(output)
                raise_if_failed(output)
                if output.embedding is None:
                    break  # an engine of an older release answers with tokens
                return output.embedding
            raise EngineDeadError("The engine sent no embedding; it is being replaced.")
        except (EngineDeadError, QuarantinedError) as error:
            if isinstance(error, QuarantinedError):
                self._gateway.metrics.refused("quarantined", self._model.name)
            tracker.finish(FinishReason.ERROR)
            raise
        finally:
            tracker.finish(FinishReason.ABORT)
            self._gateway.active.remove(request)
            await outputs.aclose()


def _check_dimensions(body: EmbeddingRequest, info: EngineInfo) -> None:
    wanted = body.dimensions
    if wanted is not None and not 1 <= wanted <= info.hidden_size:
        raise InvalidRequestError(
            f"dimensions must lie between 1 and {info.hidden_size}, the size of this model's vectors; got "
            f"{str(wanted)[:40]}.", "dimensions",
        )
    if body.normalize is not None and body.use_activation is not None and body.normalize != body.use_activation:
        raise InvalidRequestError("normalize and use_activation are two names of one field; send one of them.",
                                  "normalize")


def _check_lengths(inputs: list[list[int]], info: EngineInfo) -> None:
    for i, ids in enumerate(inputs):
        if len(ids) > info.max_model_len:
            raise InvalidRequestError(
                f"This model's maximum context length is {info.max_model_len} tokens. However, your input has "
                f"{len(ids)} tokens; shorten it. (context_length_exceeded)",
                "input" if len(inputs) == 1 else f"input.{i}", "context_length_exceeded",
            )


def _reply(body: EmbeddingRequest, model: ServedModel, raw: list[bytes], tokens: int) -> bytes:
    normalize = body.normalize is not False and body.use_activation is not False
    data = []
    for i, vector in enumerate(raw):
        values = finished(vector, body.dimensions, normalize=normalize)
        if body.encoding_format == "base64":
            shown: str | list[float] = base64.b64encode(values).decode()
        else:
            shown = values.tolist()
        data.append(r.Embedding("embedding", i, shown))
    return r.to_json(r.EmbeddingList(
        f"embd-{uuid.uuid4().hex}", "list", int(time.time()), body.model or model.name, data,
        r.EmbeddingUsage(tokens, tokens)))
