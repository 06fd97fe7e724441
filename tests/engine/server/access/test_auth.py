"""API keys: who is admitted, when the file changes, and that every path but the probes is locked."""
# ruff: noqa: E501 - tables are easier to check one row a line

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from gateways import RunningServer
from key_file import KEY, entry, write

from engine.errors import ConfigError
from engine.server.access.auth import PUBLIC_PATHS, KeyFile, bearer_token
from engine.server.gateway.app import ROUTES
from engine.server.http.limits import Limits
from engine.server.ipc.client import EngineClient
from engine.server.openai.serving import ServedModel


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_only_the_whole_key_is_admitted(path: Path) -> None:
    write(path, entry(KEY), entry("sk-other"))
    keys = KeyFile(path)
    found = keys.check(KEY)
    assert found is not None
    assert found.name == "team"
    for wrong in ("", KEY[:-1], KEY + "a", KEY.upper(), "sk-", entry(KEY)["sha256"], "x" * 10_000, "sk-\x00", "ключ"):
        assert keys.check(wrong) is None


def test_revoked_and_expired_keys_are_not_admitted(path: Path) -> None:
    now = time.time()
    write(
        path,
        entry("sk-revoked", revoked=True),
        entry("sk-past", expires=now - 1),
        entry("sk-future", expires=now + 60),
        entry("sk-iso-past", expires="2020-01-01T00:00:00Z"),
        entry("sk-iso-future", expires="2999-01-01"),
        entry("sk-never", expires=None),
    )
    keys = KeyFile(path)
    admitted = [k for k in ("revoked", "past", "future", "iso-past", "iso-future", "never") if keys.check(f"sk-{k}")]
    assert admitted == ["future", "iso-future", "never"]


def test_changes_take_effect_at_once(path: Path) -> None:
    write(path, entry(KEY))
    keys = KeyFile(path)
    assert keys.check(KEY)
    write(path, entry(KEY, revoked=True), entry("sk-new"))
    assert not keys.check(KEY)
    assert keys.check("sk-new")


def test_a_broken_change_keeps_the_last_good_keys_and_a_missing_file_admits_nobody(path: Path) -> None:
    write(path, entry(KEY))
    keys = KeyFile(path)
    path.write_text('{"keys": [')
    assert keys.check(KEY)
    path.unlink()
    assert not keys.check(KEY)
    write(path, entry(KEY))
    assert keys.check(KEY)


@pytest.mark.parametrize("content", [
    "", "[]", "{}", '{"keys": {}}', '{"keys": [1]}', '{"keys": [{"id": "a"}]}', '{"keys": [{"sha256": "zz"}]}',
    '{"keys": [{"sha256": "%s", "revoked": "no"}]}' % ("a" * 64), '{"keys": [{"sha256": "%s", "expires": "soon"}]}' % ("a" * 64),
])  # fmt: skip
def test_a_file_that_is_wrong_at_the_start_is_refused(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"keys\.json"):
        KeyFile(path)


def test_a_missing_file_is_refused_at_the_start(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\.json"):
        KeyFile(path)


@pytest.mark.parametrize("header, token", [
    ("Bearer sk-1", "sk-1"), ("bearer  sk-1 ", "sk-1"), ("Basic sk-1", ""), ("sk-1", ""), ("", ""), (None, ""),
])  # fmt: skip
def test_bearer_tokens(header: str | None, token: str) -> None:
    assert bearer_token(header) == token


@pytest.fixture
def locked(tiny_engine: tuple[Path, Path], path: Path) -> Iterator[RunningServer]:
    write(path, entry(KEY))
    socket, directory = tiny_engine
    model = ServedModel.load("tiny", directory, EngineClient(socket))
    server = RunningServer({"tiny": model}, limits=Limits(max_in_flight_per_key=1), auth=KeyFile(path))
    server.wait_ready()
    yield server
    server.stop()


def test_health_names_models_only_to_who_has_a_key(path: Path, tmp_path: Path, tiny_engine: tuple[Path, Path]) -> None:
    write(path, entry(KEY))
    nobody = EngineClient(tmp_path / "no-engine.sock")
    server = RunningServer({"secret-model": ServedModel.load("secret-model", tiny_engine[1], nobody)}, limits=Limits(),
                           auth=KeyFile(path))
    try:
        def ask(name: str = "", key: str = "") -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return httpx.get(f"{server.url}/health", params={"model": name} if name else {}, headers=headers)

        for stranger in (ask(), ask(key="sk-wrong")):
            assert stranger.status_code == 503
            assert stranger.json()["error"]["message"] == "Not ready."
        assert ask("secret-model").json() == ask("another").json(), "nor can names be tried out"
        assert "secret-model" in ask(key=KEY).text
        assert ask("another", key=KEY).status_code == 404
    finally:
        server.stop()


def test_every_path_but_the_probes_needs_a_key(locked: RunningServer) -> None:
    paths = {path.replace("{id}", "tiny") for path in ROUTES} | {
        "/nothing",
        "/redoc",
        "/v1",
        "//health",
        "/HEALTH",
    }
    for path in sorted(paths):
        reply = httpx.get(f"{locked.url}{path}")
        if path in PUBLIC_PATHS:
            assert reply.status_code == 200
            continue
        assert reply.status_code == 401, path
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.json()["error"]["code"] == "invalid_api_key"
    assert httpx.post(f"{locked.url}/v1/completions", content=b"{").status_code == 401, "the key comes first"


def test_the_openai_client_with_and_without_its_key(locked: RunningServer) -> None:
    good = openai.OpenAI(base_url=f"{locked.url}/v1", api_key=KEY, max_retries=0, _strict_response_validation=True)
    assert good.completions.create(model="tiny", prompt="a", max_tokens=2).usage
    bad = openai.OpenAI(base_url=f"{locked.url}/v1", api_key="sk-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as caught:
        bad.models.list()
    assert caught.value.code == "invalid_api_key"
    assert caught.value.type == "authentication_error"


def test_a_key_has_its_share(locked: RunningServer) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"{locked.url}/v1/completions"
    # Each takes a second or more of work and all arrive at once: one runs, the others find the key's share taken.
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "n": 32}
    with httpx.Client(timeout=120) as http, ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: http.post(url, json=body, headers=headers), range(4)))
    assert {reply.status_code for reply in replies} == {200, 429}
    refused = next(reply for reply in replies if reply.status_code == 429)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(refused.headers["retry-after"]) > 0
    locked.wait_idle()
    assert httpx.post(url, json={"prompt": "a", "max_tokens": 2}, headers=headers).status_code == 200
