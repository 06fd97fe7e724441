"""`atoll batch`: against a real service that runs a real (tiny) model, and against endpoints that misbehave."""

import json
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import listening_port

from appliance.service.batch.answer_file import AnswerFile, line_of
from appliance.service.batch.limits import MOST_ID_CHARACTERS
from appliance.service.batch.request_file import check
from installer.base.errors import ExitCode, InstallError

sys.path.insert(0, str(Path(__file__).parents[2] / "load"))
from endpoints import Conversation, Endpoint, good

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def url(tiny_llama_dir: Callable[..., Path]) -> Iterator[str]:
    command = [sys.executable, "-m", "appliance", "serve", str(tiny_llama_dir("gqa")), "--port", "0",
               "--served-model-name", "tiny", "--kv-cache-memory-bytes", "64000000", "--device", "cpu"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{listening_port(process)}"
        deadline = time.monotonic() + 90
        while True:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=20)


def start(*words: object, **settings: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "appliance", "batch", *map(str, words)]
    environment = {"PATH": "/usr/bin:/bin", "ATOLL_LANG": "en", "COLUMNS": "200", "LC_ALL": "C.UTF-8"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
                            **settings)


def atoll(*words: object, **settings: Any) -> subprocess.CompletedProcess[str]:
    process = start(*words, **settings)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def request(custom_id: str, body: dict | None = None, url: str = CHAT) -> dict:
    body = body or {"messages": [{"role": "user", "content": custom_id}], "temperature": 0, "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def written(path: Path, requests: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in requests))
    return path


def answers_in(path: Path) -> dict[str, dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    counts = Counter(line["custom_id"] for line in lines)
    assert set(counts.values()) <= {1}, "a request was answered twice"
    return {line["custom_id"]: line for line in lines}


def test_every_endpoint_is_asked_and_errors_stand_in_their_lines(url: str, tmp_path: Path):
    requests = [
        request("chat"),
        request("text", {"model": "tiny", "prompt": "abc", "temperature": 0, "max_tokens": 3}, "/v1/completions"),
        request("vector", {"model": "tiny", "input": ["abc", "defg"]}, "/v1/embeddings"),
        request("response", {"input": "hello", "temperature": 0, "max_output_tokens": 3}, "/v1/responses"),
        request("wrong", {"messages": [], "max_tokens": 3}),
        request("nowhere", {"model": "other", "prompt": "abc"}, "/v1/completions"),
    ]
    given, out = written(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    done = atoll("run", given, out, "--url", url, "--json")
    assert done.returncode == ExitCode.PREFLIGHT_FAIL, done.stderr
    summary = json.loads(done.stdout)
    expected = {"total": 6, "done": 6, "succeeded": 4, "failed": 2, "skipped": 0, "left": 0, "interrupted": False}
    assert expected.items() <= summary.items()
    answers = answers_in(out)
    for name in ("chat", "text", "vector", "response"):
        assert answers[name]["response"]["status_code"] == 200
        assert answers[name]["response"]["request_id"]
        assert answers[name]["id"].startswith("batch_req_")
        assert answers[name]["error"] is None
    alone = httpx.post(f"{url}{CHAT}", json=requests[0]["body"]).json()
    assert answers["chat"]["response"]["body"]["choices"] == alone["choices"]
    assert len(answers["vector"]["response"]["body"]["data"]) == 2
    assert (answers["wrong"]["response"]["status_code"], answers["nowhere"]["response"]["status_code"]) == (400, 404)
    assert answers["wrong"]["response"]["body"]["error"]["param"] == "messages"
    used = [answers[name]["response"]["body"]["usage"] for name in ("chat", "text", "vector", "response")]
    assert summary["prompt_tokens"] == sum(u.get("prompt_tokens", u.get("input_tokens")) for u in used)
    assert summary["completion_tokens"] == sum(u.get("completion_tokens", u.get("output_tokens", 0)) for u in used)

    again = atoll("run", given, out, "--url", url)
    assert again.returncode == 0
    assert "6 of 6 requests are answered: 0 now, 0 failed, 6 by an earlier run." in again.stdout
    failed = atoll("run", given, out, "--url", url, "--retry-failed", "--json")
    assert failed.returncode == ExitCode.PREFLIGHT_FAIL
    assert (json.loads(failed.stdout)["skipped"], json.loads(failed.stdout)["failed"]) == (4, 2)
    assert answers_in(out).keys() == answers.keys()
    assert answers_in(out)["chat"] == answers["chat"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_run_that_ended_early_goes_on_where_it_stopped(url: str, tmp_path: Path, how: signal.Signals):
    requests = [request(f"r{i}", {"prompt": f"{i} abc", "max_tokens": 40, "temperature": 0, "ignore_eos": True},
                        "/v1/completions") for i in range(120)]
    given, out = written(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    process = start("run", given, out, "--url", url, "--concurrency", 2, "--json")
    deadline = time.monotonic() + 60
    while not out.exists() or out.read_bytes().count(b"\n") < 5:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(how)
    stdout, _ = process.communicate(timeout=30)
    before = out.read_bytes()
    assert before.count(b"\n") < 120, "it was not early"
    if how == signal.SIGKILL:
        out.write_bytes(before + b'{"id": "batch_req_1", "custom_id": "r11')  # as a power cut leaves it
    else:
        assert process.returncode == ExitCode.INTERRUPTED
        summary = json.loads(stdout)
        assert summary["interrupted"]
        assert summary["done"] == before.count(b"\n")
    done = atoll("run", given, out, "--url", url, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["skipped"] == before.count(b"\n")
    assert answers_in(out).keys() == {f"r{i}" for i in range(120)}
    assert out.read_bytes().startswith(before)


GOOD = json.dumps(request("a"))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: it is not JSON"),
        ("[1]", "line 2: it is not a JSON object"),
        ('{"custom_id": "x", "method": "POST", "url": "/v1/models", "body": {}}', "line 2: url must be one of"),
        ('{"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}', 'method must be "POST"'),
        ('{"method": "POST", "url": "/v1/completions", "body": {}}', "custom_id must be a text"),
        (json.dumps(request("x" * (MOST_ID_CHARACTERS + 1))), "custom_id must be a text"),
        ('{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": []}', "body must be a JSON object"),
        (json.dumps(request("x", {"stream": True})), "body.stream"),
        (json.dumps({**request("x"), "extra": 1}), "'extra' is not a field"),
        (GOOD, "line 2: custom_id 'a' is that of line 1 too"),
        ("[" * 100_000, "line 2: it is not JSON"),
        ('{"custom_id": "\xff"}', "line 2: it is not JSON"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_sent(tmp_path: Path, line: str, problem: str):
    path = tmp_path / "in.jsonl"
    path.write_bytes(f"{GOOD}\n{line}\n".encode("latin-1"))
    with pytest.raises(InstallError) as caught:
        check(path)
    assert caught.value.exit_code == ExitCode.USAGE
    assert problem in caught.value.why


def test_many_bad_lines_are_counted_and_nothing_is_sent(tmp_path: Path):
    given = tmp_path / "in.jsonl"
    given.write_text(f"{GOOD}\n" + "nonsense\n" * 50)
    with Endpoint(good()) as endpoint:
        done = atoll("run", given, tmp_path / "out.jsonl", "--url", endpoint.url)
        assert not endpoint.requests
    assert done.returncode == ExitCode.USAGE
    assert "line 2: it is not JSON" in done.stderr
    assert "and 30 more" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_what_editors_leave_in_a_file_is_no_mistake(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{GOOD}\r\n\r\n{json.dumps(request('b'))}".encode())
    found = check(path)
    assert list(found.places) == ["a", "b"]
    with path.open("rb") as file:
        assert [found.read(name, file).custom_id for name in ("b", "a")] == ["b", "a"]
    path.write_text("\n")
    with pytest.raises(InstallError, match="holds no request"):
        check(path)


def test_check_sends_nothing_and_says_how_many(tmp_path: Path):
    done = atoll("check", written(tmp_path / "in.jsonl", [request("a"), request("b")]))
    assert (done.returncode, done.stdout.strip()) == (0, f"All 2 requests of {tmp_path}/in.jsonl are well formed.")


@pytest.mark.parametrize(
    "content", ["my notes\n", '{"custom_id": "of another batch", "response": null}\n', '{"a": 1}\n'])
def test_a_file_that_is_no_answer_to_these_requests_stays_as_it_is(tmp_path: Path, content: str):
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    with pytest.raises(InstallError, match="does not hold the answers"), AnswerFile(out, {"a"}):
        pass
    assert out.read_text() == content


def test_two_runs_do_not_write_to_one_file(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    with (
        AnswerFile(out, {"a"}),
        pytest.raises(InstallError) as caught,
        AnswerFile(out, {"a"}),
    ):
        pass
    assert caught.value.exit_code == ExitCode.BUSY


def test_requests_and_answers_are_two_files(tmp_path: Path):
    given = written(tmp_path / "in.jsonl", [request("a")])
    done = atoll("run", given, given, "--url", "http://127.0.0.1:1")
    assert done.returncode == ExitCode.USAGE
    assert given.read_text().count("\n") == 1


class Moody(Endpoint):
    """Answers plain requests with what `answer` says."""

    def _respond(self, conversation: Conversation) -> None:
        self.requests.append(conversation)
        self.answer(conversation)


def test_an_endpoint_that_is_busy_is_asked_again(tmp_path: Path):
    asked: Counter[str] = Counter()

    def busy(conversation: Conversation) -> None:
        name = conversation.body["messages"][0]["content"]
        asked[name] += 1
        if asked[name] == 1:
            conversation.json({"error": {"message": "later"}}, "503 Service Unavailable\r\nRetry-After: 1")
        elif asked[name] == 2:
            conversation.hang_up()
        else:
            conversation.json({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}})

    given = written(tmp_path / "in.jsonl", [request(f"r{i}") for i in range(5)])
    with Moody(busy) as endpoint:
        done = atoll("run", given, tmp_path / "out.jsonl", "--url", endpoint.url, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt_tokens"] == 10
    assert set(asked.values()) == {3}


@pytest.mark.parametrize(
    ("status", "body", "code"), [("500 Oops", '{"error": {}}', None), ("200 OK", "<html>", "bad_answer")])
def test_an_answer_that_is_none_fails_its_line_alone(tmp_path: Path, status: str, body: str, code: str | None):
    def answer(conversation: Conversation) -> None:
        if conversation.body["messages"][0]["content"] == "bad":
            conversation.send(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        else:
            conversation.json({"choices": []})

    given, out = written(tmp_path / "in.jsonl", [request("bad"), request("good")]), tmp_path / "out.jsonl"
    with Moody(answer) as endpoint:
        assert atoll("run", given, out, "--url", endpoint.url).returncode == ExitCode.PREFLIGHT_FAIL
    answers = answers_in(out)
    assert answers["good"]["response"]["status_code"] == 200
    if code is None:
        assert answers["bad"]["response"]["status_code"] == 500
    else:
        assert answers["bad"]["response"] is None
        assert answers["bad"]["error"]["code"] == code


def test_an_endpoint_that_stays_away_ends_the_run_and_fails_no_line(tmp_path: Path, free_port: Callable[[], int]):
    given, out = written(tmp_path / "in.jsonl", [request("a")]), tmp_path / "out.jsonl"
    done = atoll("run", given, out, "--url", f"http://127.0.0.1:{free_port()}", "--patience", 1)
    assert done.returncode == ExitCode.UNHEALTHY
    assert "does not answer" in done.stderr
    assert out.read_bytes() == b""


def test_a_refused_key_ends_the_run_and_no_key_shows(tmp_path: Path):
    (tmp_path / "key").write_text("sk-secret\n")
    given, out = written(tmp_path / "in.jsonl", [request("a")]), tmp_path / "out.jsonl"

    class Locked(Moody):
        def _respond(self, conversation: Conversation) -> None:
            if conversation.headers.get("authorization") == "Bearer sk-right":
                conversation.json({"choices": []})
            else:
                conversation.json({"error": {"message": "no such key"}}, "401 Unauthorized")

    with Locked(good()) as endpoint:
        done = atoll("run", given, out, "--url", endpoint.url, "--api-key-file", tmp_path / "key")
        assert done.returncode == ExitCode.USAGE
        assert "no such key" in done.stderr
        assert "sk-secret" not in done.stderr + done.stdout
        assert out.read_bytes() == b""
        (tmp_path / "key").write_text("sk-right\n")
        assert atoll("run", given, out, "--url", endpoint.url, "--api-key-file", tmp_path / "key").returncode == 0


def test_a_full_disk_leaves_whole_lines(url: str, tmp_path: Path):
    given = written(tmp_path / "in.jsonl", [request(f"r{i}") for i in range(60)])
    out = tmp_path / "out.jsonl"

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))

    done = atoll("run", given, out, "--url", url, preexec_fn=small_files)
    assert done.returncode == ExitCode.IO, done.stderr
    kept = out.read_bytes()
    assert kept.endswith(b"\n")
    assert len(kept) <= 6000
    assert atoll("run", given, out, "--url", url).returncode == 0
    assert len(answers_in(out)) == 60


def test_failed_lines_are_replaced_at_once_or_not_at_all(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    good_line, bad_line = line_of("a", status=200, body={}), line_of("b", error={"code": "timeout", "message": "x"})
    out.write_bytes(bad_line + good_line + b'{"half')
    with AnswerFile(out, {"a", "b"}) as file:
        assert file.done == {"a": True, "b": False}
    assert out.read_bytes() == bad_line + good_line
    with AnswerFile(out, {"a", "b"}, again=True) as file:
        assert file.done == {"a": True}
        assert out.read_bytes() == good_line
        with pytest.raises(InstallError, match="Another run"), AnswerFile(out, {"a", "b"}):
            pass
        file.write([line_of("b", status=200, body={})])
    assert answers_in(out).keys() == {"a", "b"}
    assert list(tmp_path.iterdir()) == [out]


def test_without_an_installation_the_command_says_what_to_name(tmp_path: Path):
    given = written(tmp_path / "in.jsonl", [request("a")])
    done = atoll("run", given, tmp_path / "out.jsonl", "--prefix", tmp_path / "none")
    assert done.returncode == ExitCode.USAGE
    assert "--url" in done.stderr
