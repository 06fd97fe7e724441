"""The memory plan on a real card: the share is kept, and what a refusal names starts.

The engine under test is a process of its own: its CUDA context counts too, and only from outside it can be seen.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine import LLM, SamplingParams
from engine.core.kv.planner import GIB
from engine.errors import OutOfMemoryPlanError

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

_ROOT = Path(__file__).parents[2]
_MODEL = _ROOT / "engine" / "bench" / "configs" / "qwen3-0.6b"
_SHAPE = {"max_num_batched_tokens": 2048, "max_num_seqs": 256}
_ENGINE = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
from engine import LLM, SamplingParams
llm = LLM(model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, device="cuda", **{options})
prompts = [{{"prompt_token_ids": [7 + i] * (100 + 37 * i)}} for i in range(24)]
params = SamplingParams(max_tokens=32, ignore_eos=True, top_p=0.9, presence_penalty=0.5, logprobs=5, prompt_logprobs=1)
llm.generate(prompts, params, use_tqdm=False)
print("served", flush=True)
sys.stdin.readline()
"""


def taken() -> int:
    """Bytes on the card in use by anybody."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@contextmanager
def serving(**options: object) -> Iterator[None]:
    """Inside: another process's engine stands, and has served requests that use every part of a step."""
    code = _ENGINE.format(options=options)
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(_MODEL)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT
    )
    try:
        assert child.stdout is not None
        said = child.stdout.readline()
        assert said == "served\n", f"the engine ended without serving (its log is on stderr): {said!r}"
        yield
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("kwargs", [{}, {"enforce_eager": True}, {"kv_cache_dtype": "fp8", "quantization": "fp8"}])
def test_the_share_is_kept_and_used(kwargs: dict) -> None:
    total, before = torch.cuda.mem_get_info()[1], taken()
    with serving(gpu_memory_utilization=0.3, **_SHAPE, **kwargs):
        used = taken() - before
    share = 0.3 * total
    numbers = f"{used / GIB:.2f} GiB in use of a share of {share / GIB:.2f} GiB"
    assert used <= share, numbers
    assert used >= share - GIB, numbers


@pytest.mark.parametrize("config, quantization", [
    ("qwen3-0.6b", "none"), ("gemma4-26b-a4b", "fp8"), ("qwen3.6-35b-a3b", "fp8"),
])  # fmt: skip
def test_a_fresh_process_takes_what_it_planned(config: str, quantization: str) -> None:
    """What a process's first graph takes is planned once, and no kernel has the driver set memory aside for what its
    threads cannot keep in registers: a kilobyte of each is 0.26 GiB of such a card. (Slices of heads of 512 numbers
    take 0.1 GiB, and are eight times as fast.)"""
    code = Path(__file__).with_name("plan_child.py")
    command = [sys.executable, str(code), config, quantization]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    off = found["taken"] - found["planned"]
    assert -0.15 <= off <= 0.02, f"{found['taken']} GiB taken, {found['planned']} GiB planned"
    assert found["kernels"] > 20
    most = {name: 448 if "_mixed_kernel" in name and " 512, 512, 256," in name else 256 for name in found["local"]}
    spilling = {name: local for name, local in found["local"].items() if local > most[name]}
    assert not spilling


def test_two_engines_share_a_card() -> None:
    total, before = torch.cuda.mem_get_info()[1], taken()
    with serving(gpu_memory_utilization=0.2, **_SHAPE), serving(gpu_memory_utilization=0.2, **_SHAPE):
        used = taken() - before
    assert 0.4 * total - 2 * GIB <= used <= 0.4 * total, f"{used / GIB:.2f} of {0.4 * total / GIB:.2f} GiB"


def test_the_context_that_a_refusal_names_starts() -> None:
    total = torch.cuda.mem_get_info()[1]
    options = {
        "model": _MODEL, "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", **_SHAPE,
        "gpu_memory_utilization": 5 * GIB / total,
    }  # fmt: skip
    with pytest.raises(OutOfMemoryPlanError) as refusal:
        LLM(max_model_len=40960, **options)
    largest = int(refusal.value.hint.split("--max-model-len ")[1].split(";")[0])
    llm = LLM(max_model_len=largest, **options)
    prompt = {"prompt_token_ids": [9] * (largest - 4)}
    [output] = llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    del llm, output
    fitted = LLM(max_model_len="auto", **options).engine.max_model_len
    assert abs(fitted - largest) <= largest / 5, "auto takes about what the refusal named"


def test_weights_larger_than_the_share_are_refused_at_once() -> None:
    with pytest.raises(OutOfMemoryPlanError, match="its weights take"):
        LLM(model=_MODEL, load_format="dummy", skip_tokenizer_init=True, device="cuda", gpu_memory_utilization=0.005)
