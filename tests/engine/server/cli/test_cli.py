"""`atoll serve`: its flags, and the two processes as a user meets them."""

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from certificates import self_signed

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.server.cli.serve import base_url, http_server
from engine.server.ipc.client import EngineClient
from engine.server.settings.commands import parse_engine, parse_serve
from engine.server.settings.options import engine_argv
from engine.server.settings.values import human_size

READY_SECONDS = 90


# -- flags


def serve(line: str):
    return parse_serve(line.split())


def test_every_flag_of_common_vllm_commands_parses_with_its_meaning() -> None:
    options = serve(
        "/m --served-model-name a b --host 0.0.0.0 --port 9000 --dtype half --quantization None --kv-cache-dtype auto "
        "--gpu-memory-utilization 0.95 --max-model-len 32k --max-num-seqs 8 --max-num-batched-tokens 8K "
        "--tensor-parallel-size 1 --enable-chunked-prefill --enable-prefix-caching --enforce-eager --seed 7 "
        "--scheduling-policy priority --load-format dummy --kv-cache-memory-bytes 1.5G --block-size 16 --device cpu"
    )
    assert options.engine == EngineConfig(
        Path("/m"), ["a", "b"], "float16", None, "auto", "dummy", "cpu", 32_000, 0.95, 1_610_612_736, 16, 8, 8192, None,
        1, True, True, True, "priority", None, 7,
    )
    assert (options.host, options.port) == ("0.0.0.0", 9000)


def test_defaults_are_safe() -> None:
    options = serve("/m")
    assert options.host == "127.0.0.1"
    assert options.engine == EngineConfig(Path("/m"), ["/m"])


@pytest.mark.parametrize("line", [
    "/m --max_model_len=512 --no_enable_prefix_caching", "--max-model-len 512 --no-enable-prefix-caching /m",
    "--model /m --max_model_len 512 --no-enable-prefix-caching", "--max-model-len=1 /m --max-model-len=512 "
    "--enable-prefix-caching --no-enable-prefix-caching",
])
def test_spellings_and_orders_are_equal(line: str) -> None:
    assert serve(line).engine == EngineConfig(Path("/m"), ["/m"], max_model_len=512, enable_prefix_caching=False)


