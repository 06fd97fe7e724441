"""Two engines that answer under one name, behind a real gateway: one is killed, and the other goes on."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from site_kit import READY_SECONDS, Site, until

REPLICA = '[models.one-b]\nreplica-of = "one"\n'


@pytest.fixture
def site(tmp_path: Path, tiny_llama_dir: Callable[..., Path]) -> Iterator[Site]:
    site = Site(tmp_path, {"one": tiny_llama_dir("gqa", max_position_embeddings=8192)}, REPLICA)
    try:
        site.start_gateway()
        yield site
    finally:
        site.stop()


def up(site: Site, number: int) -> bool:
    return f'atoll:engine_up{{engine="{number}",model_name="one"}} 1.0' in metrics(site)


def metrics(site: Site) -> str:
    return httpx.get(f"{site.url}/metrics").text


def finished(site: Site) -> dict[int, float]:
    """Requests that ended well, by engine."""
    name = 'vllm:request_success_total{{engine="{}",finished_reason="length",model_name="one"}} '
    return {number: float(metrics(site).split(name.format(number))[1].split()[0]) for number in (0, 1)}


def stream(site: Site, client: httpx.Client, tokens: int = 6000) -> Iterator[str]:
    body = {"model": "one", "prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with client.stream("POST", f"{site.url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        yield from (line for line in response.iter_lines() if line)


def test_replicas_share_one_name_and_one_may_die(site: Site):
    site.start_engine("one-b")
    until(lambda: site.health("one") == 200, READY_SECONDS, site.engines["one-b"])
    assert not up(site, 0)
    assert site.complete("one").status_code == 200, "one of them is enough"
    site.start_engine("one")
    until(lambda: up(site, 0), READY_SECONDS, site.engines["one"])
    assert [card["id"] for card in httpx.get(f"{site.url}/v1/models").json()["data"]] == ["one"]
    assert site.complete("one-b").status_code == 404, "a replica has no name of its own"
    assert site.complete(None).status_code == 200, "there is one model, so a request need not name it"
    for _ in range(4):
        site.complete("one")
    assert min(finished(site).values()) >= 2, finished(site)

    with httpx.Client() as first, httpx.Client() as second:
        answers = [stream(site, first), stream(site, second)]
        for answer in answers:
            assert "error" not in next(answer)
        site.engines["one"].kill()
        site.engines["one"].wait()
        until(lambda: not up(site, 0), 10)
        assert [site.complete("one").status_code for _ in range(3)] == [200] * 3
        ends = sorted(list(answer)[-2:] for answer in answers)
    lost, whole = ends if "error" in ends[0][-2] + ends[0][-1] else reversed(ends)
    assert "The engine stopped while it worked on this request" in "".join(lost)
    assert json.loads(whole[0].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert whole[1] == "data: [DONE]"
    assert site.health("one") == 200
    assert "one down; one-b ready" in site.log("gateway")

    site.engines["one-b"].kill()
    site.engines["one-b"].wait()
    until(lambda: site.health("one") == 503, 10)
    refused = site.complete("one")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")


def test_a_replica_takes_its_models_settings(site: Site):
    with site.config.open("a") as file:
        file.write('[models.bad]\nreplica-of = "nothing"\n[models.worse]\nreplica-of = "one"\nmodel = "/elsewhere"\n')
    check = site.spawn("check", "gateway", "--config", str(site.config), "--check")
    assert check.wait(60) == 11
    assert "a replica of nothing, which is no model of its own" in site.log("check")
    assert "[models.worse] is a replica, so its model is that of [models.one]" in site.log("check")
