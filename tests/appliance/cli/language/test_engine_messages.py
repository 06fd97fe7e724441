"""Why an engine or a gateway does not start, as a Korean operator reads it; in English nothing changes."""

import ast
import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_llama import save_tiny_llama

from engine import errors
from engine.config import EngineConfig
from engine.core.kv import planner
from engine.core.kv.planner import MemoryBudget
from engine.errors import AtollError, ConfigError, ModelError
from engine.kernels.runtime.host_memory import HostMemoryError
from engine.message import from_json, joined, msg, to_json
from engine.models.loading.checkpoint import check_checkpoint
from engine.server.access.auth import KeyFile
from engine.server.http.exposure import check_exposure
from engine.server.http.listening import bind_tcp
from engine.server.ipc import framing
from engine.server.ipc.client import EngineClient
from engine.server.process import gpu_ready
from engine.server.process.engine_child import EngineChild, EngineFailedError
from engine.server.settings.commands import parse_engine, parse_gateway, parse_serve
from engine.server.settings.options import ServeOptions
from engine.server.settings.server_file import check_gpus, engine_argv_of, model_names
from engine.worker.startup import embedding_offload, memory, resolve
from engine.worker.startup.memory import GpuMemory
from installer.base.i18n import libraries_in, told

KOREAN = {"LANG": "ko_KR.UTF-8", "LC_ALL": "", "LC_MESSAGES": "", "TERM": "xterm", "ATOLL_LANG": ""}
ENGLISH = KOREAN | {"LANG": "en_US.UTF-8"}
SENTENCE = re.compile(r"[A-Za-z]{2,}(?: [A-Za-z]{2,}){2,}")
GIB = 1 << 30


def read_in_korean(error: AtollError) -> str:
    """As `complain` prints it; messages that cross a process border are translated alike."""
    said = f"{told(error.message, 'ko')} {told(error.hint, 'ko')}".strip()
    arrived = from_json(json.loads(json.dumps(to_json(joined(filter(None, (error.message, error.hint)), " ")))))
    assert arrived == str(error)
    assert told(arrived, "ko") == said
    return said


def assert_korean(text: str) -> None:
    """Contains no run of English words, except commands, paths and names."""
    assert re.search("[가-힣]", text), text
    kept = re.sub(r"'[^']*'|\batoll(?: [\w./-]+)+|[\w./-]*[/_][\w./-]*", "@", text)
    assert not SENTENCE.search(kept), text


def refusal(act: Callable[[], object]) -> AtollError:
    with libraries_in("ko"), pytest.raises(AtollError) as caught:
        act()
    return caught.value


# -- the program


def atoll(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "appliance.cli", *words], capture_output=True, encoding="utf-8",
                          env=os.environ | {"PYTHONUTF8": "1"} | environment)  # fmt: skip


def test_serve_says_in_korean_why_it_does_not_start() -> None:
    done = atoll(KOREAN, "serve", "--model", "/nowhere")
    assert (done.returncode, done.stderr) == (
        11, "atoll serve: /nowhere: 디렉터리가 아닙니다. 모델 디렉터리(config.json, *.safetensors, "
            "tokenizer.json)의 경로를 주십시오. 모델 허브의 이름은 찾지 않습니다.\n")  # fmt: skip


@pytest.mark.parametrize(("environment", "words"), [(ENGLISH, ()), (KOREAN, ("--lang", "en"))])
def test_and_in_english_what_it_said_before(environment: dict[str, str], words: tuple[str, ...]) -> None:
    done = atoll(environment, "serve", "--model", "/nowhere", *words)
    assert (done.returncode, done.stderr) == (
        11, "atoll serve: /nowhere is not a directory. Give the path of a model directory (config.json, *.safetensors, "
            "tokenizer.json); names of a model hub are not looked up.\n")  # fmt: skip


@pytest.mark.parametrize(("words", "said"), [
    (("gateway", "--config", "/x.toml"), "atoll gateway: --config /x.toml: 파일이나 디렉터리가 없습니다.\n"),
    (("engine", "--model", "/nowhere"), "atoll engine: 수신할 Unix 소켓을 --uds로 주어야 합니다.\n"),
    (("serve", "/m", "--lang", "ko", "--port", "70000"),
     "atoll serve: --port 값은 0부터 65535까지여야 합니다. 받은 값: 70000.\n"),
])  # fmt: skip
def test_so_do_the_programs_of_the_units(words: tuple[str, ...], said: str) -> None:
    done = atoll(KOREAN, *words)
    assert (done.returncode, done.stderr) == (2, said)


