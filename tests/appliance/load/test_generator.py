"""The load generator against endpoints that behave, and against ones that break each promise."""

import itertools
import os
import signal
import threading
import time

import pytest
from endpoints import DONE, Conversation, Endpoint, chunk, good, usage

from appliance.load import LoadInterrupted, Slo, Target, TrafficProfile, parse_slo, run_load
from appliance.load.generator import Progress
from appliance.load.users import find_users, users_at_slo
from installer.base.errors import ExitCode, InstallError


def profile(**changes) -> TrafficProfile:
    values = {"name": "test", "input": [60, 120], "output": [4, 12], "arrival": {"clients": 4}, "requests": 24,
              "warmup": 0, "timeout_seconds": 20.0}  # fmt: skip
    return TrafficProfile.model_validate(values | changes)


def test_a_closed_loop_measures_what_the_server_does():
    seen: list[Progress] = []
    with Endpoint(good(first=0.05, gap=0.01)) as endpoint:
        result = run_load(Target(endpoint.url), profile(warmup=3), slo=Slo(ttft=200, tpot=50), on_progress=seen.append)
    assert (result.completed, result.failed, result.max_concurrent_requests) == (24, 0, 4)
    assert endpoint.most_open <= 4
    assert 50 <= result.ttft.median < 120
    assert 10 <= result.itl.median < 25
    assert 10 <= result.tpot.median < 25
    assert result.ttft.median <= result.ttft.p(95) <= result.ttft.p(99) <= result.ttft.max
    streams = [each for each in endpoint.requests if each.method == "POST" and each.body.get("stream")]
    assert len(streams) == 27                                             # the warm-up's are sent, and not counted
    counted = sum(each.tokens_wanted for each in streams[3:])
    assert result.total_output_tokens == counted
    assert all(60 - 3 <= each.words_in * 2 + 10 <= 120 + 3 for each in streams)  # tokens as the server counts them
    assert result.slo_share == 1.0
    assert result.request_goodput == pytest.approx(result.request_throughput)
    assert seen[-1].done == 24
    assert seen[-1].phase == "run"
    assert sum(row[1] for row in result.timeline) == pytest.approx(counted)
    assert result.max_output_tokens_per_s >= result.output_throughput


def test_an_open_loop_sends_at_its_rate_whatever_the_server_does():
    with Endpoint(good(first=0.5)) as endpoint:
        begun = time.monotonic()
        result = run_load(Target(endpoint.url), profile(arrival={"rate": 40.0}, requests=40))
        spent = time.monotonic() - begun
    assert result.completed == 40
    assert result.max_concurrent_requests > 8
    assert spent < 4
    assert result.request_rate == 40.0
    with Endpoint(good(first=0.1)) as endpoint:
        result = run_load(Target(endpoint.url), profile(arrival={"rate": 100.0, "max_concurrency": 3}, requests=20))
    assert result.completed == 20
    assert endpoint.most_open <= 3


def test_a_timed_run_ends_with_its_time():
    with Endpoint(good(first=0.02)) as endpoint:
        begun = time.monotonic()
        result = run_load(Target(endpoint.url), profile(), seconds=1.0)
    assert time.monotonic() - begun < 4
    assert result.completed > 20
    assert result.unfinished == 0


def _truncated(conversation: Conversation) -> None:
    conversation.begin_stream()
    conversation.piece(chunk("a ") + chunk("b "))
    conversation.hang_up()


def _without_done(conversation: Conversation) -> None:
    conversation.begin_stream()
    conversation.piece(chunk("a ", "length") + usage(5, 1))
    conversation.end_stream()


def _without_finish_reason(conversation: Conversation) -> None:
    conversation.begin_stream()
    conversation.piece(chunk("a ") + usage(5, 1) + DONE)
    conversation.end_stream()


def _server_error(conversation: Conversation) -> None:
    conversation.json({"error": {"message": "out of luck"}}, "500 Internal Server Error")


def _too_many(conversation: Conversation) -> None:
    conversation.json({"error": {"message": "slower please"}}, "429 Too Many Requests")


def _error_event(conversation: Conversation) -> None:
    conversation.begin_stream()
    conversation.piece(chunk("a ") + b'data: {"error": {"message": "the engine is gone"}}\n\n' + DONE)
    conversation.end_stream()


def _garbage(conversation: Conversation) -> None:
    conversation.begin_stream()
    conversation.piece(b"data: {this is no json\n\n" + DONE)
    conversation.end_stream()


def _no_http(conversation: Conversation) -> None:
    conversation.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")


def _nothing(conversation: Conversation) -> None:
    conversation.begin_stream()
    conversation.piece(chunk("") + chunk(finish="stop") + usage(5, 0) + DONE)
    conversation.end_stream()


def _hangs(conversation: Conversation) -> None:
    conversation.begin_stream()
    conversation.piece(chunk("a "))
    time.sleep(3)


def _endless_event(conversation: Conversation) -> None:
    conversation.begin_stream()
    for _ in range(200):
        conversation.piece(b"data: " + b"x" * 65536)


