"""`/health`, `/livez`, `/version`, `/metrics`: for probes and scrapers."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.server.access.scopes import caller_of
from engine.server.http.documented import documented
from engine.server.http.errors import overloaded, shortened
from engine.server.openai.endpoint import gateway_of, json_reply
from engine.server.openai.reply.replies import StatusReply, VersionReply
from engine.server.openai.serving import ServedModel

probes = APIRouter(tags=["Health"])
scraped = APIRouter(tags=["Metrics"])


@probes.get("/health", **documented("200 when tokens can be served", errors=(404, 503)), response_class=Response)
async def health(request: Request, model: str | None = None) -> Response:
    """200 with an empty body if every model has an engine that has produced a real token and makes progress, and the
    server does not drain.

    With `?model=NAME`, only that model is checked. If the server has keys, only callers with a key learn the names of
    models and what is wrong with them; for others, an unknown model is just not ready.
    """
    gateway = gateway_of(request)
    name = model
    trusted = gateway.keys is None or caller_of(request).key is not None
    if name and name not in gateway.models and not trusted:
        raise overloaded("Not ready.", gateway.limits.retry_after_seconds, code="not_ready")
    models = [gateway.model(name)] if name else _without_aliases(gateway.models)
    sick = [model for model in models if not model.healthy()]
    words = [f"{shortened(model.name)}: {shortened(model.client.progress) or model.client.state}" for model in sick]
    words += [] if name else [f"{shortened(broken)}: not served" for broken in gateway.broken]
    if not words and gateway.draining:
        raise gateway.drained()
    if not words:
        return Response(status_code=200)
    what = f"Not ready: {'; '.join(words)}." if trusted else "Not ready."
    raise overloaded(what, gateway.limits.retry_after_seconds, code="not_ready")


@probes.get("/livez", **documented("200 while the gateway answers", reply=StatusReply))
async def livez(request: Request) -> Response:
    """The gateway process answers; this says nothing about the engine."""
    return json_reply(StatusReply("alive"))


@probes.get("/version", **documented("Version of the server", reply=VersionReply))
async def version(request: Request) -> Response:
    return json_reply(VersionReply(gateway_of(request).version))


@scraped.get("/metrics", **documented("Prometheus metrics", reply=str))
async def metrics(request: Request) -> Response:
    body, content_type = gateway_of(request).metrics.render()
    return Response(body, headers={"Content-Type": content_type})


def _without_aliases(models: dict[str, ServedModel]) -> list[ServedModel]:
    return list({id(model.client): model for model in models.values()}.values())