def on_a_terminal(environment: dict[str, str], *words: str) -> tuple[int, str]:
    """Exit status, and what is written to a terminal."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        process = subprocess.Popen([sys.executable, "-m", "appliance.cli", *words], stdin=theirs, stdout=theirs,
                                   stderr=theirs, env=os.environ | {"PYTHONUTF8": "1"} | environment)  # fmt: skip
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # EIO: nobody has it open any more
            while data := screen.read(65536):
                seen += data
        return process.wait(), seen.decode().replace("\r\n", "\n")


def test_what_only_the_engine_finds_out_is_logged_in_english_and_then_told(tmp_path: Path) -> None:
    """The reason comes over the socket as one text, message and hint; the gateway's program says it."""
    save_tiny_llama(tmp_path / "model")
    words = ("serve", str(tmp_path / "model"), "--device", "cpu", "--port", "0", "--kv-cache-memory-bytes", "1")
    status, korean = on_a_terminal(KOREAN, *words)
    last = korean.splitlines()[-1]
    assert status == 2
    assert last.startswith("atoll serve: 엔진을 시작하지 못했습니다: --kv-cache-memory-bytes 1에는 토큰 하나도 ")
    assert last.endswith("값을 올리거나 옵션을 빼십시오.")
    into_a_file = atoll(KOREAN, *words)
    for said in (korean, into_a_file.stderr):
        assert "The engine could not start: --kv-cache-memory-bytes 1 is too small for a single token" in said
    assert (into_a_file.returncode, "atoll serve:" in into_a_file.stderr) == (2, False)


def test_what_was_logged_is_not_said_twice(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "model")
    status, seen = on_a_terminal(
        ENGLISH, "serve", str(tmp_path / "model"), "--device", "cpu", "--port", "0", "--kv-cache-memory-bytes", "1")
    assert (status, "atoll serve:" in seen, "is too small for a single token" in seen) == (2, False, True)


# -- the errors


@pytest.mark.parametrize("line", [
    "/m --trust-remote-code", "/m --api-key sk-secret", "/m --quantization fp8 --device cpu",
    "/m -q bitsandbytes --device cpu", "/m --kv-cache-dtype fp8 --device cpu",
    "/m --tensor-parallel-size 2 --device cpu", "/m --pipeline-parallel-size 2", "/m --data-parallel-size 2",
    "/m --block-size 24", "/m --tokenizer /other",
    "/m --speculative-config {}", "/m --max-model-length 3", "/m --xyzzy", "/m --port 99999", "/m --port http",
    "/m --port", "/m --max-model-len 0", "/m --max-model-len 1.5", "/m --max-num-seqs many",
    "/m --gpu-memory-utilization 1.5", "/m --gpu-memory-utilization much", "/m --dtype int8", "/m --ssl-certfile x",
    "/m --api-key-file /nonexistent/keys", "/m --api-key-file /", "/m --config /nonexistent.toml",
    "/m --tool-call-parser hermit", "/m --reasoning-parser qwen", "/m --lora-modules x", "/m --hf-token x",
    "/m --allowed-origins *",
    "/m --generation-config /x", "/m --served-model-name", "/m --enforce-eager=1", "/m /n", "--port 80",
    "/m --shutdown-timeout -1", "/m --max-restarts -1", "/m --per-layer-embeddings gpu --device cpu",
    "/m --config pyproject.toml", "/m --config README.md",
])  # fmt: skip
def test_flags(line: str) -> None:
    assert_korean(read_in_korean(refusal(lambda: parse_serve(line.split()))))


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = refusal(lambda: resolve.choose_device(EngineConfig(Path("/m"), ["m"], device="cuda")))
    assert_korean(read_in_korean(error))


@pytest.mark.parametrize(("capability", "free"), [((7, 5), 80), ((9, 0), 3)])
def test_a_gpu_that_is_too_old_or_too_full(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], free: int
) -> None:
    facts = {
        "is_available": True, "current_device": 0, "get_device_name": "NVIDIA A100 80GB", "empty_cache": None,
        "get_device_capability": capability, "mem_get_info": (free * GIB, 80 * GIB),
    }  # fmt: skip
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    error = refusal(lambda: resolve.choose_device(EngineConfig(Path("/m"), ["m"], device="cuda")))
    said = read_in_korean(error)
    assert "NVIDIA A100 80GB" in said
    assert_korean(said.replace("NVIDIA A100 80GB", ""))


