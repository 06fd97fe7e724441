"""A gateway that drains refuses new requests, lets running ones end, and takes requests again when it is told to."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gateways import RunningServer

from engine.server.gateway.main_loop import listen_locally
from engine.server.http import local_socket
from engine.server.http.limits import Limits
from engine.server.ipc.client import EngineClient
from engine.server.openai.serving import ServedModel


@pytest.fixture(scope="module")
def server(tiny_engine: tuple[Path, Path]) -> Iterator[RunningServer]:
    socket, directory = tiny_engine
    server = RunningServer({"tiny": ServedModel.load("tiny", directory, EngineClient(socket))}, limits=Limits())
    server.wait_ready()
    yield server
    server.stop()


async def test_new_requests_are_refused_and_running_ones_end(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(local_socket.ADMIN.variable, str(tmp_path / "admin.sock"))
    opened = await listen_locally(server.gateway)
    transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "admin.sock"))
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    try:
        async with (httpx.AsyncClient(transport=transport, base_url="http://admin") as admin,
                    httpx.AsyncClient(base_url=server.url, timeout=60) as client):
            assert (await admin.get("/drain")).json() == {"draining": False, "in_flight": 0}
            async with client.stream("POST", "/v1/completions", json=body) as running:
                received = running.aiter_lines()
                await anext(received)
                assert (await admin.post("/drain")).json() == {"draining": True, "in_flight": 1}
                for path, asked in (("/v1/completions", {"prompt": "a"}),
                                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})):
                    refused = await client.post(path, json=asked)
                    assert refused.status_code == 503
                    assert refused.json()["error"]["code"] == "draining"
                    assert int(refused.headers["Retry-After"]) > 0
                assert (await client.get("/health")).status_code == 503
                assert (await client.get("/livez")).status_code == 200
                assert [line async for line in received if line][-1] == "data: [DONE]", "it ends as if nothing were"
            server.wait_idle()
            assert (await admin.get("/drain")).json() == {"draining": True, "in_flight": 0}
            page = server.gateway.metrics.render()[0].decode()
            assert [line for line in page.splitlines() if 'reason="draining"' in line and line.endswith(" 2.0")]
            assert (await admin.delete("/drain")).json()["draining"] is False
            assert (await client.get("/health")).status_code == 200
            assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).status_code == 200
    finally:
        for each in opened:
            each.close()
