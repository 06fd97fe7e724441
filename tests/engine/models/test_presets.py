"""The white paper's commands, verbatim: what they ask for, what a CPU says to them, and that they serve.

The server is the real one, both processes, on tiny random checkpoints in the presets' layouts: multimodal files of
which the text model is used, with every kind of layer that the large ones have. A CPU refuses fp8; all other flags stay
as they are. The real shapes are started on a GPU by tests/gpu/test_gpu_presets.py.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import oracle
import preset_commands
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_gemma import SHAPES as GEMMA_SHAPES
from test_gemma import save_tiny_gemma
from tiny_llama import save_byte_tokenizer

from engine.errors import ConfigError
from engine.server.settings.commands import parse_serve

READY_SECONDS = 240  # of a busy machine
ON_A_GPU_ONLY = ("--quantization", "--kv-cache-dtype")
NAMES = list(preset_commands.COMMANDS)


def without_fp8(argv: list[str]) -> list[str]:
    kept, words = [], iter(argv)
    for word in words:
        if word in ON_A_GPU_ONLY:
            assert next(words) == "fp8"
        else:
            kept.append(word)
    return kept


@pytest.mark.parametrize("name", NAMES)
def test_flags_mean_what_they_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU: parsing needs none."""
    monkeypatch.setattr("engine.server.settings.commands.nvidia_driver_present", lambda: True)
    options = parse_serve(preset_commands.argv(name, "/models/m"))
    config = options.engine
    assert options.notes == [], "nothing is accepted and ignored"
    assert config.quantization == "fp8"
    assert config.tensor_parallel_size == 1
    assert config.enable_chunked_prefill
    assert config.enable_prefix_caching
    if name == "qwen3.6-27b":
        found = (config.dtype, config.kv_cache_dtype, config.gpu_memory_utilization, config.max_num_seqs)
        assert found == ("auto", "auto", 0.9, None)
        assert config.max_model_len == 32768
    else:
        found = (config.dtype, config.kv_cache_dtype, config.gpu_memory_utilization, config.max_num_seqs)
        assert found == ("bfloat16", "fp8", 0.95, 8)
        assert config.max_model_len == 32767


@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_refuses_fp8_in_a_sentence_that_names_the_flag(name: str) -> None:
    argv = preset_commands.argv(name, "/models/m")
    with pytest.raises(ConfigError, match="--quantization fp8 is not available on cpu") as refusal:
        parse_serve([*argv, "--device", "cpu"])
    assert refusal.value.hint
    if "--kv-cache-dtype" in argv:
        at = argv.index("--quantization")
        with pytest.raises(ConfigError, match="--kv-cache-dtype fp8 is not available on cpu"):
            parse_serve([*argv[:at], *argv[at + 2 :], "--device", "cpu"])


# -- the running service


def _wrapped(directory: Path, text: Path, architecture: str, extra: dict[str, torch.Tensor]) -> None:
    """A multimodal checkpoint around the text model in `text`."""
    save_byte_tokenizer(directory)
    config = json.loads((text / "config.json").read_text())
    tensors = load_file(text / "model.safetensors")
    prefixed = {n.replace("model.", "model.language_model.", 1): tensor for n, tensor in tensors.items()}
    save_file(prefixed | extra, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({
        "architectures": [architecture], "text_config": config | {"architectures": None},
        "vision_config": {"model_type": "vision"}, "dtype": "float32",
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }))


def _save_gemma4(directory: Path, text: Path, shape: str) -> None:
    save_tiny_gemma(text, GEMMA_SHAPES[shape] | {"max_position_embeddings": 40_000})
    extra = {f"model.{name}.weight": torch.ones(3) for name in ("vision_tower.x", "embed_vision.embedding_projection")}
    _wrapped(directory, text, "Gemma4ForConditionalGeneration", extra)


def _save_qwen36(directory: Path, text: Path) -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(2)
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16,
        linear_value_head_dim=16, max_position_embeddings=40_000, initializer_range=0.1, tie_word_embeddings=False,
    )).save_pretrained(text)  # fmt: skip
    extra = {"model.visual.x.weight": torch.ones(3), "mtp.fc.weight": torch.zeros(64, 128)}
    _wrapped(directory, text, "Qwen3_5ForConditionalGeneration", extra)


class Service:
    """`atoll serve` with a preset's flags, but for those that a CPU refuses."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.text, model = name, directory / "text", directory / "model"
        model.mkdir(parents=True)
        if name == "qwen3.6-27b":
            _save_qwen36(model, self.text)
        else:
            _save_gemma4(model, self.text, "gemma4_31b" if name == "gemma4-31b" else "gemma4_26b")
        self.model = str(model)
        self.log = directory / "log"
        flags = [*without_fp8(preset_commands.argv(name, model)), "--device=cpu", "--port=0", "--log-format=json"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine.server.cli.serve", *flags], stdout=log, stderr=log,
                env=os.environ | {"XDG_RUNTIME_DIR": str(directory)},
            )  # fmt: skip
        deadline = time.monotonic() + READY_SECONDS
        while not (ready := [line["url"] for line in self.lines() if "url" in line]):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
        self.http = httpx.Client(base_url=ready[0].removesuffix("/v1"), timeout=240)

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def complete(self, prompt: list[int], tokens: int = 12, **fields: object) -> dict:
        reply = self.http.post("/v1/completions", json={
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            **fields})  # fmt: skip
        assert reply.status_code == 200, reply.text
        return reply.json()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)


@pytest.fixture(scope="module", params=NAMES)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(request.param, tmp_path_factory.mktemp(request.param))
    yield service
    assert service.stop() == 0, service.log.read_text()


def prompts(count: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, 320, (n,), generator=generator).tolist() for n in lengths]


def test_it_starts_with_what_was_asked_for(service: Service) -> None:
    [model] = service.http.get("/v1/models").json()["data"]
    assert model["max_model_len"] == (32768 if service.name == "qwen3.6-27b" else 32767)
    log = service.log.read_text()
    assert "Not loaded, as the model has no use for it" in log, "the tensors of other parts are listed"
    if service.name != "qwen3.6-27b":
        assert "8 sequences" in log, log


def test_eight_requests_together_get_what_each_gets_alone(service: Service) -> None:
    asked = prompts(8, 90)
    alone = [service.complete(prompt)["choices"][0]["text"] for prompt in asked]
    with ThreadPoolExecutor(8) as pool:
        together = [answer["choices"][0]["text"] for answer in pool.map(service.complete, asked)]
    assert together == alone
    assert len(set(alone)) > 4
    if service.name == "qwen3.6-27b":  # float32 here: token for token what transformers says
        from engine.text.tokenizer import TextTokenizer

        tokenizer = TextTokenizer.load(service.model)
        for prompt, text in zip(asked, alone, strict=True):
            assert tokenizer.decode(oracle.greedy(service.text, tuple(prompt), 12)) == text


def test_a_long_prompt_that_repeats_is_found_in_the_cache(service: Service) -> None:
    """Longer than a step, and than the window; in whole pages, and up to a state that was kept."""
    prompt = [(i * i + 7 * i) % 300 + 3 for i in range(1500)]
    first, second = (service.complete(prompt, 4) for _ in range(2))
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    details = second["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= 1400, second["usage"]


def test_a_prompt_beyond_the_context_is_refused_with_the_limit(service: Service) -> None:
    reply = service.http.post("/v1/completions", json={"model": service.model, "prompt": [5] * 32768, "max_tokens": 1})
    assert reply.status_code == 400
    assert "maximum context length is 3276" in reply.text
