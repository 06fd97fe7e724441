"""The scopes of API keys, as dependencies of routes. The middleware has already identified the caller."""

from typing import Any

from fastapi import Security
from fastapi.openapi.models import HTTPBearer
from fastapi.security import SecurityScopes
from fastapi.security.base import SecurityBase
from starlette.requests import Request

from engine.server.access.caller import Caller
from engine.server.http.documented import error_responses
from engine.server.http.errors import ApiError


def caller_of(request: Request) -> Caller:
    return request.scope["caller"]


class KeyScopes(SecurityBase):
    """The key must have every scope that the route names."""

    model = HTTPBearer()
    scheme_name = "key"

    async def __call__(self, request: Request, needed: SecurityScopes) -> None:
        key = caller_of(request).key
        for scope in needed.scopes:
            if key is None or not key.allows(scope):
                raise ApiError(403, f"This API key lacks the scope {scope!r}.", type="permission_error",
                               code="insufficient_scope")


_KEY_SCOPES = KeyScopes()


def needs_key(scope: str) -> dict[str, Any]:
    """Keywords of `include_router` for routes that a key with this scope opens."""
    return {"dependencies": [Security(_KEY_SCOPES, scopes=[scope])], "responses": error_responses(401, 403)}
