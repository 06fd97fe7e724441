"""`atoll gateway` and `atoll engine` as real processes: two models behind one endpoint, each healthy by itself."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from ports import free_port
from site_kit import READY_SECONDS, Site, until

KEY, DIGEST = "a", "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Callable[..., Path]) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"), {"one": tiny_llama_dir("gqa"), "two": tiny_llama_dir("mha")})
    try:
        site.start_gateway()
        yield site
    finally:
        site.stop()


@pytest.fixture
def other(tmp_path: Path, tiny_llama_dir: Callable[..., Path]) -> Iterator[Site]:
    """A site of which nothing runs yet."""
    site = Site(tmp_path, {"one": tiny_llama_dir("gqa")})
    yield site
    site.stop()


def test_requests_go_to_the_model_they_name(site: Site):
    assert httpx.get(f"{site.url}/livez").status_code == 200  # before any engine is there
    assert (site.health(), site.health("one")) == (503, 503)
    early = site.complete("one")
    assert (early.status_code, early.headers["retry-after"]) == (503, "5")
    site.start_engine("one")
    until(lambda: site.health("one") == 200, READY_SECONDS, site.engines["one"])
    assert (site.health(), site.health("two")) == (503, 503)
    assert site.complete("one").json()["model"] == "one"
    assert site.complete("two").status_code == 503
    site.start_engine("two")
    until(lambda: site.health() == 200, READY_SECONDS, site.engines["two"])
    assert site.complete("two").json()["model"] == "two"
    cards = httpx.get(f"{site.url}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["one", "two"]
    assert site.complete("three").status_code == 404
    assert site.complete(None).status_code == 400  # with two of them, a request must say which
    assert site.health("three") == 404
    metrics = httpx.get(f"{site.url}/metrics").text
    assert 'atoll:engine_up{engine="0",model_name="one"} 1.0' in metrics
    assert 'atoll:engine_up{engine="0",model_name="two"} 1.0' in metrics


def test_a_lost_engine_is_one_models_503_until_it_is_back(site: Site):
    site.engines["two"].kill()
    site.engines["two"].wait()
    until(lambda: site.health("two") == 503, 5)
    lost = site.complete("two")
    assert (lost.status_code, lost.headers["retry-after"]) == (503, "5")
    assert lost.json()["error"]["code"] == "engine_unavailable"
    assert site.complete("one").status_code == 200
    site.start_engine("two")
    until(lambda: site.health("two") == 200, READY_SECONDS, site.engines["two"])
    assert site.complete("two").status_code == 200
    assert 'atoll:engine_restarts_total{engine="0",model_name="two"} 1.0' in httpx.get(f"{site.url}/metrics").text


def test_one_bad_model_spares_the_other(other: Site, tmp_path: Path):
    broken = tmp_path / "broken"
    broken.mkdir()
    with other.config.open("a") as file:
        file.write(f'[models.broken]\nmodel = "{broken}"\n')
        file.write(f'[models.twin]\nmodel = "{broken}"\nserved-model-name = "one"\n')
    other.start_gateway()
    assert "broken is not served" in other.log("gateway")
    assert "'one' of another model" in other.log("gateway")
    assert [card["id"] for card in httpx.get(f"{other.url}/v1/models").json()["data"]] == ["one"]
    refused = other.complete("broken")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
    assert "broken: not served" in httpx.get(f"{other.url}/health").text


def test_without_a_model_that_can_be_served_it_ends(other: Site, tmp_path: Path):
    other.config.write_text(f"[gateway]\nport = {free_port()}\n")
    assert other.spawn("gateway", "gateway", "--config", str(other.config)).wait(30) == 2
    assert "names no model" in other.log("gateway")
    other.config.write_text(f'[models.x]\nmodel = "{tmp_path / "nothing"}"\n')
    assert other.spawn("gateway", "gateway", "--config", str(other.config)).wait(30) == 11


def test_an_open_address_takes_tls_and_keys(other: Site):
    words = ["gateway", "--config", str(other.config), "--host", "0.0.0.0"]
    assert other.spawn("gateway", *words).wait(30) == 2
    assert "requires TLS and API keys" in other.log("gateway")


def test_it_serves_on_the_socket_that_systemd_opened(other: Site):
    """And clients that come while it restarts wait in the socket's queue."""
    listener = socket.create_server(("127.0.0.1", 0))
    port, notify = listener.getsockname()[1], other.directory / "notify"
    with listener, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(notify))
        told.settimeout(10)
        script = f'exec 3<&{listener.fileno()}; export LISTEN_PID=$$ LISTEN_FDS=1; exec "$0" "$@"'
        words = ["bash", "-c", script, sys.executable, "-m", "appliance.cli", "gateway", "--config", str(other.config),
                 "--engines", str(other.directory / "engine")]  # fmt: skip
        environment = os.environ | {"NOTIFY_SOCKET": str(notify), "WATCHDOG_USEC": "4000000"}
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port)) as early:  # before there is anybody to answer
                early.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                with (other.directory / "gateway.log").open("ab") as log:
                    process = subprocess.Popen(words, env=environment, pass_fds=[listener.fileno()], stdout=log,
                                               stderr=log)  # fmt: skip
                early.settimeout(30)
                assert early.recv(4096).startswith(b"HTTP/1.1 200")
            said = ""
            with contextlib.suppress(TimeoutError):
                while "WATCHDOG=1" not in said:
                    said += told.recv(4096).decode() + "\n"
            assert "READY=1\nSTATUS=one not running" in said
            assert "WATCHDOG=1" in said
            process.terminate()
            assert process.wait(20) == 0
            while "STOPPING=1" not in told.recv(4096).decode():
                pass


def test_keys_of_a_reload_hold_at_once(other: Site):
    start, published = other.directory / "keys.json", other.directory / "published"
    start.write_text(json.dumps({"keys": [{"id": "1", "sha256": DIGEST}]}))
    published.mkdir()
    other.start_gateway("--api-key-file", str(start), "--credentials", str(published))
    assert other.complete("one", Authorization=f"Bearer {KEY}").status_code == 503  # admitted; no engine runs
    (published / "api-keys.json").write_text('{"keys": []}')
    assert other.complete("one", Authorization=f"Bearer {KEY}").status_code == 401
    assert other.gateway is not None
    other.gateway.send_signal(signal.SIGHUP)
    until(lambda: "reloaded certificate and keys" in other.log("gateway"), 10, other.gateway)
    assert other.complete("one", Authorization=f"Bearer {KEY}").status_code == 401
