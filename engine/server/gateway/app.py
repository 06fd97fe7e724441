"""The gateway as one ASGI application."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from engine.errors import AtollError
from engine.server.access.auth import KeyFile
from engine.server.access.scopes import needs_key
from engine.server.gateway import health
from engine.server.gateway.docs_page import HEADERS, docs_page
from engine.server.gateway.middleware import Authentication, HeadAsGet, RequestContext
from engine.server.gateway.openapi import openapi_document
from engine.server.http.errors import ApiError, from_exception, invalid, shortened
from engine.server.http.limits import Limits
from engine.server.observe.metrics import Metrics
from engine.server.observe.tracing import Exporter, Tracing
from engine.server.openai import completions, embeddings, models
from engine.server.openai.chat import endpoint as chat
from engine.server.openai.responses import endpoint as responses
from engine.server.openai.serving import Gateway, ServedModel

# Each family of routes, and the scope that a key needs for it; None: open to everybody.
_FAMILIES: tuple[tuple[APIRouter, str | None], ...] = (
    (chat.router, "serve"),
    (completions.router, "serve"),
    (responses.router, "serve"),
    (embeddings.router, "serve"),
    (models.models_router, "serve"),
    (models.text_router, "serve"),
    (health.scraped, "metrics"),
    (health.probes, None),
)
OPENAPI_PATH = "/openapi.json"
DOCS_PATH = "/docs"
ROUTES = {OPENAPI_PATH, DOCS_PATH} | {
    route.path_format for router, _ in _FAMILIES for route in router.routes if isinstance(route, APIRoute)}


def create_app(
    models: dict[str, ServedModel],
    *,
    auth: KeyFile | None = None,
    limits: Limits | None = None,
    metrics: Metrics | None = None,
    allowed_origins: Sequence[str] = (),
    broken: Mapping[str, str] | None = None,
    traces_endpoint: str = "",
) -> FastAPI:
    """The application that serves `models` (every name a client may use, aliases included).

    With `auth` None, anyone who can connect may use it. The application's lifespan starts and closes the engines'
    clients. Browsers on other origins are refused unless listed in `allowed_origins`. `broken`: models that are
    configured but cannot be served, and why. `traces_endpoint`: where request spans are sent; "" for nowhere.
    """
    limits = limits or Limits()
    metrics = metrics or Metrics({name: model.replicas for name, model in models.items()})
    gateway = Gateway(models, limits=limits, metrics=metrics, keys=auth, version=package_version(),
                      broken=broken)

    exporter = None
    if traces_endpoint:
        exporter = Exporter(traces_endpoint, version=gateway.version, registry=metrics.registry)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        try:
            yield
        finally:
            await gateway.close()
            if exporter is not None:
                await asyncio.to_thread(exporter.close)

    middleware = [Middleware(RequestContext, metrics=metrics, route_of=_template_of)]
    if exporter is not None:
        middleware.insert(0, Middleware(Tracing, exporter=exporter))
    if allowed_origins:  # before authentication: a preflight request carries no key
        middleware.append(Middleware(
            CORSMiddleware, allow_origins=list(allowed_origins), allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        ))
    if auth is not None:
        middleware.append(Middleware(Authentication, keys=auth))
    middleware.append(Middleware(HeadAsGet))
    app = FastAPI(
        title="Atoll",
        version=gateway.version or "0",
        openapi_url=OPENAPI_PATH,
        docs_url=None,  # FastAPI's pages load scripts from a CDN; ours is in docs_page.py
        redoc_url=None,
        redirect_slashes=False,
        default_response_class=Response,
        generate_unique_id_function=_operation_id,
        exception_handlers={
            ApiError: _error, AtollError: _error, HTTPException: _http_error, RequestValidationError: _bad_parameter},
        middleware=middleware,
        lifespan=lifespan,
    )
    for router, scope in _FAMILIES:
        app.include_router(router, **(needs_key(scope) if scope is not None and auth is not None else {}))
    app.add_api_route(DOCS_PATH, _docs, include_in_schema=False)
    app.openapi = cache(partial(openapi_document, app.routes, gateway.version))  # type: ignore[method-assign]
    app.state.gateway = gateway
    return app


def package_version() -> str:
    try:
        return installed_version("atoll")
    except PackageNotFoundError:  # a bare checkout
        return "0"


async def _docs(request: Request) -> Response:
    return HTMLResponse(docs_page(request.app.openapi()), headers=HEADERS)


async def _error(request: Request, error: Exception) -> Response:
    return from_exception(error).response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    """The reply for Starlette's own 404 (unknown route) and 405 (wrong method)."""
    what = f"{request.method} {shortened(request.url.path)}"
    headers: Any = dict(error.headers or {})
    message = {
        404: f"There is no {what}; {_remedy(request.url.path)}",
        405: f"{what} is not allowed; send {headers.get('Allow', 'another method')}.",
    }.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=headers).response()


def _remedy(path: str) -> str:
    """The rest of the sentence about an unknown path. Most such requests come from a base URL without /v1, or with more
    behind it."""
    bare = path.rstrip("/")
    near = [route for route in ROUTES if bare.endswith(route.removeprefix("/v1"))]
    if not near:
        return f"{DOCS_PATH} lists what there is."
    found = max(near, key=len)
    return f"did you mean {found}?" + (" The base URL of a client ends in /v1." if found.startswith("/v1/") else "")


async def _bad_parameter(request: Request, error: RequestValidationError) -> Response:
    """The reply for a path or query parameter that cannot be parsed."""
    first = error.errors()[0]
    return invalid(f"{shortened(str(first['loc'][-1]))}: {shortened(str(first['msg']))}.").response()


def _operation_id(route: APIRoute) -> str:
    method = next(iter(route.methods or ("get",))).lower()
    return f"{method}_{re.sub(r'[/{}]+', '_', route.path_format).strip('_')}"


def _template_of(path: str) -> str | None:
    """The route template of a path, for metric labels; None for unknown paths."""
    if path in ROUTES:
        return path
    return "/v1/models/{id}" if path.startswith("/v1/models/") else None
