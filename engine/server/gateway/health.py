"""`/health`, `/livez`, `/version`, `/metrics`, `/openapi.json`: for probes, scrapers and tools."""

from starlette.requests import Request
from starlette.responses import Response

from engine.server.gateway.openapi import openapi_document
from engine.server.http.errors import overloaded, shortened
from engine.server.openai.endpoint import caller_of, gateway_of, json_reply
from engine.server.openai.replies import StatusReply, VersionReply
from engine.server.openai.serving import ServedModel


async def health(request: Request) -> Response:
    """200 with an empty body only if every engine has produced a real token and its steps progress.

    With `?model=NAME`, only that model's engine is asked. Where there are keys, the names of models and what ails them
    are told only to whoever shows one: to others a model that does not exist is one that is not ready.
    """
    gateway = gateway_of(request)
    name = request.query_params.get("model")
    told = gateway.keys is None or caller_of(request).key is not None
    if name and name not in gateway.models and not told:
        raise overloaded("Not ready.", gateway.limits.retry_after_seconds, code="not_ready")
    models = [gateway.model(name)] if name else _one_for_each_engine(gateway.models)
    sick = [model for model in models if not model.client.healthy()]
    words = [f"{shortened(model.name)}: {shortened(model.client.progress) or model.client.state}" for model in sick]
    words += [] if name else [f"{shortened(broken)}: not served" for broken in gateway.broken]
    if not words:
        return Response(status_code=200)
    what = f"Not ready: {'; '.join(words)}." if told else "Not ready."
    raise overloaded(what, gateway.limits.retry_after_seconds, code="not_ready")


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


def _one_for_each_engine(models: dict[str, ServedModel]) -> list[ServedModel]:
    return list({id(model.client): model for model in models.values()}.values())
