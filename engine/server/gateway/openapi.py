"""The OpenAPI document: paths from the routes, schemas from the structs that parse requests and form replies."""

from collections.abc import Sequence
from typing import Any

from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

from engine.server.http.documented import schemas
from engine.server.openai.request.refused_fields import HARMLESS


def openapi_document(routes: Sequence[BaseRoute], version: str) -> dict[str, Any]:
    document = get_openapi(
        title="Atoll", version=version or "0", description="An OpenAI-compatible LLM endpoint.", routes=routes)
    components = schemas()
    for request in ("ChatRequest", "CompletionRequest"):
        components[request]["properties"] |= {
            name: {"description": f"Accepted without effect: {why}."} for name, why in HARMLESS.items()}
    document.setdefault("components", {})["schemas"] = components
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own; what cannot be read is a 400 here
    return document