@pytest.mark.parametrize(
    "answer, kind, example",
    [
        (_truncated, "truncated", "closed"),
        (_without_done, "truncated", "[DONE]"),
        (_without_finish_reason, "truncated", "finish_reason"),
        (_server_error, "http_500", "out of luck"),
        (_too_many, "http_429", "slower please"),
        (_error_event, "stream_error", "engine is gone"),
        (_garbage, "malformed", "this is no json"),
        (_no_http, "malformed", ""),
        (_nothing, "empty", "no content token"),
        (_hangs, "timeout", "within 0.5 s"),
        (_endless_event, "malformed", "1 MiB"),
    ],
)  # fmt: skip
def test_each_broken_promise_is_counted_as_what_it_is(answer, kind, example):
    with Endpoint(answer) as endpoint:
        result = run_load(Target(endpoint.url), profile(requests=6, timeout_seconds=0.5), slo=Slo(ttft=1000))
    assert result.error_kinds == {kind: 6}, (result.error_kinds, result.error_examples)
    assert result.completed == 0
    assert result.failed == 6
    assert result.slo_share == 0.0
    assert example in " ".join(result.error_examples.get(kind, [""]))


def test_missing_usage_is_noticed_and_text_is_counted_instead():
    def answer(conversation: Conversation) -> None:
        conversation.begin_stream()
        conversation.piece(chunk("a ") + chunk("b ") + chunk("c ", "stop") + DONE)
        conversation.end_stream()

    with Endpoint(answer) as endpoint:
        result = run_load(Target(endpoint.url), profile(requests=5))
    assert (result.without_usage, result.total_output_tokens, result.completed) == (5, 15, 5)


def test_a_server_that_closes_each_connection_is_served_all_the_same():
    def answer(conversation: Conversation) -> None:
        good()(conversation)
        conversation.hang_up()

    with Endpoint(answer) as endpoint:
        result = run_load(Target(endpoint.url), profile())
    assert (result.completed, result.failed) == (24, 0), result.error_examples


def test_keys_and_what_is_not_there(free_port):
    with Endpoint(good(), key="sk-right") as endpoint:
        with pytest.raises(InstallError, match="refuses the API key"):
            run_load(Target(endpoint.url, key="sk-wrong"), profile())
        assert run_load(Target(endpoint.url, key="sk-right"), profile(requests=2)).completed == 2
    with pytest.raises(InstallError, match="does not answer") as failure:
        run_load(Target(f"http://127.0.0.1:{free_port()}"), profile())
    assert failure.value.exit_code == ExitCode.UNHEALTHY
    assert "sk-right" not in repr(Target(endpoint.url, key="sk-right"))
    for url in ("ftp://x", "127.0.0.1:8000", "http://user:secret@x", "http://", "http://x:99999", "http://x/?key=1"):
        with pytest.raises(InstallError, match="not the address"):
            Target(url)


def test_an_endpoint_that_dies_in_the_middle_ends_in_counted_errors():
    alive, answers = good(first=0.01), itertools.count(1)

    def dies(conversation: Conversation) -> None:
        (alive if next(answers) <= 10 else _truncated)(conversation)

    with Endpoint(dies) as endpoint:
        result = run_load(Target(endpoint.url), profile(arrival={"clients": 2}, requests=30))
    assert result.completed > 5
    assert result.truncated > 0
    assert result.completed + result.truncated == 30


def test_ctrl_c_keeps_what_was_measured():
    with Endpoint(good(first=0.02)) as endpoint:
        threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(LoadInterrupted) as stopped:
            run_load(Target(endpoint.url), profile(requests=100_000))
        time.sleep(0.3)
        assert endpoint.open == 0  # the server sees that nobody reads any more
    result = stopped.value.result
    assert result.interrupted
    assert result.completed > 10
    assert result.duration < 5


def test_lengths_are_fitted_to_the_context_that_the_endpoint_names():
    with Endpoint(good(), context=256) as endpoint:
        result = run_load(Target(endpoint.url), profile(input=[2000, 4000], output=[100, 200], requests=4))
    assert result.completed == 4
    sent = [each for each in endpoint.requests if each.method == "POST"]
    assert all(each.words_in * 2 + 10 + each.tokens_wanted <= 256 for each in sent)


@pytest.mark.parametrize(
    "capacity, most, expected", [(11, 64, 11), (0, 64, 0), (100, 64, 64), (1, 64, 1), (33, 64, 33)]
)
def test_users_at_a_service_level(capacity, most, expected):
    from appliance.load.result import LoadResult

    tried = []

    def measure(clients: int) -> LoadResult:
        tried.append(clients)
        return LoadResult(slo_share=1.0 if clients <= capacity else 0.5)

    found = users_at_slo(measure, most=most)
    assert abs(found.users - expected) <= max(0, expected * 0.15)
    assert found.users <= capacity
    assert found.capped == (capacity >= most)
    assert len(tried) <= 12


def test_users_are_found_on_a_server_with_few_places():
    places = threading.Semaphore(3)

    def answer(conversation: Conversation) -> None:
        with places:
            good(first=0.05)(conversation)

    with Endpoint(answer) as endpoint:
        found = find_users(Target(endpoint.url), profile(), Slo(ttft=90), most=16)
    assert 2 <= found.users <= 4, [(clients, share) for clients, share, _ in found.points]


def test_targets_are_read_as_vllm_and_as_people_write_them():
    assert parse_slo(["ttft:500", "tpot:50"]) == Slo(ttft=500, tpot=50)
    assert parse_slo(["ttft=0.5s,itl=40ms", "e2el:10000"]) == Slo(ttft=500, itl=40, e2el=10_000)
    for wrong in ("ttft", "ttft:", "speed:5", "ttft:-1", "ttft:0", "ttft:5min"):
        with pytest.raises(InstallError, match="not a target"):
            parse_slo([wrong])
