"""The OpenAPI document is truthful: requests generated from it get only replies that it declares."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from gateways import RunningServer
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from engine.server.access.auth import KeyFile
from engine.server.gateway.app import create_app
from engine.server.ipc.client import EngineClient
from engine.server.openai.serving import ServedModel

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


def document_of(auth: KeyFile | None = None) -> dict:
    nothing: Any = None
    return create_app({"m": ServedModel("m", EngineClient("/nowhere"), nothing)}, auth=auth).openapi()


schema = schemathesis.openapi.from_dict(document_of())


@schema.parametrize()
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_replies_are_those_declared(case: schemathesis.Case, tiny_server: RunningServer) -> None:
    if isinstance(case.body, dict):  # keep answers short: the subject is the surface
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(case.body.get(name), int) and not isinstance(case.body[name], bool):
                case.body[name] = min(case.body[name], 4)
        for subject, limit in (("messages", "max_tokens"), ("input", "max_output_tokens")):
            if subject in case.body and case.body.get(limit) is None:
                case.body[limit] = 4
        if isinstance(case.body.get("model"), str) and len(case.body["model"]) % 2:
            case.body["model"] = "tiny"
    case.call_and_validate(base_url=tiny_server.url, checks=list(CHECKS))


def test_the_document_is_served_and_names_every_route(tiny_server: RunningServer) -> None:
    document = httpx.get(f"{tiny_server.url}/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/models", "/v1/models/{id}",
        "/tokenize", "/detokenize", "/tokenizer_info",
        "/health", "/livez", "/version", "/metrics",
    }  # fmt: skip
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert set(chat["responses"]) == {"200", "400", "404", "408", "413", "415", "429", "500", "503"}
    assert "text/event-stream" in chat["responses"]["200"]["content"]


def test_with_keys_the_document_declares_401_and_the_scheme(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text('{"keys": []}')
    document = document_of(KeyFile(tmp_path / "keys"))
    assert document["paths"]["/v1/models"]["get"]["security"] == [{"key": ["serve"]}]
    assert document["paths"]["/metrics"]["get"]["security"] == [{"key": ["metrics"]}]
    assert "401" in document["paths"]["/v1/models"]["get"]["responses"]
    assert "401" not in document["paths"]["/health"]["get"]["responses"]
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


@pytest.mark.parametrize("module", ["torch", "transformers", "numpy"])
def test_the_gateway_does_not_import(module: str) -> None:
    """Ready in seconds, and small: the gateway holds no tensor library and no second schema library."""
    import subprocess
    import sys

    program = f"import sys; from engine.server.gateway import app, http_server; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[4], check=False).returncode == 0