@pytest.mark.parametrize("text, value", [
    ("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("1M", 1_048_576), ("1m", 1_000_000), ("25.6k", 25_600),
    ("2G", 2 << 30), ("1T", 1 << 40),
])
def test_human_sizes(text: str, value: int) -> None:
    assert human_size(text) == value


@pytest.mark.parametrize("value", ["auto", "-1"])
def test_the_largest_context_that_fits(value: str) -> None:
    assert serve(f"/m --max-model-len {value}").engine.max_model_len == "auto"


@pytest.mark.parametrize("line, flag, words", [
    ("/m --trust-remote-code", "--trust-remote-code", "never runs code"),
    ("/m --trust_remote_code", "--trust-remote-code", "never runs code"),
    ("/m --api-key sk-secret", "--api-key", "--api-key-file"),
    ("/m --api-key=sk-secret", "--api-key", "--api-key-file"),
    ("/m --quantization fp8 --device cpu", "--quantization", "not available on cpu"),
    ("/m -q bitsandbytes --device cpu", "--quantization", "not available on cpu"),
    ("/m --kv-cache-dtype fp8 --device cpu", "--kv-cache-dtype", "not available on cpu"),
    ("/m --tensor-parallel-size 2 --device cpu", "--tensor-parallel-size", "Use 1"),
    ("/m -tp 4 --device cpu", "--tensor-parallel-size", "Use 1"),
    ("/m --pipeline-parallel-size 2", "--pipeline-parallel-size", "Use 1"),
    ("/m --block-size 24", "--block-size", "8, 16, 32, 64"),
    ("/m --tokenizer /other", "--tokenizer", "model directory"),
    ("/m --speculative-config {}", "--speculative-config", "not available"),
    ("/m --max-model-length 3", "--max-model-length", "Did you mean --max-model-len?"),
    ("/m --xyzzy", "--xyzzy", "--help"),
    ("/m --port 99999", "--port", "65535"),
    ("/m --port http", "--port", "http"),
    ("/m --max-model-len 0", "--max-model-len", "at least 1"),
    ("/m --max-model-len 1.5", "--max-model-len", "whole number"),
    ("/m --max-num-seqs many", "--max-num-seqs", "not a size"),
    ("/m --gpu-memory-utilization 1.5", "--gpu-memory-utilization", "at most 1"),
    ("/m --gpu-memory-utilization nan", "--gpu-memory-utilization", "at most 1"),
    ("/m --dtype int8", "--dtype", "bfloat16"),
    ("/m --ssl-certfile x", "--ssl-certfile", "belong together"),
    ("/m --api-key-file /nonexistent/keys", "--api-key-file", "No such file"),
    ("/m --config /nonexistent.toml", "--config", "No such file"),
    ("/m --tool-call-parser hermit", "--tool-call-parser", "hermes"),
    ("/m --reasoning-parser qwen", "--reasoning-parser", "qwen3"),
    ("/m --allowed-origins *", "--allowed-origins", "JSON list"),
    ("/m --generation-config /x", "--generation-config", "vllm"),
    ("/m /n", None, "'/n'"),
    ("--port 80", "--model", "No model directory"),
])
def test_what_cannot_be_is_refused_in_a_sentence_that_names_the_flag(line: str, flag: str | None, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(line)
    assert caught.value.flag == flag
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    if flag:
        assert flag in str(caught.value)


def test_flags_that_scripts_carry_are_accepted_with_a_note() -> None:
    options = serve("/m --disable-log-requests --swap-space 4 --no-trust-remote-code --pipeline-parallel-size 1 "
                    "--uvicorn-log-level warning --disable-uvicorn-access-log --async-scheduling")
    assert options.engine == EngineConfig(Path("/m"), ["/m"])
    assert (options.log_level, options.access_log) == ("warning", False)
    assert [note.split()[0] for note in options.notes] == ["--disable-log-requests", "--swap-space",
                                                           "--async-scheduling"]


@pytest.mark.parametrize("said, temperature", [("auto", 0.25), ("vllm", None)])
def test_the_sampling_defaults_are_the_vendors_or_neutral(
    tiny_llama_dir: Callable[..., Path], tmp_path: Path, said: str, temperature: float | None
) -> None:
    model = shutil.copytree(tiny_llama_dir(), tmp_path / "model")
    (model / "generation_config.json").write_text('{"temperature": 0.25}')
    options = serve(f"{model} --generation-config {said} --disable-access-log")
    server = http_server(options, EngineClient(tmp_path / "none.sock"))
    served = server.config.app.state.gateway.model(None)  # type: ignore[union-attr]
    assert served.defaults.get("temperature") == temperature


def test_a_toml_file_gives_flags_and_the_line_wins(tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text('[serve]\nmodel = "/m"\nmax-model-len = "32k"\nmax_num_seqs = 4\nenable-prefix-caching = false\n'
                      'enforce-eager = true\nserved-model-name = ["a", "b"]\ngpu-memory-utilization = 0.5\n')
    engine = serve(f"--config {config} --max-num-seqs 9").engine
    assert engine == EngineConfig(Path("/m"), ["a", "b"], max_model_len=32_000, max_num_seqs=9, enforce_eager=True,
                                  enable_prefix_caching=False, gpu_memory_utilization=0.5)
    assert serve(f"/other --config {config}").engine.model == Path("/other")


@pytest.mark.parametrize("text, words", [
    ("[other]\n", r"\[serve\]"), ("[serve\n", "not TOML"), ("[serve]\nmax-model-lens = 5\n", "Did you mean"),
    ('[serve]\napi-key = "sk-secret"\n', "--api-key-file"), ("[serve]\nmodel = {}\n", "must be a string"),
    ("[serve]\ntrust-remote-code = true\n", "never runs code"), ('[serve]\nconfig = "x"\n', "another one"),
])
def test_a_toml_file_obeys_the_same_rules(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        serve(f"/m --config {tmp_path / 'c.toml'}")


def test_the_engine_process_gets_the_same_config() -> None:
    config = serve(
        "/m --served-model-name a b --dtype float --max-model-len auto --gpu-memory-utilization 0.5 --max-num-seqs 3 "
        "--kv-cache-memory-bytes 1G --max-num-batched-tokens 77 --no-enable-chunked-prefill --enforce-eager --seed -5 "
        "--no-enable-prefix-caching --scheduling-policy priority --device cpu --load-format dummy"
    ).engine
    config.batch_invariant = True
    assert parse_engine([*engine_argv(config), "--uds", "/s"]).engine == config
    assert parse_engine([*engine_argv(serve("/m").engine), "--uds", "/s"]).engine == serve("/m").engine


def test_urls_that_a_client_can_use() -> None:
    def url(line: str) -> str:
        return base_url(serve(line))

    assert url("/m") == "http://127.0.0.1:8000"
    assert url("/m --host 0.0.0.0 --port 80") == "http://127.0.0.1:80"
    assert url("/m --host ::1") == "http://[::1]:8000"
    assert url("/m --host llm.example") == "http://llm.example:8000"
    assert url("/m --uds /run/s") == "unix:/run/s"


def test_the_gateway_imports_neither_torch_nor_transformers() -> None:
    code = "import sys\nfrom engine.server.cli import serve\nfrom engine.server.gateway import http_server\n" \
           "print([m for m in ('torch', 'transformers') " \
           "if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- commands that end before anything starts


def atoll_serve(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "engine.server.cli.serve", *argv], capture_output=True, text=True,
                          timeout=60)


def test_help_shows_groups_and_examples() -> None:
    done = atoll_serve("--help")
    assert done.returncode == 0
    for word in ("examples:", "scheduling:", "--max-model-len", "atoll serve ./"):
        assert word in done.stdout
    assert "--api-key " not in done.stdout


def test_a_model_that_is_not_there_or_damaged_is_named_at_once(
    tiny_llama_dir: Callable[..., Path], tmp_path: Path
) -> None:
    done = atoll_serve("meta-llama/Llama-3-8B")
    assert (done.returncode, done.stdout) == (11, "")
    assert "meta-llama/Llama-3-8B" in done.stderr
    assert len(done.stderr.splitlines()) == 1

    model = tmp_path / "model"
    shutil.copytree(tiny_llama_dir(), model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    done = atoll_serve(str(model))
    assert done.returncode == 11
    assert "model.safetensors" in done.stderr
    weights.unlink()
    assert "safetensors" in atoll_serve(str(model)).stderr


def test_a_taken_port_and_a_wrong_certificate_are_named_at_once(
    tiny_llama_dir: Callable[..., Path], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = atoll_serve(str(tiny_llama_dir()), f"--port={taken.getsockname()[1]}")
    assert done.returncode == 2
    assert "--port" in done.stderr
    (tmp_path / "pem").write_text("no certificate")
    done = atoll_serve(str(tiny_llama_dir()), f"--ssl-certfile={tmp_path / 'pem'}", f"--ssl-keyfile={tmp_path / 'pem'}")
    assert done.returncode == 2
    assert "--ssl-certfile" in done.stderr


# -- the running service


class Service:
    """`atoll serve` on a tiny model."""

    def __init__(self, model: Path, directory: Path, *flags: str) -> None:
        self.log = directory / f"log-{time.monotonic_ns()}"
        self.runtime = directory / "run"
        self.runtime.mkdir(exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine.server.cli.serve", str(model), "--served-model-name", "tiny",
                 "--kv-cache-memory-bytes=4M", "--log-format=json", *flags],
                stdout=log, stderr=log, env=os.environ | {"XDG_RUNTIME_DIR": str(self.runtime)})

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def wait_for(self, message: str, seconds: float = READY_SECONDS) -> dict:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in self.lines():
                if message in line["message"] and line["logger"] == "atoll.serve":
                    return line
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    @property
    def engine(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def hold_engine(self) -> Future[psutil.Process]:
        """Suspend the engine as soon as its process is there."""
        def hold() -> psutil.Process:
            while True:
                for child in psutil.Process(self.process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if any("engine_process" in word for word in child.cmdline()):
                            child.suspend()
                            return child
                time.sleep(0.005)

        return ThreadPoolExecutor(1).submit(hold)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(40)

    def assert_nothing_is_left(self) -> None:
        assert list(self.runtime.iterdir()) == []


@contextlib.contextmanager
def running(model: Path, directory: Path, *flags: str) -> Iterator[Service]:
    service = Service(model, directory, *flags)
    try:
        yield service
    finally:
        service.stop()


@pytest.fixture
def port(free_port: Callable[[], int]) -> int:
    return free_port()


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}


def completion(http: httpx.Client, **fields) -> httpx.Response:
    return http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "temperature": 0} | fields)


def read_stream(http: httpx.Client, **fields) -> list[str]:
    """The data lines of a streamed completion."""
    body = {"model": "tiny", "prompt": "hi", "stream": True, "ignore_eos": True} | fields
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        return [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]


def until_healthy(http: httpx.Client, seconds: float = READY_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if http.get("/health").status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError("not healthy in time")


def test_life_of_a_service(tiny_llama_dir: Callable[..., Path], tmp_path: Path, port: int) -> None:
    """Answers while it loads, serves, survives kill -9 of its engine, drains on Ctrl-C."""
    with (running(tiny_llama_dir(), tmp_path, f"--port={port}") as service,
          httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http):
        # loading; the engine is held there: on a busy machine it may be done before the first request gets through
        held = service.hold_engine()
        deadline = time.monotonic() + 60
        early = None
        while early is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                early = http.post("/v1/chat/completions", json=CHAT)
        assert early is not None
        assert early.status_code == 503
        assert early.json()["error"]["code"] == "model_loading"
        assert int(early.headers["retry-after"]) > 0
        assert http.get("/health").status_code == 503
        held.result(timeout=20).resume()

        # ready
        ready = service.wait_for("ready")
        assert ready["url"] == f"http://127.0.0.1:{port}/v1"
        until_healthy(http)
        answer = http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 5, "ignore_eos": True}).json()
        assert answer["usage"]["completion_tokens"] == 5
        assert any("Memory plan" in line["message"] for line in service.lines())

        # the engine is killed in the middle of a stream
        first = service.engine
        threading.Timer(0.3, first.kill).start()
        lines: list[str] = []
        for _ in range(50):  # streams of a tiny model are short: keep them coming until one is hit
            try:
                lines = read_stream(http, max_tokens=450)
            except AssertionError:
                break
            if "error" in lines[-1] or '"error"' in "".join(lines[-2:]):
                break
        else:
            raise AssertionError("the kill hit no stream")
        assert http.get("/health").status_code == 503
        until_healthy(http)
        assert service.engine.pid != first.pid
        assert completion(http, max_tokens=3).status_code == 200
        assert "SIGKILL" in service.wait_for("was killed by")["message"]

        # Ctrl-C lets a running stream end
        result: list[str] = []
        streaming = threading.Thread(target=lambda: result.extend(read_stream(http, max_tokens=450)))
        streaming.start()
        time.sleep(0.2)
        service.process.send_signal(signal.SIGINT)
        streaming.join(30)
        assert result[-1] == "[DONE]"
        assert service.process.wait(30) == 0
        service.assert_nothing_is_left()
        text = service.log.read_text()
        assert "hello" not in text  # no prompt in any log line
        access = [line for line in service.lines() if line["logger"] == "atoll.access"]
        assert {"POST /v1/chat/completions", "POST /v1/completions"} == {line["message"] for line in access}
        assert {503, 200} == {line["status"] for line in access}


def test_a_second_ctrl_c_stops_now(tiny_llama_dir: Callable[..., Path], tmp_path: Path, port: int) -> None:
    with running(tiny_llama_dir(), tmp_path, f"--port={port}") as service:
        service.wait_for("ready")
        engine = service.engine
        with socket.create_connection(("127.0.0.1", port)) as stuck:  # a request whose body never comes
            stuck.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\ncontent-type: application/json\r\n"
                          b"content-length: 100\r\n\r\n{")
            time.sleep(0.3)
            service.process.send_signal(signal.SIGINT)
            time.sleep(0.7)
            assert service.process.poll() is None
            service.process.send_signal(signal.SIGINT)
            assert service.process.wait(30) == 130
        assert not engine.is_running()
        service.assert_nothing_is_left()


def test_ctrl_c_while_loading_leaves_nothing(tiny_llama_dir: Callable[..., Path], tmp_path: Path, port: int) -> None:
    with running(tiny_llama_dir(), tmp_path, f"--port={port}") as service:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/livez").status_code:
                    break
        engine = service.engine
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(20) == 0
        assert not engine.is_running()
        service.assert_nothing_is_left()


def test_the_engine_dies_with_a_killed_supervisor_and_the_next_one_sweeps_up(
    tiny_llama_dir: Callable[..., Path], tmp_path: Path, port: int
) -> None:
    with running(tiny_llama_dir(), tmp_path, f"--port={port}") as service:
        service.wait_for("ready")
        engine = service.engine
        service.process.kill()
        service.process.wait()
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.wait(30)
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
        (left,) = service.runtime.iterdir()
        os.utime(left, (1, 1))
    with running(tiny_llama_dir(), tmp_path, f"--port={port}") as service:
        service.wait_for("ready")
        assert left not in service.runtime.iterdir()
        assert service.stop() == 0


def test_giving_up_on_an_engine_that_does_not_stay_up(
    tiny_llama_dir: Callable[..., Path], tmp_path: Path, port: int
) -> None:
    with running(tiny_llama_dir(), tmp_path, f"--port={port}", "--max-restarts=0") as service:
        service.wait_for("ready")
        service.engine.kill()
        assert service.process.wait(20) == 40
        assert "SIGKILL" in service.lines()[-1]["message"]
        service.assert_nothing_is_left()


def test_a_flag_that_only_the_engine_can_judge_ends_the_service(
    tiny_llama_dir: Callable[..., Path], tmp_path: Path, port: int
) -> None:
    with running(tiny_llama_dir(), tmp_path, f"--port={port}", "--max-model-len=1M") as service:
        assert service.process.wait(READY_SECONDS) == 2
        assert "--max-model-len" in service.lines()[-1]["message"]
        service.assert_nothing_is_left()


def test_http_over_a_unix_socket(tiny_llama_dir: Callable[..., Path], tmp_path: Path) -> None:
    uds = tmp_path / "http.sock"
    with (running(tiny_llama_dir(), tmp_path, f"--uds={uds}") as service,
          httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://x", timeout=30) as http):
        service.wait_for("ready")
        assert completion(http, max_tokens=3, ignore_eos=True).json()["usage"]["completion_tokens"] == 3
        assert uds.stat().st_mode & 0o777 == 0o660
        assert service.stop() == 0
    assert not uds.exists()


def test_tls_and_keys(tiny_llama_dir: Callable[..., Path], tmp_path: Path, port: int) -> None:
    import hashlib

    key = "sk-atoll-test"
    keys = tmp_path / "keys.json"
    digest = hashlib.sha256(key.encode()).hexdigest()
    keys.write_text(json.dumps({"keys": [{"id": "k", "name": "t", "sha256": digest}]}))
    certificate, private = self_signed(tmp_path)
    flags = (f"--port={port}", f"--api-key-file={keys}", f"--ssl-certfile={certificate}", f"--ssl-keyfile={private}")
    context = ssl.create_default_context(cafile=str(certificate))
    with (running(tiny_llama_dir(), tmp_path, *flags) as service,
          httpx.Client(base_url=f"https://localhost:{port}", verify=context, timeout=30) as http):
        assert service.wait_for("ready")["url"].startswith("https://")
        assert completion(http).status_code == 401
        http.headers["authorization"] = f"Bearer {key}"
        assert completion(http, max_tokens=2).status_code == 200
        began = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - began < 10  # an idle TLS connection, such as this client's, does not hold it up
        assert key not in service.log.read_text()
        access = [line for line in service.lines() if line["logger"] == "atoll.access"]
        assert [(line["status"], line.get("key")) for line in access] == [(401, None), (200, "k")]
