"""Describes routes in the OpenAPI document, from the msgspec types that parse requests and form replies.

FastAPI generates the document from the routes, but it only knows pydantic's types. So bodies and replies are described
here.
"""

from typing import Any

import msgspec

from engine.server.http.errors import ErrorReply

_REF = "#/components/schemas/{name}"
_MEANING = {
    400: "The request is not valid", 401: "The API key is missing or not valid",
    403: "The API key lacks a scope", 404: "No such model",
    408: "The body did not arrive in time", 413: "The body is too large", 415: "The body is not JSON",
    422: "The engine died twice of this very request",
    429: "The key's share is used up", 500: "The server failed", 503: "Loading, overloaded or restarting",
}
_types: dict[str, type] = {"ErrorReply": ErrorReply}

READ = (400, 408, 413, 415)  # errors of reading a JSON body


def documented(
    summary: str, *, body: type | None = None, reply: type | None = None, event: type | None = None,
    errors: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Keywords for a route's decorator. `reply` None: no body; str: plain text. `event`: the type of a stream's
    events."""
    _types.update({kind.__name__: kind for kind in (body, reply, event) if kind not in (None, str)})  # type: ignore[union-attr]
    keywords: dict[str, Any] = {
        "summary": summary,
        "responses": {200: _reply(reply, event), **error_responses(*errors)},
    }
    if body is not None:
        keywords["openapi_extra"] = {"requestBody": {"required": True, "content": _json(body)}}
    return keywords


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"description": _MEANING[status], "content": _json(ErrorReply)} for status in statuses}


def schemas() -> dict[str, Any]:
    """The components of the document: every type that a route names."""
    _, components = msgspec.json.schema_components(_types.values(), ref_template=_REF)
    return components


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