@pytest.mark.parametrize("utilization", [0.5, 0.9])
@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("tables", [0, 5 * GIB])
def test_weights_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, utilization: float, quantization: str | None, tables: int
) -> None:
    """The hint is put together from what can still be changed."""
    monkeypatch.setattr(memory, "loaded_bytes", lambda model: 90 * GIB)
    table = SimpleNamespace(on_host=False, weight=SimpleNamespace(nbytes=tables))
    model: Any = SimpleNamespace(lookup_tables=lambda: [table] if tables else [])
    config = EngineConfig(Path("/m"), ["m"], gpu_memory_utilization=utilization, quantization=quantization)
    gpu = GpuMemory(torch.device("cuda", 0), 80 * GIB, others=GIB)
    error = refusal(lambda: memory.check_weights_fit(model, config, gpu))
    said = read_in_korean(error)
    assert_korean(said)
    assert "90.00 GiB" in said
    assert ("--quantization fp8" in said, "--per-layer-embeddings" in said) == (quantization is None, bool(tables))
    # As it arrives from another process, in one piece.
    last_words = from_json(to_json(joined((error.message, error.hint), " ")))
    whole = ConfigError(msg("The engine could not start: {last_words}", last_words=last_words))
    assert read_in_korean(whole) == f"엔진을 시작하지 못했습니다: {said}"


def test_a_context_that_does_not_fit() -> None:
    budget = MemoryBudget(80 * GIB, 70 * GIB, 60 * GIB, 2 * GIB, graphs=GIB, overhead=GIB, buffers=GIB)
    said = read_in_korean(planner._too_long(budget, 9 * GIB, 131072, 5 * GIB, 65536))
    assert_korean(said)
    assert "가중치 60.00 GiB + 부가 메모리 1.00 GiB + 활성값 2.00 GiB + 그래프 1.00 GiB + 스텝 버퍼 1.00 GiB" in said


def test_tables_that_have_no_room_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise HostMemoryError(msg("there is no CUDA driver ({error})", error="x"))

    wanted = EngineConfig(Path("/m"), ["m"], per_layer_embeddings="host")
    table = SimpleNamespace(weight=SimpleNamespace(nbytes=5 * GIB), keep_on_host=fail)
    model: Any = SimpleNamespace(lookup_tables=lambda: [table])
    for available in (GIB, 80 * GIB):
        monkeypatch.setattr(embedding_offload, "host_memory", lambda available=available: (80 * GIB, available))
        refused = refusal(lambda: embedding_offload.keep_tables(model, wanted, torch.device("cuda")))
        assert_korean(read_in_korean(refused))


@pytest.mark.parametrize("status", [1, -9, -11])
@pytest.mark.parametrize("was_ready", [True, False])
def test_an_engine_that_keeps_ending(status: int, was_ready: bool) -> None:
    child = EngineChild(ServeOptions(EngineConfig(Path("/m"), ["m"]), max_restarts=2), EngineClient("/run/engine.sock"))
    child._was_ready = was_ready

    def crash() -> None:
        for _ in range(3):
            child.delay_after(status, "")

    error = refusal(crash)
    assert isinstance(error, EngineFailedError)
    assert_korean(read_in_korean(error))


def test_model_directories(tmp_path: Path) -> None:
    def said() -> str:
        error = refusal(lambda: check_checkpoint(tmp_path))
        assert isinstance(error, ModelError)
        return read_in_korean(error)

    seen = [said()]
    for config in ("[", "[]", "{}", '{"architectures": ["OddForCausalLM"]}', '{"auto_map": {"A": "b"}}'):
        (tmp_path / "config.json").write_text(config)
        seen.append(said())
    for text in seen:
        assert_korean(re.sub(r"Expecting value: .*\)", "", text))  # Python's own words of what JSON wants
    save_tiny_llama(tmp_path / "model")
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    whole = weights.read_bytes()
    for damage in (whole[:-8], whole[:4], b"\xff" * 64, b"\2" + b"\0" * 7 + b"[]"):
        weights.write_bytes(damage)
        assert_korean(read_in_korean(refusal(lambda: check_checkpoint(tmp_path / "model"))))
    weights.unlink()
    assert_korean(read_in_korean(refusal(lambda: check_checkpoint(tmp_path / "model"))))


