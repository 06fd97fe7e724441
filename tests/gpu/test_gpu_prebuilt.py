"""Kernels that came with the release, on a GPU: a start compiles nothing and answers the same; what the driver refuses
is compiled. Each start is a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_kit import checkpoint

from engine.kernels.runtime import prebuilt

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

ROOT = Path(__file__).parents[2]
FLAGS = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 1024}
START = """
import json, logging, sys
logging.basicConfig(format="%(message)s", level="INFO")
from engine import LLM, SamplingParams
from engine.kernels.runtime import origins
options = {"device": "cuda", "gpu_memory_utilization": 0.3, "skip_tokenizer_init": True, **json.loads(sys.argv[2])}
llm = LLM(model=sys.argv[1], **options)
params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
found = llm.generate([list(range(1, 40))], params)
print(json.dumps([origins.counts(), list(found[0].outputs[0].token_ids)]))
"""


def gpu() -> tuple[str, tuple[int, int]]:
    """The name of GPUS nearest to this one, and its capability."""
    capability = torch.cuda.get_device_capability()
    names = {(8, 0): "a100", (8, 6): "a10", (8, 9): "l40s", (9, 0): "h100", (10, 0): "b200", (12, 0): "rtxpro6000"}
    if capability not in names:
        pytest.skip("no such GPU is listed")
    return names[capability], capability


def run(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=500, check=False
    )


def start(model: Path, kernels: Path, cache: Path) -> tuple[dict[str, int], list[int], list[str]]:
    """(counts, tokens, lines of the log)"""
    done = run("-c", START, model, json.dumps(FLAGS), TRITON_CACHE_DIR=str(cache),
               ATOLL_PREBUILT_KERNELS=str(kernels))  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    counts, tokens = json.loads(done.stdout.splitlines()[-1])
    return counts, tokens, done.stderr.splitlines()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model") / "m", "qwen3")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    out = tmp_path_factory.mktemp("kernels")
    flags = [word for name, value in FLAGS.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = run("-m", "engine.prebuild", model, "--out", out, "--gpu", gpu()[0], *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def test_a_start_compiles_nothing_and_answers_as_without(model: Path, kernels: Path, tmp_path: Path) -> None:
    without = start(model, tmp_path / "none", tmp_path / "1")
    assert without[0]["release"] == 0
    assert without[0]["compiled"] > 20
    counts, tokens, log = start(model, kernels, tmp_path / "2")
    assert counts["release"] > 20
    assert counts["compiled"] <= 2, log  # of a GPU like, but not equal to, the listed one
    assert tokens == without[1]
    assert [line for line in log if line.startswith("Kernels: ")]


def test_kernels_of_another_gpu_are_refused_by_the_driver_and_compiled(
    model: Path, kernels: Path, tmp_path: Path
) -> None:
    """Machine code for another architecture under this one's name, with a toolchain and hashes that hold."""
    capability = gpu()[1]
    other, name = ((8, 0), "a100") if capability != (8, 0) else ((9, 0), "h100")
    flags = [word for name, value in FLAGS.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = run("-m", "engine.prebuild", model, "--out", tmp_path / "other", "--gpu", name, *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    fake = tmp_path / "fake" / ".".join(map(str, capability))
    shutil.copytree(tmp_path / "other" / ".".join(map(str, other)), fake)
    index = json.loads((fake / prebuilt.INDEX).read_bytes())
    index["toolchain"] = prebuilt.toolchain(capability)
    (fake / prebuilt.INDEX).write_text(json.dumps(index))
    counts, tokens, log = start(model, tmp_path / "fake", tmp_path / "cache")
    assert counts["release"] == 0
    assert len([line for line in log if "The prebuilt kernels in" in line]) == 1
    assert tokens == start(model, kernels, tmp_path / "cache 2")[1]
