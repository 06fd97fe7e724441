"""Spans of requests as a real collector gets them: who, what, how long, how many tokens; never what was said."""

import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateways import RunningServer

from engine.errors import ConfigError
from engine.server.http.limits import Limits
from engine.server.ipc.client import EngineClient
from engine.server.observe.tracing import parent_of
from engine.server.openai.serving import ServedModel
from engine.server.settings.commands import parse_serve

SECRET = "Sphinx-of-black-quartz"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class _UnixServer(socketserver.UnixStreamServer):
    server_name, server_port = "collector", 0

    def get_request(self) -> Any:
        request, _ = super().get_request()
        return request, ("unix", 0)


class Collector:
    """Of OTLP/HTTP with JSON bodies."""

    def __init__(self, path: Path | None = None) -> None:
        self.bodies: list[bytes] = []
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                assert self.headers["Content-Type"] == "application/json"
                collector.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(collector.status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler) if path is None else _UnixServer(str(path), Handler)
        self.url = f"unix://{path}" if path else f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def spans(self) -> list[dict[str, Any]]:
        return [span for body in self.bodies for resource in json.loads(body)["resourceSpans"]
                for scope in resource["scopeSpans"] for span in scope["spans"]]

    def wait(self, count: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + 30
        while len(self.spans) < count:
            assert time.monotonic() < deadline, self.bodies
            time.sleep(0.05)
        return self.spans

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(params=["tcp", "unix"])
def collector(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Collector]:
    made = Collector(tmp_path / "collector.sock" if request.param == "unix" else None)
    yield made
    made.close()


@pytest.fixture
def start(tiny_engine: tuple[Path, Path]) -> Iterator[Callable[[str], RunningServer]]:
    running: list[RunningServer] = []

    def start(endpoint: str) -> RunningServer:
        uds, directory = tiny_engine
        model = ServedModel.load("tiny", directory, EngineClient(uds))
        running.append(RunningServer({"tiny": model}, limits=Limits(), traces_endpoint=endpoint))
        running[-1].wait_ready()
        return running[-1]

    yield start
    for server in running:
        server.stop()


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    def value(found: dict[str, Any]) -> Any:
        (kind, content), = found.items()
        if kind == "arrayValue":
            return [value(item) for item in content["values"]]
        return int(content) if kind == "intValue" else content

    return {entry["key"]: value(entry["value"]) for entry in span["attributes"]}


def ask(server: RunningServer, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", timeout=60, json={
        "messages": [{"role": "user", "content": SECRET}], "max_tokens": 4, "ignore_eos": True, "temperature": 0,
        **fields}, headers={"traceparent": f"00-{TRACE}-{SPAN}-01", "X-Request-Id": "r-7"})


