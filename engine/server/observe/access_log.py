"""One log line for each HTTP exchange: who, what, status, how long, and how many tokens. No query strings, headers,
prompts or keys."""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.http.errors import shortened

log = logging.getLogger("atoll.access")

QUIET_PATHS = frozenset({"/health", "/livez", "/metrics", "/version"})  # probes: worth a line only when debugging


class AccessLog:
    """Pure ASGI and outermost, so it also sees requests that other layers refuse, and streams until their last byte."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, complete = time.monotonic(), 0, False

        async def watched(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            caller = scope.get("caller")
            fields = {
                "status": status,
                "ms": round((time.monotonic() - started) * 1000),
                "client": (scope.get("client") or ("unix",))[0],
                "request_id": caller.request_id if caller else "",
            }
            if caller and caller.key_id:
                fields["key"] = caller.key_id
            if caller and (work := caller.work):
                fields |= {"model": work.model, "prompt_tokens": work.prompt_tokens,
                           "output_tokens": work.output_tokens}
                if work.first_token_at is not None:
                    fields["ttft_ms"] = round((work.first_token_at - started) * 1000, 1)
                if work.between is not None:
                    fields["itl_ms"] = round(work.between * 1000, 2)
            if not complete:
                fields["incomplete"] = True  # the client left, or the answer broke off
            level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
            log.log(level, "%s %s", scope["method"], shortened(scope["path"]), extra={"fields": fields})
