"""Models and replicas come and go while a real gateway serves: whoever is not concerned notices nothing."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from site_kit import READY_SECONDS, Site, until

REPLICA = '[models.one-b]\nreplica-of = "one"\n'


class LiveSite(Site):
    """With the gateway's admin socket."""

    def __init__(self, directory: Path, models: dict[str, Path]) -> None:
        super().__init__(directory, models)
        self.admin = directory / "admin.sock"
        self.first = self.config.read_text()

    def ask(self, method: str, target: str) -> dict[str, Any]:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.admin)), timeout=20) as client:
            return client.request(method, f"http://gateway{target}").raise_for_status().json()

    def reload(self, more: str = "", *, whole: str | None = None, drain: float = 60) -> dict[str, Any]:
        """Change the settings and have them read; returns what the gateway says once they are in force."""
        self.config.write_text(self.first + more if whole is None else whole)
        wanted = self.ask("POST", f"/models/reload?drain={drain}")["reload"]
        until(lambda: self.ask("GET", "/models")["done"] >= wanted, 30, self.gateway)
        return self.ask("GET", "/models")

    def names(self) -> list[str]:
        return [card["id"] for card in httpx.get(f"{self.url}/v1/models").json()["data"]]

    def ready(self) -> list[str]:
        return [row["engine"] for row in self.ask("GET", "/models")["engines"] if row["state"] == "ready"]


@pytest.fixture
def site(tmp_path: Path, tiny_llama_dir: Callable[..., Path]) -> Iterator[LiveSite]:
    """A gateway whose one model serves."""
    site = LiveSite(tmp_path, {"one": tiny_llama_dir("gqa", max_position_embeddings=8192)})
    try:
        site.start_gateway(env=os.environ | {"ATOLL_ADMIN_SOCKET": str(site.admin)})
        site.start_engine("one")
        until(lambda: site.health("one") == 200, READY_SECONDS, site.engines["one"])
        yield site
    finally:
        site.stop()


@contextmanager
def held_stream(site: LiveSite, model: str, engine: str) -> Iterator[Iterator[str]]:
    """A stream of a real answer, held in its middle until the block ends or the engine goes on."""
    body = {"model": model, "prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{site.url}/v1/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        assert "error" not in next(lines)
        site.engines[engine].send_signal(signal.SIGSTOP)
        try:
            yield lines
        finally:
            site.engines[engine].send_signal(signal.SIGCONT)


def rest(lines: Iterator[str]) -> str:
    """How a stream ends: its finish reason, or its error."""
    *_, last, done = lines
    if done != "data: [DONE]":
        return last + done
    told = json.loads(last.removeprefix("data: "))
    return told["error"]["message"] if "error" in told else told["choices"][0]["finish_reason"]


def test_a_model_comes_and_goes_while_another_streams(site: LiveSite, tiny_llama_dir: Callable[..., Path]):
    two = f'[models.two]\nmodel = "{tiny_llama_dir("gqa", max_position_embeddings=8192)}"\n'
    assert site.names() == ["one"]
    assert site.complete("two").status_code == 404
    with held_stream(site, "one", "one") as lines:
        assert site.reload(two)["errors"] == {}
        assert site.names() == ["one", "two"]
        assert site.complete("two").json()["error"]["code"] == "model_loading"
        assert site.complete(None).status_code == 400, "there are two now"
        site.engines["one"].send_signal(signal.SIGCONT)
        assert rest(lines) == "length"
    site.start_engine("two")
    until(lambda: site.health() == 200, READY_SECONDS, site.engines["two"])
    assert site.complete("two").json()["model"] == "two"
    assert 'atoll:engine_up{engine="0",model_name="two"} 1.0' in httpx.get(f"{site.url}/metrics").text

    with held_stream(site, "one", "one") as lines, held_stream(site, "two", "two") as going:
        told = site.reload()
        assert told["draining"] == {"two": 1}
        assert site.complete("two").status_code == 404
        assert site.names() == ["one"]
        assert "atoll:engine_up" in httpx.get(f"{site.url}/metrics").text
        assert 'atoll:engine_up{engine="0",model_name="two"}' not in httpx.get(f"{site.url}/metrics").text
        for engine in ("one", "two"):
            site.engines[engine].send_signal(signal.SIGCONT)
        assert rest(going) == "length", "it may finish"
        assert rest(lines) == "length"
    until(lambda: site.ask("GET", "/models")["draining"] == {}, 20)
    assert site.health() == 200
    site.reload(two)
    until(lambda: site.complete("two").status_code == 200, 20, site.engines["two"])


def test_a_drain_has_an_end(site: LiveSite):
    site.reload(REPLICA)
    site.start_engine("one-b")
    until(lambda: len(site.ready()) == 2, READY_SECONDS, site.engines["one-b"])
    with held_stream(site, "one", "one"), held_stream(site, "one", "one-b") as lines:
        assert site.reload(drain=0.5)["engines"][0]["engine"] == "one"
        assert "It was removed from this server." in rest(lines)
    assert site.complete("one").status_code == 200


def test_a_replica_comes_and_goes(site: LiveSite):
    site.reload(REPLICA)
    site.start_engine("one-b")
    until(lambda: len(site.ready()) == 2, READY_SECONDS, site.engines["one-b"])
    assert [row["number"] for row in site.ask("GET", "/models")["engines"]] == [0, 1]
    assert site.names() == ["one"]
    with held_stream(site, "one", "one"), held_stream(site, "one", "one-b") as lines:
        assert site.reload()["draining"] == {"one-b": 1}
        site.engines["one-b"].send_signal(signal.SIGCONT)
        assert rest(lines) == "length"
    site.engines["one-b"].kill()
    site.engines["one-b"].wait()
    assert [site.complete("one").status_code for _ in range(4)] == [200] * 4


def test_what_cannot_be_read_changes_nothing(site: LiveSite):
    assert "Expected" in site.reload(whole="[gateway\n")["errors"][""]
    assert "names no model" in site.reload(whole="[gateway]\n")["errors"][""]
    assert site.complete("one").status_code == 200
    moved = site.first.replace('model = "', 'model = "/nowhere')
    assert "one" in site.reload(whole=moved)["errors"]
    assert site.complete("one").status_code == 200, "it stays as it is"
    assert site.reload('[models.bad]\nmodel = "/nowhere"\n')["errors"].keys() == {"bad"}
    assert site.complete("bad").json()["error"]["code"] == "model_unavailable"
    assert site.complete("one").status_code == 200
    assert site.reload()["errors"] == {}
    assert site.complete("bad").status_code == 404
