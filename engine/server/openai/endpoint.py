"""What the generating endpoints share: checks, prefix-cache salts, and work that stops when its client leaves."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.errors import InvalidRequestError
from engine.server.access.caller import Caller
from engine.server.access.scopes import caller_of
from engine.server.http.errors import ApiError
from engine.server.http.limits import Limits
from engine.server.ipc.messages import EngineInfo
from engine.server.openai.reply.replies import to_json
from engine.server.openai.reply.sse import EventStream
from engine.server.openai.request.schema import EmbeddingRequest, SamplingFields
from engine.server.openai.serving import Gateway
from engine.text.grammar.limits import COMPILE_SECONDS

T = TypeVar("T")


def gateway_of(request: Request) -> Gateway:
    return request.app.state.gateway


def json_reply(reply: Any) -> Response:
    return Response(to_json(reply), media_type="application/json")


def check_common(request: SamplingFields, limits: Limits) -> None:
    """Refuse what no generating endpoint supports. Raises InvalidRequestError."""
    if request.spaces_between_special_tokens is False and request.skip_special_tokens is False:
        raise InvalidRequestError("spaces_between_special_tokens: special tokens are joined as the tokenizer joins "
                                  "them; leave it out.", "spaces_between_special_tokens")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError("prompt_logprobs is not available in a stream; set stream to false.",
                                  "prompt_logprobs")
    check_names(request, limits)


def check_names(request: SamplingFields | EmbeddingRequest, limits: Limits) -> None:
    for name in ("model", "cache_salt"):
        if len(getattr(request, name) or "") > limits.max_name_characters:
            raise InvalidRequestError(f"{name} may have {limits.max_name_characters} characters.", name)


def cache_salt(request: SamplingFields | EmbeddingRequest, caller: Caller, gateway: Gateway) -> str:
    """A salt that separates this request's cached prefixes from those of other tenants, and of the tenant's other
    `cache_salt`s."""
    salt = request.cache_salt or ""
    if caller.key is None or not gateway.limits.isolate_prefix_cache:
        return salt
    return gateway.tenant_salt(caller.key.tenant, salt)


def priority_of(request: SamplingFields | EmbeddingRequest, caller: Caller, info: EngineInfo) -> int:
    """The request's priority. Raises ApiError 403 (the key may not choose one) and InvalidRequestError (the engine
    would ignore it)."""
    priority = request.priority or 0
    if priority and caller.key is not None and not caller.key.allows("priority"):
        raise ApiError(403, "priority: this API key lacks the scope 'priority'.", type="permission_error",
                       param="priority", code="insufficient_scope")
    if priority and info.scheduling_policy != "priority":
        raise InvalidRequestError(
            "priority: this model serves requests in the order of their arrival; leave it out, or have the engine "
            "started with --scheduling-policy priority.", "priority",
        )
    return priority


async def admission(request: Request) -> AsyncIterator[None]:
    """A dependency: counts the request against the limits until the last byte of its answer. If there are too many, it
    is refused before its body is read. Raises ApiError 503 and 429."""
    with gateway_of(request).admitted(caller_of(request)):
        yield


async def stream_reply(
    events: AsyncIterator[bytes], limits: Limits, *, named: bool = False, compiles: bool = False
) -> EventStream:
    """Answer with a stream. `compiles`: the engine first compiles a grammar, which may fail."""
    stream = EventStream(events, limits, named=named)
    await stream.prime(COMPILE_SECONDS if compiles else 0.0)
    return stream


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled (and so aborted in the engine) when the client goes away.

    Raises ClientDisconnect. Call it only after the body has been read.
    """

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
