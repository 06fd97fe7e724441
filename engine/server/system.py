"""`/health`, `/livez`, `/version`, `/metrics`, `/openapi.json`: for probes, scrapers and tools."""

from starlette.requests import Request
from starlette.responses import Response

from engine.server.endpoint import gateway_of, json_reply
from engine.server.errors import overloaded, shortened
from engine.server.openapi import openapi_document
from engine.server.replies import StatusReply, VersionReply


async def health(request: Request) -> Response:
    """200 with an empty body only if every engine has produced a real token and its steps progress."""
    gateway = gateway_of(request)
    sick = [client for client in gateway.clients if not client.healthy()]
    if not sick:
        return Response(status_code=200)
    words = "; ".join(f"{c.state}{f' ({shortened(c.progress)})' if c.progress else ''}" for c in sick)
    raise overloaded(f"Not ready: {words}.", gateway.limits.retry_after_seconds, code="not_ready")


async def livez(request: Request) -> Response:
    """The gateway process answers; this says nothing about the engine."""
    return json_reply(StatusReply("alive"))


async def version(request: Request) -> Response:
    return json_reply(VersionReply(gateway_of(request).version))


async def metrics(request: Request) -> Response:
    body, content_type = gateway_of(request).metrics.render()
    return Response(body, headers={"Content-Type": content_type})


async def openapi(request: Request) -> Response:
    gateway = gateway_of(request)
    return json_reply(openapi_document(gateway.version, authenticated=gateway.keys is not None))
