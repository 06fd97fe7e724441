"""The outermost layers, as pure ASGI, because they must not hide a client's disconnect from a stream."""

import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.access.auth import PUBLIC_PATHS, KeyFile, bearer_token
from engine.server.access.caller import Caller
from engine.server.http.errors import ApiError, internal
from engine.server.observe.metrics import UNKNOWN, Metrics

log = logging.getLogger("atoll.server")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestContext:
    """Gives every request an id (the client's `X-Request-Id`, or a new one), returns it in the reply, counts and times
    the exchange, and turns uncaught exceptions into a 500 that reveals no internals."""

    def __init__(self, app: ASGIApp, metrics: Metrics, route_of: Callable[[str], str | None]) -> None:
        self._app, self._metrics, self._route_of = app, metrics, route_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _header(scope, b"x-request-id")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope["caller"] = Caller(request_id)
        started, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ours = [(b"x-request-id", request_id.encode()), *scope["caller"].headers]
                message = {**message, "headers": [*message.get("headers", []), *ours]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = status or 499  # the client has gone
        except Exception:
            log.exception("request %s failed", request_id)
            if status:
                raise  # the reply has begun: only a broken connection can still tell the client
            await internal().response()(scope, receive, send_with_id)
        finally:
            self._metrics.http_request(
                self._route_of(scope["path"]) or UNKNOWN, scope["method"], status or 500, time.monotonic() - started
            )


class Authentication:
    """With a key file, every path except `PUBLIC_PATHS` needs a valid key, even a path that does not exist.

    On a public path a valid key is recorded, too, because its owner is shown more. `scopes.py` decides for each route
    what a key may do.
    """

    def __init__(self, app: ASGIApp, keys: KeyFile) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in PUBLIC_PATHS:
            if token := bearer_token(_header(scope, b"authorization")):
                scope["caller"].key = self._keys.check(token)
        elif scope["type"] == "http":
            key = self._keys.check(bearer_token(_header(scope, b"authorization")))
            if key is None:
                error = ApiError(
                    401, "A valid API key is required: send the header Authorization: Bearer sk-….",
                    type="authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
                )
                await error.response()(scope, receive, send)
                return
            scope["caller"].key = key
        await self._app(scope, receive, send)


class HeadAsGet:
    """Answers HEAD as GET, as every web server does: load balancers and `wget --spider` ask for /health this way. The
    HTTP layer sends the headers only."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if head else scope, receive, send)


def _header(scope: Scope, name: bytes) -> str:
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return ""
