"""What one key learns of another: nothing by the prefix cache, by priorities, or by the errors of a shared step."""

import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from gateways import RunningServer, engine_process
from test_openai_stream import CHAT, application, post

from engine.core.request import EngineRequest, FinishReason, StepOutput
from engine.server.access.auth import KeyFile
from engine.server.http.limits import Limits
from engine.server.ipc.client import EngineClient
from engine.server.openai.serving import ServedModel
from engine.text.tokenizer import TextTokenizer

LONG = 64  # tokens of a prompt: several pages

KEYS: dict[str, dict] = {
    "sk-old": {},                                                # as files were before scopes and groups
    "sk-a": {"scopes": ["serve"]},
    "sk-b": {"scopes": ["serve"], "group": None},
    "sk-team-1": {"scopes": ["serve"], "group": "team"},
    "sk-team-2": {"scopes": ["serve"], "group": "team"},
    "sk-first": {"scopes": ["serve", "priority"]},
    "sk-admin": {"scopes": ["admin"]},
}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    entries = [{"id": f"k{i}", "sha256": hashlib.sha256(key.encode()).hexdigest(), **fields}
               for i, (key, fields) in enumerate(KEYS.items())]
    path.write_text(json.dumps({"keys": entries}))
    return path


@pytest.fixture(scope="module")
def start(tiny_engine: tuple[Path, Path], key_file: Path) -> Iterator[Callable[..., RunningServer]]:
    """Starts gateways, with keys, in front of one engine."""
    running: list[RunningServer] = []

    def start(**limits: bool) -> RunningServer:
        socket, directory = tiny_engine
        model = ServedModel.load("tiny", directory, EngineClient(socket))
        running.append(RunningServer({"tiny": model}, limits=Limits(**limits), auth=KeyFile(key_file)))
        running[-1].wait_ready()
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture(scope="module")
def server(start: Callable[..., RunningServer]) -> RunningServer:
    return start()


def complete(server: RunningServer, key: str, **fields: object) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": 2, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def cached(server: RunningServer, key: str, prompt: list[int], **fields: object) -> int:
    reply = complete(server, key, prompt=prompt, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def some_prompt() -> list[int]:
    return [secrets.randbelow(300) + 5 for _ in range(LONG)]


# -- the prefix cache


def test_no_key_finds_what_another_key_asked(server: RunningServer) -> None:
    prompt = some_prompt()
    assert cached(server, "sk-a", prompt) == 0
    assert cached(server, "sk-a", prompt) > 0, "its own prompt it finds"
    for other in KEYS.keys() - {"sk-a", "sk-team-2"}:  # which finds what sk-team-1 asked
        assert cached(server, other, prompt) == 0, other


def test_keys_of_one_group_share(server: RunningServer) -> None:
    prompt = some_prompt()
    assert cached(server, "sk-team-1", prompt) == 0
    assert cached(server, "sk-team-2", prompt) > 0
    assert cached(server, "sk-b", prompt) == 0


def test_no_salt_of_a_request_names_another_tenant(server: RunningServer) -> None:
    prompt = some_prompt()
    assert cached(server, "sk-team-1", prompt) == 0
    digest = hashlib.sha256(b"sk-team-1").hexdigest()
    for salt in ("team", "group team", "group team\0", f"key {digest}", "k3", "k3\n",
                 server.gateway.tenant_salt("group team", "")):
        assert cached(server, "sk-b", prompt, cache_salt=salt) == 0, salt


def test_a_salt_divides_what_a_group_shares(server: RunningServer) -> None:
    prompt = some_prompt()
    assert cached(server, "sk-team-1", prompt, cache_salt="x") == 0
    assert cached(server, "sk-team-2", prompt, cache_salt="y") == 0
    assert cached(server, "sk-team-2", prompt, cache_salt="x") > 0


def test_a_setting_has_all_keys_share(start: Callable[..., RunningServer]) -> None:
    shared, prompt = start(isolate_prefix_cache=False), some_prompt()
    assert cached(shared, "sk-a", prompt) == 0
    assert cached(shared, "sk-b", prompt) > 0


def test_without_keys_everybody_shares(tiny_server: RunningServer) -> None:
    prompt = some_prompt()
    assert cached(tiny_server, "none", prompt) == 0
    assert cached(tiny_server, "none", prompt) > 0
    assert cached(tiny_server, "none", prompt, cache_salt="x") == 0


def test_who_asks_does_not_change_the_answer(server: RunningServer) -> None:
    asked = {"prompt": some_prompt(), "max_tokens": 20, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    texts = {complete(server, key, **asked).json()["choices"][0]["text"] for key in KEYS}
    assert len(texts) == 1


def test_a_request_id_is_only_a_word_for_the_log(server: RunningServer) -> None:
    """Whoever sends the id of another tenant's request, and leaves, ends its own request only."""
    def ask(key: str, **fields: object) -> dict:
        return {"method": "POST", "url": f"{server.url}/v1/completions", "timeout": 60,
                "headers": {"Authorization": f"Bearer {key}", "X-Request-Id": "same"},
                "json": {"prompt": "a", "ignore_eos": True, "stream": True, **fields}}

    with httpx.stream(**ask("sk-a", max_tokens=300)) as stream:
        lines = stream.iter_lines()
        next(lines)
        with httpx.stream(**ask("sk-b", max_tokens=400)) as other:
            next(other.iter_lines())
        rest = list(lines)
    assert '"finish_reason":"length"' in "".join(rest)
    assert rest[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("group", [3, ["x"], "a\nb", "\ud800", "x" * 65])
def test_a_group_that_is_none_makes_the_file_unusable(tmp_path: Path, group: object) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"sha256": "a" * 64, "group": group}]}))
    with pytest.raises(Exception, match="group must have at most 64 printable characters"):
        KeyFile(path)


