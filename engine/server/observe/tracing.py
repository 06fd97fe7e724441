"""OpenTelemetry spans of requests, sent by OTLP/HTTP as JSON to a collector of the local network. Off unless asked for.

A span says which model answered, how long it took and how many tokens it was, under the GenAI conventions
(https://github.com/open-telemetry/semantic-conventions-genai); never what was asked or answered, and no header but
`traceparent`. A span is put into a queue and a thread sends it: no request ever waits for the collector. If that is
slow or away, spans are dropped and counted.

OpenTelemetry's own SDK would bring ten packages into every medium; what is needed of it is this file.
"""

import http.client
import json
import logging
import queue
import re
import secrets
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("atoll.tracing")

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/completions": "text_completion",
              "/v1/embeddings": "embeddings"}
MAX_QUEUED = 2048
MAX_BATCH = 256
BATCH_SECONDS = 1.0       # a span waits at most so long for others
SEND_SECONDS = 5.0
CLOSE_SECONDS = 2.0       # for what is queued at the end
QUIET_SECONDS = 300.0     # between two lines of the log about a collector that is away

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SERVER, _ERROR = 2, 2    # OTLP's numbers of a span's kind and status


@dataclass(frozen=True, slots=True)
class Parent:
    """What a client's `traceparent` says."""

    trace: str
    span: str
    sampled: bool


def parent_of(header: str) -> Parent | None:
    """None unless `header` is a valid W3C traceparent."""
    match = _TRACEPARENT.fullmatch(header.strip())
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    if not int(match[2], 16) or not int(match[3], 16):
        return None
    return Parent(match[2], match[3], bool(int(match[4], 16) & 1))


@dataclass(slots=True)
class Span:
    """One request. Times are Unix time in nanoseconds."""

    name: str
    trace: str
    start: int
    parent: str = ""
    end: int = 0
    failed: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "traceId": self.trace, "spanId": secrets.token_hex(8), "name": self.name, "kind": _SERVER,
            "startTimeUnixNano": str(self.start), "endTimeUnixNano": str(self.end),
            "attributes": [{"key": key, "value": _value(value)} for key, value in self.attributes.items()]}
        if self.parent:
            found["parentSpanId"] = self.parent
        if self.failed:
            found["status"] = {"code": _ERROR}
        return found


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": value}


class Exporter:
    """Sends spans in batches, from a thread of its own."""

    def __init__(self, endpoint: str, *, version: str = "", registry: CollectorRegistry | None = None) -> None:
        """`endpoint`: a URL that `engine.server.settings.values.is_collector` accepts."""
        self._endpoint = endpoint
        self._resource = {"attributes": [{"key": key, "value": _value(value)} for key, value in (
            ("service.name", "atoll"), ("service.version", version)) if value]}
        self._queue: queue.Queue[Span | None] = queue.Queue(MAX_QUEUED)
        self._spans = Counter("atoll:trace_spans", "Spans of requests: sent to the collector, or dropped.", ["result"],
                              registry=registry)
        for result in ("sent", "dropped"):
            self._spans.labels(result)
        self._complained = 0.0
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def put(self, span: Span) -> None:
        """Never waits."""
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self._spans.labels("dropped").inc()

    def close(self) -> None:
        """Send what is queued, for a moment."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        last = False
        while not last:
            batch = [self._queue.get()]
            deadline = time.monotonic() + BATCH_SECONDS
            while batch[-1] is not None and len(batch) < MAX_BATCH:
                try:
                    batch.append(self._queue.get(timeout=max(0.0, deadline - time.monotonic())))
                except queue.Empty:
                    break
            last = batch[-1] is None
            if spans := [span for span in batch if span is not None]:
                self._send(spans)

    def _send(self, spans: list[Span]) -> None:
        try:
            body = json.dumps({"resourceSpans": [{"resource": self._resource, "scopeSpans": [
                {"scope": {"name": "atoll"}, "spans": [span.to_json() for span in spans]}]}]}).encode()
            connection, path = _connection(self._endpoint)
            try:
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                reply = connection.getresponse()
                reply.read(1 << 16)
            finally:
                connection.close()
            if reply.status >= 300:
                raise OSError(f"it answers {reply.status}")
        except (OSError, http.client.HTTPException) as error:
            self._spans.labels("dropped").inc(len(spans))
            if time.monotonic() > self._complained:
                self._complained = time.monotonic() + QUIET_SECONDS
                log.warning("spans are dropped: the collector cannot be reached: %s", error)
        else:
            self._spans.labels("sent").inc(len(spans))


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=SEND_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(SEND_SECONDS)
        self.sock.connect(self._path)


def _connection(endpoint: str) -> tuple[http.client.HTTPConnection, str]:
    url = urlsplit(endpoint)
    if url.scheme == "unix":
        return _UnixConnection(url.path), "/v1/traces"
    path = url.path if url.path.strip("/") else "/v1/traces"
    if url.scheme == "https":
        return http.client.HTTPSConnection(
            url.hostname or "", url.port, timeout=SEND_SECONDS, context=ssl.create_default_context()), path
    return http.client.HTTPConnection(url.hostname or "", url.port, timeout=SEND_SECONDS), path


class Tracing:
    """Pure ASGI, around `RequestContext`: a span for each request to a generating endpoint."""

    def __init__(self, app: ASGIApp, exporter: Exporter) -> None:
        self._app, self._exporter = app, exporter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = OPERATIONS.get(scope.get("path", "")) if scope["type"] == "http" else None
        parent = parent_of(_header(scope, b"traceparent")) if operation else None
        if operation is None or (parent is not None and not parent.sampled):
            await self._app(scope, receive, send)
            return
        span = Span(operation, parent.trace if parent else secrets.token_hex(16), time.time_ns(),
                    parent.span if parent else "")
        began, status, complete = time.monotonic(), 0, False

        async def watched(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            span.end = span.start + round((time.monotonic() - began) * 1e9)
            _describe(span, operation, scope, status, complete, began)
            self._exporter.put(span)


def _describe(span: Span, operation: str, scope: Scope, status: int, complete: bool, began: float) -> None:
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation, "gen_ai.provider.name": "atoll", "http.request.method": scope["method"],
        "url.path": scope["path"]}
    if status:
        found["http.response.status_code"] = status
    if server := scope.get("server"):
        found["server.address"] = str(server[0])
        if server[1] is not None:
            found["server.port"] = int(server[1])
    caller = scope.get("caller")
    if caller is not None:
        found["atoll.request_id"] = caller.request_id
        if caller.key_id:
            found["atoll.key_id"] = caller.key_id
    if caller is not None and (work := caller.work) is not None:
        span.name = f"{operation} {work.model}"
        found |= {"gen_ai.request.model": work.model, "gen_ai.response.model": work.model,
                  "gen_ai.usage.input_tokens": work.prompt_tokens, "gen_ai.usage.output_tokens": work.output_tokens,
                  "gen_ai.usage.cache_read.input_tokens": work.cached_tokens}
        if work.finish_reasons:
            found["gen_ai.response.finish_reasons"] = list(work.finish_reasons)
        if work.first_token_at is not None:
            found["gen_ai.response.time_to_first_chunk"] = round(work.first_token_at - began, 6)
    if status >= 400:
        found["error.type"] = str(status)
    elif not complete:
        found["error.type"] = "incomplete"  # the client left, or the answer broke off
    span.failed = status >= 500 or not complete
    span.attributes = found


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
