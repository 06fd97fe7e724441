"""Active requests: who waits and who runs by the engine's own word, never what was asked; and keys take turns."""

import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from gateways import RunningServer, ask, engine_process, keys_of

from engine.server.gateway.main_loop import listen_locally
from engine.server.http import local_socket
from engine.server.http.limits import Limits
from engine.server.ipc.client import EngineClient
from engine.server.observe.active import ActiveRow
from engine.server.openai.serving import ServedModel

MARKER = "Sphinx-of-black-quartz"


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One request runs at a time."""
    directory = tiny_llama_dir("gqa")
    keys = keys_of(tmp_path_factory.mktemp("keys") / "keys.json", "alice", "bob")
    with engine_process(directory, "--served-model-name", "tiny", "--max-num-seqs", "1") as socket:
        model = ServedModel.load("tiny", directory, EngineClient(socket))
        server = RunningServer({"tiny": model}, limits=Limits(), auth=keys)
        server.wait_ready()
        yield server
        server.stop()


def until(server: RunningServer, true: Callable[[list[ActiveRow]], bool]) -> list[ActiveRow]:
    deadline = time.monotonic() + 30
    while not true(rows := server.gateway.active.listing(100).requests):
        assert time.monotonic() < deadline, rows
        time.sleep(0.002)
    return rows


def test_who_runs_and_who_waits(server: RunningServer) -> None:
    first = ask(server, "alice", "the-first", 400, prompt=MARKER)
    until(server, lambda rows: bool(rows) and rows[0].output_tokens > 3)
    second = ask(server, "bob", "the-second", 400, prompt=MARKER, n=2)
    rows = until(server, lambda rows: len(rows) == 3)
    assert [(row.request_id, row.key, row.state, row.model) for row in rows] == [
        ("the-first", "alice", "running", "tiny"), ("the-second", "bob", "waiting", "tiny"),
        ("the-second", "bob", "waiting", "tiny")]
    assert len({row.id for row in rows}) == 3
    assert rows[0].prompt_tokens > 0
    assert rows[0].output_tokens > 3
    assert rows[1].output_tokens == 0
    assert rows[0].age_seconds > rows[1].age_seconds >= 0
    listing = server.gateway.active.listing(2)
    assert (len(listing.requests), listing.total) == (2, 3), "the oldest, and how many there are"
    assert MARKER not in str(listing)
    rows = until(server, lambda rows: len(rows) == 2 and "running" in {row.state for row in rows})
    assert sorted(row.state for row in rows) == ["running", "waiting"]
    for thread in (first, second):
        thread.join()
    server.wait_idle()
    assert server.gateway.active.listing(100).total == 0


def test_a_client_that_leaves_is_no_longer_listed(server: RunningServer) -> None:
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body,
                      headers={"Authorization": "Bearer sk-bob"}) as reply:
        received = reply.iter_lines()  # (a generator that nobody holds closes the connection)
        next(received)
        assert server.gateway.active.listing(100).total == 1
    until(server, lambda rows: not rows)


def test_one_key_with_500_requests_does_not_starve_anothers_first(server: RunningServer) -> None:
    many = ask(server, "alice", "many", 4, prompt=[[i % 300 + 5] * 4 for i in range(500)])
    until(server, lambda rows: (len(rows) > 50 and rows[0].output_tokens > 0) or len(rows) > 400)
    ask(server, "bob", "one", 4).join()
    left = server.gateway.active.listing(0).total
    assert left > 300, f"alice has {left} of 500 left when bob is served"
    many.join()
    server.wait_idle()


async def test_the_sockets_and_their_rights(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {local_socket.ADMIN: tmp_path / "admin.sock", local_socket.METRICS: tmp_path / "metrics.sock"}
    for which, path in paths.items():
        monkeypatch.setenv(which.variable, str(path))
    opened = await listen_locally(server.gateway)
    try:
        for which, path in paths.items():
            found = path.lstat()
            assert stat.S_ISSOCK(found.st_mode)
            assert stat.S_IMODE(found.st_mode) == which.mode
            assert (found.st_uid, found.st_gid) == (tmp_path.stat().st_uid, tmp_path.stat().st_gid)
        transport = httpx.AsyncHTTPTransport(uds=str(paths[local_socket.ADMIN]))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/requests")).json() == {"requests": [], "total": 0}
            assert (await client.post("/requests")).status_code == 404
            assert (await client.get("/metrics")).status_code == 404
        transport = httpx.AsyncHTTPTransport(uds=str(paths[local_socket.METRICS]))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert "vllm:" in (await client.get("/metrics")).text
            assert (await client.get("/requests")).status_code == 404, "the sampler does not see who asks"
    finally:
        for each in opened:
            each.close()


async def test_no_socket_where_anybody_could_replace_it(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").write_text("precious")
    for path in (tmp_path / "open/admin.sock", tmp_path / "file", tmp_path / "missing/admin.sock"):
        monkeypatch.setenv(local_socket.ADMIN.variable, str(path))
        assert await listen_locally(server.gateway) == []
    assert (tmp_path / "file").read_text() == "precious"


def test_a_key_has_its_share_of_the_queue(tiny_llama_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory, keys = tiny_llama_dir("gqa"), keys_of(tmp_path / "keys.json", "alice", "bob")
    with engine_process(directory, "--max-num-seqs", "2") as socket:
        model = ServedModel.load("tiny", directory, EngineClient(socket))
        server = RunningServer({"tiny": model}, limits=Limits(max_waiting_per_key=2), auth=keys)
        try:
            server.wait_ready()
            running = ask(server, "bob", "bobs", 450, n=2)
            until(server, lambda rows: len(rows) == 2 and all(row.output_tokens for row in rows))
            waiting = [ask(server, "alice", f"alices-{i}", 3) for i in range(2)]
            until(server, lambda rows: [row.state for row in rows if row.key == "alice"] == ["waiting"] * 2
                  and server.client.stats.num_waiting == 2)
            body, headers = {"prompt": "a", "max_tokens": 2}, {"Authorization": "Bearer sk-alice"}
            refused = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert int(refused.headers["retry-after"]) > 0
            bobs = ask(server, "bob", "another", 2)  # the share is alice's alone
            for thread in (running, *waiting, bobs):
                thread.join()
            assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
            text = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer sk-bob"}).text
            assert 'reason="key_waiting"} 1.0' in text
        finally:
            server.stop()