# -- priorities


@pytest.mark.parametrize("path, rest", [("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
                                        ("completions", {"prompt": "a"})])
@pytest.mark.parametrize("priority", [-1, 1])
def test_priority_needs_its_scope(server: RunningServer, path: str, rest: dict, priority: int) -> None:
    for key in ("sk-old", "sk-a", "sk-team-1"):
        reply = httpx.post(f"{server.url}/v1/{path}", json={**rest, "priority": priority},
                           headers={"Authorization": f"Bearer {key}"})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (403, "priority", "insufficient_scope")
        assert "'priority'" in error["message"]
    assert complete(server, "sk-a", priority=0).status_code == 200
    assert complete(server, "sk-a", priority=None).status_code == 200


def test_priority_is_refused_where_the_engine_would_ignore_it(server: RunningServer) -> None:
    for key in ("sk-first", "sk-admin"):
        reply = complete(server, key, priority=-1)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "priority"), reply.text
        assert "--scheduling-policy" in reply.json()["error"]["message"]


def test_priority_reaches_an_engine_that_heeds_it(tiny_engine: tuple[Path, Path], key_file: Path) -> None:
    _, directory = tiny_engine
    with engine_process(directory, "--served-model-name", "tiny", "--scheduling-policy", "priority") as socket:
        model = ServedModel.load("tiny", directory, EngineClient(socket))
        server = RunningServer({"tiny": model}, limits=Limits(), auth=KeyFile(key_file))
        try:
            server.wait_ready()
            assert complete(server, "sk-first", priority=-1).status_code == 200
            assert complete(server, "sk-admin", priority=-1).status_code == 200
            assert complete(server, "sk-a", priority=-1).status_code == 403
        finally:
            server.stop()


# -- what a failed step says


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failed_step_says_nothing_of_others(smol_tokenizer: TextTokenizer, stream: bool, caplog) -> None:
    async def script(request: EngineRequest) -> AsyncIterator[StepOutput]:
        if stream:
            yield StepOutput(request.request_id, [5])
        yield StepOutput(request.request_id, finish_reason=FinishReason.ERROR,
                         error="KeyError: 'request-of-another-tenant'")

    app, _ = application(smol_tokenizer, script)
    _, raw = await post(app, "/v1/chat/completions", CHAT | {"stream": stream})
    assert b"The engine failed on this request" in raw
    assert b"another-tenant" not in raw
    assert "request-of-another-tenant" in caplog.text, "the operator reads it in the log"