def test_addresses_sockets_and_keys(tmp_path: Path) -> None:
    taken = bind_tcp("127.0.0.1", 0)
    (tmp_path / "file").write_text("{}")
    refused: list[Callable[[], object]] = [
        lambda: bind_tcp("127.0.0.1", taken.getsockname()[1]), lambda: bind_tcp("192.0.2.1", 0),
        lambda: check_exposure("0.0.0.0", None, tls=False), lambda: check_exposure("", None, tls=False),
        lambda: framing.check_path(tmp_path / ("x" * 120)), lambda: framing.check_path(tmp_path / "no/engine.sock"),
        lambda: framing.listen(tmp_path / "file"), lambda: framing.PeerPolicy.parse(["nobody-of-that-name"], []),
        lambda: KeyFile(tmp_path / "no"),
    ]  # fmt: skip
    with taken:
        for act in refused:
            said = read_in_korean(refusal(act))
            assert_korean(re.sub(r"\{.*\}|\[Errno.*\]\s[\w ]+", "", said))


def test_settings_files(tmp_path: Path) -> None:
    path = tmp_path / "atoll.toml"
    refused: list[tuple[str, Callable[[], object]]] = [
        ("", lambda: engine_argv_of("chat", path)), ("[models.chat]", lambda: engine_argv_of("chat", path)),
        ("[models.'A b']", lambda: model_names(path)), ("models = 1", lambda: model_names(path)),
        ("[gateway]\nconfig = 'x'", lambda: parse_gateway(["--config", str(path)])),
        ("[gateway]\nhost = {}", lambda: parse_gateway(["--config", str(path)])),
        ("", lambda: parse_gateway(["--config", str(path), "chat"])),
        ("", lambda: parse_gateway(["--publish", "/x"])),
        ("", lambda: check_gpus(["first"])), ("", lambda: check_gpus(["0", "0"])),
        ("", lambda: parse_engine(["--model", "/m", "--uds", "/s", "--gpus", "0", "--device", "cpu"])),
    ]  # fmt: skip
    for text, act in refused:
        path.write_text(text)
        assert_korean(read_in_korean(refusal(act)))


@pytest.mark.parametrize(("problem", "fix"), [
    (msg("The NVIDIA driver is not loaded."), "modprobe nvidia; dmesg | grep -i nvidia"),
    (msg("Driver and library have different versions (the loaded driver is {driver}).", driver="570.86"),
     msg("reboot, then keep the packages from upgrading: apt-mark hold 'nvidia-*'")),
    *((msg("NVML answers: {said}.", said=said), "nvidia-smi; dmesg | grep -i nvrm")
      for said in gpu_ready._WORDS.values()),
])  # fmt: skip
def test_a_gpu_that_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problem: str, fix: str
) -> None:
    monkeypatch.setattr(gpu_ready, "inspect_gpu", lambda: gpu_ready.Readiness(problem, fix))
    with errors.retelling(lambda text: told(text, "ko")):
        assert gpu_ready.main(["--timeout", "0"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("GPU를 아직 쓸 수 없습니다. ")
    command = fix.rpartition(": ")[2]
    assert said.endswith(f"{command}\n")
    assert_korean(said.removesuffix(f"{command}\n"))
    assert gpu_ready.main(["--timeout", "0"]) == 1
    assert capsys.readouterr().err == f"The GPU is not ready. {problem}\n  Next: {fix}\n"


@pytest.mark.parametrize("gpus", [["GPU-1"], ["GPU-1", "GPU-2"]])
def test_a_gpu_that_is_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpus: list[str]
) -> None:
    monkeypatch.setattr(gpu_ready, "inspect_gpu", lambda: gpu_ready.Readiness(driver="570.86", gpus=gpus))
    with errors.retelling(lambda text: told(text, "ko")):
        assert gpu_ready.main([]) == 0
    assert capsys.readouterr().out == f"GPU {len(gpus)}개 준비됨, 드라이버 570.86\n"


# -- the source


SPOKEN = {
    "ConfigError", "OutOfMemoryPlanError", "ModelError", "EngineFailedError", "HostMemoryError", "ArgumentTypeError",
}  # fmt: skip
ENGLISH_ONLY = {"bench", "llm.py", "tuning"}  # programs and an API that speak English only


def test_every_error_of_the_engine_is_a_message() -> None:
    """A finished sentence could not be told in another language."""
    engine = Path(errors.__file__).parent
    for path in engine.rglob("*.py"):
        if ENGLISH_ONLY & set(path.relative_to(engine).parts):
            continue
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", getattr(call.func, "attr", "")) in SPOKEN:
                for given in [*call.args, *(keyword.value for keyword in call.keywords)]:
                    constant = given.value if isinstance(given, ast.Constant) else ""
                    finished = isinstance(given, ast.JoinedStr) or " " in str(constant)
                    assert not finished, f"{path}:{given.lineno}"
