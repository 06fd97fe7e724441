"""`/docs`: the OpenAPI document as one HTML page, for a browser without the Internet.

FastAPI's own pages load scripts from a CDN. This one has no script, and loads nothing else.
"""

from collections.abc import Iterator
from html import escape
from typing import Any

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}
_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font-family: ui-monospace, monospace; font-size: .9em }
pre { padding: .8rem; border: 1px solid #8886; border-radius: 6px; overflow-x: auto; white-space: pre-wrap }
summary { cursor: pointer; padding: .3rem 0 } summary b { display: inline-block; min-width: 3.5rem }
table { border-collapse: collapse; margin: .5rem 0 1rem } td, th { text-align: left; padding: .15rem 1rem .15rem 0 }
tr { border-bottom: 1px solid #8884; vertical-align: top }
"""
_EXAMPLE = """curl -N $URL/v1/chat/completions \\
  -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" \\
  -d '{"model": "NAME", "messages": [{"role": "user", "content": "Hello!"}], "stream": true}'"""


def docs_page(document: dict[str, Any]) -> str:
    """The HTML page for a document of `openapi_document`."""
    info, schemas = document["info"], document["components"]["schemas"]
    families: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            families.setdefault(operation["tags"][0], []).append(_operation(method, path, operation, schemas))
    sections = "".join(f"<h2>{escape(tag)}</h2>{''.join(parts)}" for tag, parts in families.items())
    title = escape(f"{info['title']} {info['version']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"</head><body><h1>{title}</h1><p>{escape(info['description'])} The same for programs: "
        f'<a href="openapi.json">openapi.json</a>. GET /v1/models lists the names of the models.</p>'
        f"<pre>{escape(_EXAMPLE)}</pre>{sections}</body></html>")


def _operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    parts = [f"<p>{escape(text)}</p>" for text in operation.get("description", "").split("\n\n") if text]
    if "security" in operation:
        scopes = ", ".join(scope for needed in operation["security"] for scope in needed["key"])
        parts.append(f"<p>Needs an API key with the scope <code>{escape(scopes)}</code>.</p>")
    parts += [f"<p><code>{escape(parameter['name'])}</code> in the {escape(parameter['in'])}.</p>"
              for parameter in operation.get("parameters", ())]
    if body := operation.get("requestBody"):
        parts.append(_fields("Request", _schema_of(body), schemas))
    for status, reply in operation["responses"].items():
        schema = _schema_of(reply) if "content" in reply else {}
        if status == "200" and "$ref" in schema:
            parts.append(_fields("Reply", schema, schemas))
    errors = [f"<tr><td>{escape(status)}</td><td>{escape(reply['description'])}</td></tr>"
              for status, reply in operation["responses"].items() if status != "200"]
    if errors:
        parts.append(f"<table><tr><th>Status</th><th>Meaning</th></tr>{''.join(errors)}</table>")
    return (f"<details><summary><b>{escape(method.upper())}</b> <code>{escape(path)}</code> "
            f"{escape(operation['summary'])}</summary>{''.join(parts)}</details>")


def _fields(title: str, schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    resolved = schemas[_name_of(schema)]
    required = set(resolved.get("required", ()))
    rows = []
    for name, field in resolved["properties"].items():
        notes = field.get("description", "required" if name in required else "")
        types = escape(" or ".join(dict.fromkeys(_types(field))))
        rows.append(f"<tr><td><code>{escape(name)}</code></td><td>{types}</td><td>{escape(notes)}</td></tr>")
    return f"<table><tr><th>{title}</th><th>Type</th><th></th></tr>{''.join(rows)}</table>"


def _types(field: dict[str, Any]) -> Iterator[str]:
    """The types that a schema allows, in plain words; null is left out."""
    if "$ref" in field:
        yield _name_of(field)
    for branch in field.get("anyOf", ()):
        yield from _types(branch)
    if "enum" in field:
        yield from (f'"{value}"' for value in field["enum"] if value is not None)
    elif field.get("type") == "array":
        yield f"list of {' or '.join(_types(field.get('items', {}))) or 'anything'}"
    elif (kind := field.get("type")) not in (None, "null"):
        yield str(kind)


def _schema_of(described: dict[str, Any]) -> dict[str, Any]:
    return next(iter(described["content"].values()))["schema"]


def _name_of(schema: dict[str, Any]) -> str:
    return schema["$ref"].rpartition("/")[2]
