"""The groups against a real engine, which keeps its promises, and against servers that break one each."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
for _folder in ("engine/server", "appliance/load"):
    sys.path.insert(0, str(ROOT / _folder))

from endpoints import DONE, Conversation, Endpoint, chunk, good, usage  # noqa: E402
from gateways import RunningServer, engine_process  # noqa: E402

from appliance.load import Target  # noqa: E402
from appliance.service.verification import run as runner  # noqa: E402
from appliance.service.verification.plan import Targets, VerifyAnswers  # noqa: E402
from appliance.service.verification.quality import self_test  # noqa: E402
from appliance.service.verification.run import Verification, forget, verify  # noqa: E402
from appliance.service.verification.security import file_modes, outgoing  # noqa: E402
from appliance.service.verification.subject import Served, Subject  # noqa: E402
from engine.server.access.auth import KeyFile  # noqa: E402
from engine.server.http.limits import Limits  # noqa: E402
from engine.server.ipc.client import EngineClient  # noqa: E402
from engine.server.openai.serving import ServedModel  # noqa: E402
from installer.access import api_keys  # noqa: E402
from installer.base.layout import Layout  # noqa: E402


@pytest.fixture(scope="module")
def served(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """The demonstration model behind a gateway with keys."""
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    key = api_keys.add(keys, "test", scopes=("serve", "metrics")).text
    with engine_process(smollm2_dir, "--served-model-name", "smol", "--max-model-len", "2048") as socket:
        model = ServedModel.load("smol", smollm2_dir, EngineClient(socket))
        server = RunningServer({"smol": model}, limits=Limits(), auth=KeyFile(keys))
        server.wait_ready()
        name = Served("smol", "smollm2-135m-instruct", smollm2_dir, {"device": "cpu"})
        yield Subject(Target(server.url, key=key), [name])
        server.stop()


def small(tmp_path: Path, *groups: str, **more) -> VerifyAnswers:
    profile = tmp_path / "small.toml"
    profile.write_text("input = [20, 40]\noutput = [4, 8]\nwarmup = 0\n[arrival]\nclients = 2\n")
    return VerifyAnswers.model_validate(
        {"groups": list(groups), "profile": str(profile), "requests": 4, "soak_seconds": 6.0, **more}
    )


def failing(found: Verification) -> set[str]:
    return {each.id for each in found.found() if not each.ok and each.severity != "info"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_engine_keeps_its_promises(served: Subject, tmp_path: Path):
    groups = ("health", "conformance", "quality", "performance", "stability", "security")
    found = verify(served, small(tmp_path, *groups, targets={"ttft": 60_000, "users": 2}))
    assert found.passed, [(each.id, each.observed, each.evidence) for each in found.found() if each.blocks]
    assert [group.group for group in found.groups] == list(groups)
    passed = {each.id for each in found.found() if each.ok}
    assert passed >= {"health", "stream", "client-mistakes", "limits", "cancel", "saturation", "golden",
                      "errors-closed", "errors-open", "users", "soak", "pages", "key-required", "tls"}  # fmt: skip
    numbers = next(group.data for group in found.groups if group.group == "performance")["loads"]["smol"]
    assert {"closed", "open", "users"} == set(numbers)
    assert numbers["closed"]["output_throughput"] > 0


def test_targets_that_are_missed_block_and_lead_back_to_tuning(served: Subject, tmp_path: Path):
    targets = {"ttft": 0.01, "output_throughput": 1e9, "users": 1}
    found = verify(served, small(tmp_path, "performance", targets=targets))
    assert failing(found) >= {"latency-closed", "latency-open", "output-throughput", "users"}
    assert all(each.command == "atoll tune" for each in found.found() if each.id.startswith("latency"))


def _metrics(conversation: Conversation, running: int, pages: float) -> None:
    gauges = {"vllm:num_requests_running": running, "vllm:kv_cache_usage_perc": pages}
    data = "".join(f'{name}{{model_name="x"}} {value}\n' for name, value in gauges.items()).encode()
    conversation.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))


def fake(answer=None, **faults) -> Endpoint:
    """An endpoint that answers plausibly but for `faults`."""
    return Faulty(answer or good(), **faults)


class Faulty(Endpoint):
    def __init__(
        self, answer, *, health=200, leaks=False, open_door=False, silent_errors=False, drop_usage=False
    ) -> None:
        super().__init__(answer)
        self.health, self.leaks, self.open_door = health, leaks, open_door
        self.silent_errors, self.drop_usage, self.abandoned = silent_errors, drop_usage, 0

    def _respond(self, conversation: Conversation) -> None:
        self.requests.append(conversation)
        if conversation.path == "/health":
            conversation.json({}, f"{self.health} X")
        elif not self.open_door and conversation.headers.get("authorization") != "Bearer sk-right":
            conversation.json({"error": {"message": "no"}}, "401 Unauthorized")
        elif conversation.path == "/metrics":
            streams = sum(each.method == "POST" and b'"stream": true' in each.raw for each in self.requests)
            _metrics(conversation, 0, 0.1 * streams if self.leaks else 0.0)
        elif conversation.method == "GET":
            conversation.json({"data": [{"id": "fake", "max_model_len": 512}]})
        elif conversation.path not in ("/v1/chat/completions", "/v1/completions"):
            conversation.json({} if self.silent_errors else {"error": {"message": "no such path"}}, "404 Not Found")
        elif len(conversation.raw) > 1 << 20:
            conversation.json({"error": {"message": "too large"}}, "413 Too Large")
        else:
            self._completion(conversation)

    def _completion(self, conversation: Conversation) -> None:
        try:
            body = conversation.body
        except ValueError:
            conversation.json({"error": {"message": "no JSON"}}, "400 Bad Request")
            return
        messages = body.get("messages") or ([] if "prompt" not in body else [{"role": "user", "content": "x"}])
        wrong = not messages or body.get("temperature", 0) < 0 or body.get("max_tokens", 1) < 0
        if body.get("model") != "fake":
            conversation.json({"error": {"message": "no such model"}}, "404 Not Found")
        elif wrong or messages[0]["role"] != "user" or conversation.words_in > 512:
            conversation.json({"error": {"message": "bad"}}, "400 Bad Request")
        elif body.get("stream"):
            self.answer(conversation)
        else:
            count = conversation.tokens_wanted
            top = [{"logprob": -0.5}, {"logprob": -1.5}, {"logprob": -4.0}]
            content = [{"logprob": -0.5, "top_logprobs": top}] * count if body.get("logprobs") else None
            counted = {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}
            conversation.json({
                "choices": [{"message": {"role": "assistant", "content": "a b c"}, "text": "a b c",
                             "finish_reason": "length", "logprobs": {"content": content}}],
                **({} if self.drop_usage else {"usage": counted}),
            })  # fmt: skip


def check(endpoint: Endpoint, plan: VerifyAnswers) -> Verification:
    return verify(Subject(Target(endpoint.url, key="sk-right"), [Served("fake", "mystery")]), plan)


def test_a_plausible_server_passes(tmp_path: Path):
    with fake() as endpoint:
        found = check(endpoint, small(tmp_path, "health", "conformance", "quality", "performance", "security"))
    assert failing(found) == set(), [(each.id, each.observed) for each in found.found() if not each.ok]


def _cut(conversation: Conversation) -> None:
    conversation.begin_stream()
    conversation.piece(chunk("a "))
    conversation.hang_up()


def _no_usage(conversation: Conversation) -> None:
    conversation.begin_stream()
    conversation.piece(chunk("a ", "stop") + DONE)
    conversation.end_stream()


def _two_reasons(conversation: Conversation) -> None:
    conversation.begin_stream()
    conversation.piece(chunk("a ", "stop") + chunk("b ", "stop") + usage(5, 2) + DONE)
    conversation.end_stream()


@pytest.mark.parametrize(
    "faults, group, id",
    [
        ({"health": 503}, "health", "health"),
        ({"answer": _cut}, "conformance", "stream"),
        ({"answer": _no_usage}, "conformance", "stream"),
        ({"answer": _two_reasons}, "conformance", "stream"),
        ({"drop_usage": True}, "conformance", "chat"),
        ({"silent_errors": True}, "conformance", "client-mistakes"),
        ({"leaks": True}, "stability", "pages"),
        ({"answer": _cut}, "performance", "errors-closed"),
        ({"answer": _no_usage}, "performance", "answers-closed"),
        ({"answer": _cut}, "stability", "soak"),
        ({"open_door": True}, "security", "key-required"),
    ],
)  # fmt: skip
def test_each_broken_promise_is_found(faults, group, id, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from appliance.service.verification import conformance, stability

    monkeypatch.setattr(conformance, "_FREED_SECONDS", 1.0)
    monkeypatch.setattr(stability, "_IDLE_SECONDS", 1.0)
    with fake(**faults) as endpoint:
        found = check(endpoint, small(tmp_path, group, soak_seconds=1.0))
    blocking = {each.id: each.observed for each in found.found() if each.blocks}
    assert id in blocking, blocking


def test_an_endpoint_that_goes_down_hides_no_other_group(tmp_path: Path, free_port):
    with fake() as endpoint:
        plan = small(tmp_path, "health", "conformance", "performance", "security")
        subject = Subject(Target(endpoint.url, key="sk-right"), [Served("fake", "mystery")])
        gone = Target(f"http://127.0.0.1:{free_port()}", key="sk-right")

        def begin(group: str) -> None:
            if group == "performance":
                subject.target = gone

        found = verify(subject, plan, begin=begin)
    assert [group.group for group in found.groups] == plan.groups
    assert [group.passed for group in found.groups] == [True, True, False, False]
    assert {"performance-finished", "security-finished"} <= failing(found)


def test_a_bug_in_one_group_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def broken(work):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(runner, "RUNNERS", {**runner.RUNNERS, "quality": broken})
    with fake() as endpoint:
        found = check(endpoint, small(tmp_path, "quality", "health"))
    assert failing(found) == {"quality-finished"}
    assert "ZeroDivisionError" in next(each.evidence for each in found.found() if not each.ok)


def test_a_run_that_was_cut_off_resumes_behind_what_had_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    cut = True
    real = dict(runner.RUNNERS)

    def watched(name):
        async def run(work):
            asked.append(name)
            if name == "conformance" and cut:
                raise KeyboardInterrupt
            return await real[name](work)

        return run

    monkeypatch.setattr(runner, "RUNNERS", {name: watched(name) for name in real})
    state, plan = tmp_path / "state", small(tmp_path, "health", "security", "conformance")
    with fake() as endpoint:
        subject = Subject(Target(endpoint.url, key="sk-right"), [Served("fake", "mystery")])
        with pytest.raises(KeyboardInterrupt):
            verify(subject, plan, state=state)
        cut = False
        found = verify(subject, plan, state=state)
        assert asked == ["health", "security", "conformance", "conformance"]
        assert [group.resumed for group in found.groups] == [True, True, False]
        (state / "health.json").write_text('{"torn')  # a damaged file is asked again
        verify(subject, plan.model_copy(update={"rate": 3.0}), state=state)
        assert len(asked) == 7  # other inputs: nothing of before holds
        forget(state)
        assert not state.exists()


def test_the_self_test_is_judged_by_its_own_words(tmp_path: Path):
    def said(*lines: dict) -> tuple[str, ...]:
        script = tmp_path / "test.py"
        script.write_text("".join(f"print({json.dumps(line)!r})\n" for line in lines))
        return sys.executable, str(script)

    end = {"kind": "end", "exit_code": 0, "passed": 31, "failed": []}

    async def judge(command):
        return await self_test(on_gpu=True, command=command)

    assert asyncio.run(judge(said({"kind": "check"}, end))).ok
    assert asyncio.run(judge(said({**end, "exit_code": 1, "message": "rms_norm is off"}))).blocks
    assert "no usable GPU" in asyncio.run(judge(said({**end, "exit_code": 2}))).observed
    assert asyncio.run(judge(said())).blocks
    assert "not checked" in asyncio.run(self_test(on_gpu=False)).observed


def test_files_that_others_may_read_or_change_are_named(tmp_path: Path):
    layout = Layout.at(tmp_path / "prefix")
    for path, mode in layout.directories():
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)
    (tmp_path / "prefix").chmod(0o755)
    layout.api_keys.write_text("{}")
    layout.api_keys.chmod(0o600)
    layout.config.write_text("")
    layout.config.chmod(0o644)
    assert file_modes(layout).ok, file_modes(layout).evidence
    layout.api_keys.chmod(0o640)
    assert str(layout.api_keys) in file_modes(layout).observed
    layout.api_keys.chmod(0o600)
    layout.config.chmod(0o666)
    assert file_modes(layout).blocks
    layout.config.chmod(0o644)
    (layout.opt / "link").symlink_to("/tmp")
    assert file_modes(layout).ok


def test_a_connection_to_another_machine_is_seen(monkeypatch: pytest.MonkeyPatch):
    import socket

    from appliance.service.verification import security

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    accepted, _ = listener.accept()
    assert outgoing(os.getpid(), set()) == []  # loopback is no way out
    # No other machine is here: what the kernel says of this very connection is read as if loopback were the world.
    monkeypatch.setattr(security.ipaddress.IPv4Address, "is_loopback", property(lambda self: False))
    assert f"127.0.0.1:{port}" in outgoing(os.getpid(), {0})
    assert f"127.0.0.1:{client.getsockname()[1]}" not in outgoing(os.getpid(), {port})  # a client's own
    for each in (client, accepted, listener):
        each.close()


def test_a_target_of_nothing_is_no_subject():
    assert Targets().slo == type(Targets().slo)()
    assert not Targets().slo
