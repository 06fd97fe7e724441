"""The OpenAPI document, built from the very structs that parse requests and form replies."""

from typing import Any

import msgspec

from engine.server.http.auth import PUBLIC_PATHS
from engine.server.http.errors import ErrorReply
from engine.server.openai import replies as r
from engine.server.openai import schema as s
from engine.server.openai.refused_fields import HARMLESS

_REF = "#/components/schemas/{name}"

# path -> (method, summary, request, reply, stream event, statuses of errors)
_GENERATING = (400, 408, 413, 415, 429, 500, 503)
_Route = tuple[str, str, Any, Any, Any, tuple[int, ...]]
_ROUTES: dict[str, _Route] = {
    "/v1/chat/completions": ("post", "Answer a conversation", s.ChatRequest, r.ChatCompletion, r.ChatCompletionChunk,
                             (404, *_GENERATING)),
    "/v1/completions": ("post", "Continue a text", s.CompletionRequest, r.Completion, r.Completion,
                        (404, *_GENERATING)),
    "/v1/models": ("get", "List the served models", None, r.ModelList, None, ()),
    "/v1/models/{id}": ("get", "One served model", None, r.ModelCard, None, (404,)),
    "/tokenize": ("post", "Token ids of a text or a conversation", s.TokenizeRequest, r.TokenizeReply, None,
                  (400, 404, 408, 413, 415, 503)),
    "/detokenize": ("post", "Text of token ids", s.DetokenizeRequest, r.DetokenizeReply, None,
                    (400, 404, 408, 413, 415)),
    "/health": ("get", "200 when tokens can be served", None, None, None, (503,)),
    "/livez": ("get", "200 while the gateway answers", None, r.StatusReply, None, ()),
    "/version": ("get", "Version of the server", None, r.VersionReply, None, ()),
    "/metrics": ("get", "Prometheus metrics", None, str, None, ()),
}
_MEANING = {
    400: "The request is not valid", 401: "The API key is missing or not valid",
    403: "The API key lacks a scope", 404: "No such model",
    408: "The body did not arrive in time", 413: "The body is too large", 415: "The body is not JSON",
    429: "The key's share is used up", 500: "The server failed", 503: "Loading, overloaded or restarting",
}


def openapi_document(version: str, *, authenticated: bool) -> dict[str, Any]:
    types = [t for route in _ROUTES.values() for t in route[2:5] if t not in (None, str)] + [ErrorReply]
    _, components = msgspec.json.schema_components(types, ref_template=_REF)
    for request in ("ChatRequest", "CompletionRequest"):
        components[request]["properties"] |= {
            name: {"description": f"Accepted without effect: {why}."} for name, why in HARMLESS.items()}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Atoll", "version": version or "0", "description": "An OpenAI-compatible LLM endpoint."},
        "paths": {path: {route[0]: _operation(path, route, authenticated)} for path, route in _ROUTES.items()},
        "components": {"schemas": components},
    }
    if authenticated:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _operation(path: str, route: _Route, authenticated: bool) -> dict[str, Any]:
    method, summary, request, reply, event, errors = route
    locked = authenticated and path not in PUBLIC_PATHS
    statuses: set[int] = {*errors, 401, 403} if locked else {*errors}
    operation: dict[str, Any] = {
        "summary": summary,
        "operationId": f"{method}_{path.strip('/').replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": {"200": _reply(reply, event)}
        | {
            str(status): {"description": _MEANING[status], "content": _json(ErrorReply)}
            for status in sorted(statuses)
        },
    }
    if request is not None:
        operation["requestBody"] = {"required": True, "content": _json(request)}
    if "{id}" in path:
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if locked:
        operation["security"] = [{"key": []}]
    return operation


def _reply(reply: Any, event: Any) -> dict[str, Any]:
    if reply is None:
        return {"description": "Ready; no body"}
    if reply is str:
        return {"description": "Text", "content": {"text/plain": {"schema": {"type": "string"}}}}
    content = _json(reply)
    if event is not None:
        content["text/event-stream"] = {
            "schema": {  # of one event
                "type": "object",
                "properties": {
                    "event": {"type": "string"},
                    "data": {"anyOf": [
                        {"const": "[DONE]", "description": "The last event."},
                        {
                            "type": "string",
                            "contentMediaType": "application/json",
                            "contentSchema": {"anyOf": [
                                {"$ref": _REF.format(name=kind.__name__)} for kind in (event, ErrorReply)
                            ]},
                        },
                    ]},
                },
                "required": ["data"],
            },
        }
    return {"description": "The answer", "content": content}


def _json(kind: Any) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}