def test_a_span_for_each_request_and_no_word_of_it(start: Callable[[str], RunningServer], collector: Collector) -> None:
    server, before = start(collector.url), time.time_ns()
    answers = [ask(server), ask(server, stream=True, n=2), ask(server, temperature=-1)]
    httpx.post(f"{server.url}/v1/embeddings", json={"input": [SECRET, "b"]}, timeout=60).raise_for_status()
    httpx.get(f"{server.url}/health")
    plain, streamed, refused, embedded = collector.wait(4)
    assert (plain["traceId"], plain["parentSpanId"], plain["kind"]) == (TRACE, SPAN, 2)
    assert before <= int(plain["startTimeUnixNano"]) < int(plain["endTimeUnixNano"]) <= time.time_ns()
    assert plain["name"] == "chat tiny"
    found = attributes(plain)
    usage = answers[0].json()["usage"]
    assert {name: found[name] for name in (
        "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.usage.input_tokens",
        "gen_ai.usage.output_tokens", "gen_ai.response.finish_reasons", "http.response.status_code", "atoll.request_id",
        "server.port")} == {
            "gen_ai.operation.name": "chat", "gen_ai.provider.name": "atoll", "gen_ai.request.model": "tiny",
            "gen_ai.usage.input_tokens": usage["prompt_tokens"], "gen_ai.usage.output_tokens": 4,
            "gen_ai.response.finish_reasons": ["length"], "http.response.status_code": 200, "atoll.request_id": "r-7",
            "server.port": server.port}
    assert 0 < found["gen_ai.response.time_to_first_chunk"] < 60
    assert attributes(streamed)["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert attributes(streamed)["gen_ai.usage.output_tokens"] == 8
    assert attributes(refused)["error.type"] == "400"
    assert "status" not in refused, "the client's fault, not ours"
    assert attributes(embedded)["gen_ai.operation.name"] == "embeddings"
    assert attributes(embedded)["gen_ai.usage.input_tokens"] > 2
    assert "parentSpanId" not in embedded
    assert len({span["spanId"] for span in collector.spans}) == 4
    everything = b"".join(collector.bodies).decode()
    assert SECRET not in everything
    assert answers[0].json()["choices"][0]["message"]["content"][:6] not in everything
    assert 'atoll:trace_spans_total{result="sent"} 4.0' in httpx.get(f"{server.url}/metrics").text


def test_a_client_that_leaves_is_an_error(start: Callable[[str], RunningServer], collector: Collector) -> None:
    server = start(collector.url)
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
        received = reply.iter_lines()
        next(received)
    span, = collector.wait(1)
    assert attributes(span)["error.type"] == "incomplete"
    assert span["status"] == {"code": 2}


@pytest.mark.parametrize("end", ["nobody listens", "it says 500", "it is silent"])
def test_a_collector_that_is_away_costs_a_counter(
    start: Callable[[str], RunningServer], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr("engine.server.observe.tracing.SEND_SECONDS", 0.5)
    collector = Collector()
    collector.status = 500
    silent = socket.create_server(("127.0.0.1", 0))
    url = {"it says 500": collector.url, "it is silent": f"http://127.0.0.1:{silent.getsockname()[1]}"}.get(end)
    if url is None:
        collector.close()
        url = collector.url
    server = start(url)
    try:
        for _ in range(3):
            assert ask(server).status_code == 200
        deadline = time.monotonic() + 30
        while 'atoll:trace_spans_total{result="dropped"} 3.0' not in httpx.get(f"{server.url}/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        silent.close()


@pytest.mark.parametrize("header, sampled", [
    (f"00-{TRACE}-{SPAN}-01", True), (f"00-{TRACE}-{SPAN}-00", False), (f"01-{TRACE}-{SPAN}-03-later", True),
    (f"ff-{TRACE}-{SPAN}-01", None), (f"00-{TRACE}-{SPAN}-01-x", None), (f"00-{'0' * 32}-{SPAN}-01", None),
    (f"00-{TRACE}-{'0' * 16}-01", None), (f"00-{TRACE.upper()}-{SPAN}-01", None), ("", None), ("x" * 5000, None),
])  # fmt: skip
def test_traceparent(header: str, sampled: bool | None) -> None:
    found = parent_of(header)
    assert (found.sampled if found else None) == sampled


@pytest.mark.parametrize("url, fine", [
    ("http://collector.lan:4318/v1/traces", True), ("https://[fd00::1]:4318", True), ("unix:///run/c.sock", True),
    ("collector:4317", False), ("grpc://c:4317", False), ("http://user:word@c/", False), ("http://c/?token=x", False),
    ("http://c:99999/", False), ("unix://run/c.sock", False), ("http://c/a b", False),
])  # fmt: skip
def test_where_spans_may_go(url: str, fine: bool, tmp_path: Path) -> None:
    line = [str(tmp_path), "--device", "cpu", "--otlp-traces-endpoint", url]
    if fine:
        assert parse_serve(line).otlp_traces_endpoint == url
        return
    with pytest.raises(ConfigError, match="URL of a collector"):
        parse_serve(line)
