"""The sampler: what it reads over the gateway's socket is in the file, whatever is killed, damaged or not there."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.series import Series, SeriesError
from appliance.series.names import UP
from engine.server.http import local_socket

PAGE = """\
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{model_name="chat"}} {0}
vllm:generation_tokens_total{{model_name="code"}} {1}
"""


def until(true: Callable[[], Any], seconds: float = 30.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)
    return found


def rows(file: Path) -> list[Any]:
    with contextlib.suppress(SeriesError), Series(file) as series:
        return series.window(0, time.time() + 3600).rows
    return []


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The gateway's socket, whose counters grow with each request."""
    found = SimpleNamespace(path=tmp_path / "metrics.sock", asked=0)
    monkeypatch.setenv(local_socket.METRICS.variable, str(found.path))

    def render() -> tuple[bytes, str]:
        found.asked += 1
        return PAGE.format(10 * found.asked, found.asked).encode(), "text/plain"

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    listening = local_socket.listen(local_socket.METRICS, {"GET /metrics": render})
    server = asyncio.run_coroutine_threadsafe(listening, loop).result(10)
    assert server is not None
    yield found
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@contextlib.contextmanager
def sampler(path: Path, directory: Path) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "appliance.cli", "sampler", "--socket", str(path), "--directory", str(directory),
             "--every", "0.2"]  # fmt: skip
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(path: Path, request: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(path))
        client.sendall(request)
        answer = b""
        while piece := client.recv(65536):
            answer += piece
        return answer


def test_the_socket_answers_for_metrics_alone(gateway: SimpleNamespace) -> None:
    assert b"vllm:generation_tokens_total" in ask(gateway.path, b"GET /metrics HTTP/1.1\r\n\r\n")
    for request in (b"GET /v1/models HTTP/1.1\r\n\r\n", b"POST /metrics HTTP/1.1\r\n\r\n"):
        assert ask(gateway.path, request).startswith(b"HTTP/1.1 404 ")
    assert gateway.path.stat().st_mode & 0o777 == 0o660
    with contextlib.suppress(ConnectionError):
        assert ask(gateway.path, b"x" * 10_000) == b""


def test_callers_that_say_nothing_are_bounded_and_do_not_stay(
    gateway: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_socket, "SECONDS", 1.0)
    silent = [socket.socket(socket.AF_UNIX) for _ in range(local_socket.MOST_AT_ONCE)]
    for each in silent:
        each.connect(str(gateway.path))
    time.sleep(0.2)
    assert ask_or_nothing(gateway.path) == b""
    until(lambda: ask_or_nothing(gateway.path).startswith(b"HTTP/1.1 200 "))
    for each in silent:
        each.close()


def ask_or_nothing(path: Path) -> bytes:
    try:
        return ask(path, b"GET /metrics HTTP/1.1\r\n\r\n")
    except ConnectionError:
        return b""


def test_several_models_are_kept_and_a_kill_loses_nothing(gateway: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "series/series.db"
    with sampler(gateway.path, file.parent) as process:
        until(lambda: len(rows(file)) >= 4)
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept = len(rows(file))
    assert gateway.asked - 1 <= kept <= gateway.asked  # at most the one that was being written
    assert file.stat().st_mode & 0o777 == 0o600
    with sampler(gateway.path, file.parent) as process:
        until(lambda: len(rows(file)) >= kept + 2)
        process.terminate()
        assert process.wait(10) == 0
    with Series(file) as series:
        by_model = series.window(0, time.time() + 3600).by_label("generation_tokens", "model_name")
    assert by_model["chat"] == pytest.approx(10 * by_model["code"])


def test_a_gateway_that_is_down_is_a_sample_too(tmp_path: Path) -> None:
    file = tmp_path / "series.db"
    with sampler(tmp_path / "none.sock", tmp_path):
        until(lambda: len(rows(file)) >= 2)
    assert {row.values[UP] for row in rows(file)} == {0.0}


def test_a_file_that_was_taken_away_or_damaged_is_begun_anew(gateway: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "series/series.db"
    with sampler(gateway.path, file.parent):
        until(lambda: rows(file))
        for path in file.parent.iterdir():
            path.unlink()
        until(lambda: rows(file))
    for path in file.parent.glob("series.db-*"):
        path.unlink()
    file.write_bytes(b"no database" * 1000)
    with sampler(gateway.path, file.parent) as process:
        until(lambda: rows(file))
        process.terminate()
        assert process.stderr is not None
        assert "damaged" in process.stderr.read()
    assert file.with_name("series.db.damaged").exists()


def test_a_directory_that_cannot_be_written_is_said(gateway: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with sampler(gateway.path, tmp_path / "file") as process:
        assert process.stderr is not None
        assert "no history is kept" in process.stderr.readline()
        assert process.poll() is None
