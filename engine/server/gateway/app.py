"""The gateway as one ASGI application."""

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.errors import AtollError
from engine.server.gateway import health
from engine.server.http.auth import KeyFile
from engine.server.http.errors import ApiError, from_exception, shortened
from engine.server.http.limits import Limits
from engine.server.http.metrics import Metrics
from engine.server.http.middleware import Authentication, RequestContext
from engine.server.openai import chat, completions, models
from engine.server.openai.serving import Gateway, ServedModel

ROUTES = [
    Route("/v1/chat/completions", chat.chat_completions, methods=["POST"]),
    Route("/v1/completions", completions.completions, methods=["POST"]),
    Route("/v1/models", models.list_models, methods=["GET"]),
    Route("/v1/models/{id:path}", models.get_model, methods=["GET"]),  # ids may contain slashes
    Route("/tokenize", models.tokenize, methods=["POST"]),
    Route("/detokenize", models.detokenize, methods=["POST"]),
    Route("/health", health.health, methods=["GET"]),
    Route("/livez", health.livez, methods=["GET"]),
    Route("/version", health.version, methods=["GET"]),
    Route("/metrics", health.metrics, methods=["GET"]),
    Route("/openapi.json", health.openapi, methods=["GET"]),
]
_TEMPLATES = {route.path: re.sub(r":\w+\}", "}", route.path) for route in ROUTES}


def create_app(
    models: dict[str, ServedModel],
    *,
    auth: KeyFile | None = None,
    limits: Limits | None = None,
    metrics: Metrics | None = None,
    allowed_origins: Sequence[str] = (),
    broken: Mapping[str, str] | None = None,
) -> FastAPI:
    """The application that serves `models` (every name a client may use, aliases included).

    `auth` None means that anyone who can connect may use it. Its lifespan starts and closes the engines' clients.
    Browsers of other origins are refused unless listed in `allowed_origins`. `broken` names models that should be here
    and cannot be served, and why.
    """
    limits = limits or Limits()
    metrics = metrics or Metrics({name: model.client for name, model in models.items()})
    gateway = Gateway(models, limits=limits, metrics=metrics, keys=auth, version=package_version(),
                      broken=broken)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        try:
            yield
        finally:
            await gateway.close()

    middleware = [Middleware(RequestContext, metrics=metrics, route_of=_template_of)]
    if allowed_origins:  # before authentication: a preflight request carries no key
        middleware.append(Middleware(
            CORSMiddleware, allow_origins=list(allowed_origins), allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        ))
    if auth is not None:
        middleware.append(Middleware(Authentication, keys=auth))
    # Requests and replies are msgspec structs, and the OpenAPI document is made from them: FastAPI's own schema and
    # documentation pages (which load scripts from a CDN) stay off.
    app = FastAPI(
        title="Atoll",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        routes=list(ROUTES),
        middleware=middleware,
        exception_handlers={ApiError: _error, AtollError: _error, HTTPException: _http_error},  # type: ignore[dict-item]
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    return app


def package_version() -> str:
    try:
        return installed_version("atoll")
    except PackageNotFoundError:  # a bare checkout
        return "0"


async def _error(request: Request, error: Exception) -> Response:
    return from_exception(error).response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Starlette's own 404 (unknown route) and 405 (wrong method)."""
    what = f"{request.method} {shortened(request.url.path)}"
    message = {404: f"There is no {what}.", 405: f"{what} is not allowed."}.get(error.status_code, str(error.detail))
    headers: Any = dict(error.headers or {})
    return ApiError(error.status_code, message, headers=headers).response()


def _template_of(path: str) -> str | None:
    """The route template of a path, for metric labels; None for paths that are nobody's."""
    if path in _TEMPLATES:
        return path
    return "/v1/models/{id}" if path.startswith("/v1/models/") else None
