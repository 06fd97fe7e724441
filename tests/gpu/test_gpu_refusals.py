"""What a GPU cannot do is refused in one sentence, with the number that would work; never a silent move to the CPU."""

import re
from pathlib import Path

import pytest
import torch
from gpu_kit import checkpoint, generated, on_gpu, prompts

from engine import SamplingParams
from engine.config import EngineConfig
from engine.errors import ConfigError, OutOfMemoryPlanError
from engine.worker.startup.resolve import choose_device

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

FEW_PAGES = {"kv_cache_memory_bytes": 1 << 20, "enforce_eager": True, "max_num_seqs": 4}  # some 680 tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("refusals") / "qwen3", "qwen3")


def assert_one_sentence(error: ConfigError) -> None:
    """The message is one sentence and the hint says what to do; no line breaks, no traceback."""
    assert "\n" not in str(error)
    assert len(re.findall(r"[.!?](?=\s|$)", error.message)) == 1, error.message
    assert error.message.endswith("."), error.message
    assert error.hint, error.message


def test_a_context_too_long_is_refused_with_the_largest_that_fits_and_auto_takes_it(model: Path) -> None:
    with pytest.raises(OutOfMemoryPlanError) as refused:
        on_gpu(model, max_model_len=4096, **FEW_PAGES)
    print(refused.value)
    assert_one_sentence(refused.value)
    assert refused.value.flag == "--max-model-len"
    assert "--max-model-len 4096" in refused.value.message
    found = re.search(r"The largest that fits is --max-model-len (\d+)", refused.value.hint)
    assert found, refused.value.hint
    largest = int(found[1])
    assert 500 < largest < 700, largest

    with pytest.raises(OutOfMemoryPlanError, match=f"The largest that fits is --max-model-len {largest}"):
        on_gpu(model, max_model_len=largest + 16, **FEW_PAGES)
    for wanted in (largest, "auto", None):
        llm = on_gpu(model, max_model_len=wanted, **FEW_PAGES)
        assert llm.engine.max_model_len == largest, f"max_model_len={wanted!r}"
    # And it really holds that many tokens.
    [prompt] = prompts(1, seed=8)
    ids = (prompt["prompt_token_ids"] * 700)[: largest - 3]
    answer = generated(llm, [{"prompt_token_ids": ids}], SamplingParams(max_tokens=None, ignore_eos=True))
    assert [len(tokens) for tokens in answer] == [3]


def test_a_share_that_holds_not_even_the_model_is_refused(model: Path) -> None:
    with pytest.raises(OutOfMemoryPlanError) as refused:
        on_gpu(model, gpu_memory_utilization=1e-4)
    print(refused.value)
    assert refused.value.flag == "--gpu-memory-utilization"
    assert "GiB" in refused.value.message or "MiB" in refused.value.message


@pytest.mark.alone  # it fills the card
def test_a_gpu_in_use_by_others_is_refused_with_the_share_that_is_left(model: Path) -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    others = torch.empty(free - total // 4, dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(ConfigError) as refused:
            on_gpu(model, gpu_memory_utilization=0.9)
        print(refused.value)
        assert_one_sentence(refused.value)
        assert refused.value.flag == "--gpu-memory-utilization"
        assert "GiB free" in refused.value.message
        found = re.search(r"use at most (0\.\d+)", refused.value.hint)
        assert found, refused.value.hint
        share = float(found[1])
        assert 0.2 <= share <= 0.25, share
        llm = on_gpu(model, gpu_memory_utilization=share, enforce_eager=True)
        assert len(generated(llm, prompts(1), SamplingParams(max_tokens=3, ignore_eos=True))[0]) == 3
    finally:
        del others
        torch.cuda.empty_cache()


@pytest.mark.parametrize("flags", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}], ids=["weights", "cache"])
def test_fp8_is_refused_on_no_gpu(model: Path, flags: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs without fp8 units keep activations in the model's precision (test_gpu_other_gpus.py)."""
    config = EngineConfig(model, device="cuda", gpu_memory_utilization=0.1, **flags)
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        assert choose_device(config).type == "cuda", f"fp8 was refused on compute capability {capability}"


def test_a_card_too_old_or_missing_is_refused_and_never_replaced_by_the_cpu(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model, device="cuda", gpu_memory_utilization=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
        for asked in (config, EngineConfig(model, gpu_memory_utilization=0.1)):  # asked for, and found by itself
            with pytest.raises(ConfigError) as refused:
                choose_device(asked)
            assert_one_sentence(refused.value)
            assert "7.5" in refused.value.message
            assert "8.0" in refused.value.message
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(ConfigError) as refused:
            choose_device(config)
        assert_one_sentence(refused.value)
        assert refused.value.flag == "--device"
