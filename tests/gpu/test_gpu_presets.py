"""The white paper's presets on this GPU, in their real shapes and with exactly their flags: they start and serve.

Weights are random (load_format="dummy"): what is tested is that flags, memory plan, kernels and graphs of these models
go together. Each preset has a process of its own, whose share of the card is what its flags say, and an empty cache of
kernels, as at a first start. A card that cannot hold one is no reason to fail: it is skipped, and says so.
"""

import gc
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import preset_commands
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONFIGS = ROOT / "engine" / "bench" / "configs"
NEEDS = {"gemma4-31b": 44, "qwen3.6-27b": 40, "gemma4-26b-a4b": 38}  # GiB: fp8 weights, a step, and some pages


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def start(name: str, kernels: Path) -> dict:
    gc.unfreeze()  # engines of earlier tests of this process
    gc.collect()
    torch.cuda.empty_cache()  # the presets ask for nearly all of the card
    free, total = torch.cuda.mem_get_info()
    print(f"\n{name}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB free before it starts")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "TRITON_CACHE_DIR": str(kernels),
    }  # fmt: skip
    command = [sys.executable, str(HERE / "preset_child.py"), str(time.time())]
    done = subprocess.run(
        [*command, *preset_commands.argv(name, CONFIGS / name)], env=environment, cwd=ROOT, capture_output=True,
        text=True, timeout=280, check=False,
    )  # fmt: skip
    reports = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
    assert reports, done.stdout[-2000:]
    return json.loads(reports[-1].removeprefix("REPORT "))


@pytest.mark.parametrize("name", list(NEEDS))
def test_a_preset_starts_and_serves(name: str, kernels: Path, capsys: pytest.CaptureFixture) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    if torch.cuda.mem_get_info()[1] < NEEDS[name] * 2**30:
        pytest.skip(f"{name} in fp8 takes {NEEDS[name]} GiB")
    with capsys.disabled():
        report = start(name, kernels)
        print(report["plan"])
        print(f"{name}: ready after {report['seconds to be ready']:.1f} s with an empty cache of kernels "
              f"({report['seconds to import']:.1f} s of it imports)")  # fmt: skip
        for what in ("served", "once", "twice", "longest"):
            print(f"{name}: {what:8} {report[what]}")

    assert report["device"].startswith("cuda")
    assert report["quantized"] > 30, "products in fp8"
    gemma = name.startswith("gemma")
    assert report["cache dtypes"] == (["torch.float8_e4m3fn"] if gemma else ["torch.bfloat16"])
    assert report["has states"] is not gemma
    assert report["windows"] == ([None, 1024] if gemma else [None])
    # The plan honours what was asked for, and says so.
    assert report["max_model_len"] == (32767 if gemma else 32768)
    if gemma:
        assert report["max_num_seqs"] == 8
        assert report["served"]["running"] == 8, "eight at a time, and the others wait"
    else:
        assert report["max_num_seqs"] >= 8
        assert report["served"]["running"] == 10
    assert f"{report['max_model_len']:,}" in report["plan"] or str(report["max_model_len"]) in report["plan"]

    assert report["served"]["tokens"] == [16] * 10
    for what in ("served", "once", "twice", "longest"):
        assert report[what]["errors"] == []
        assert math.isfinite(report[what]["lowest"])
    assert report["longest"]["tokens"] == [8], "a request as long as the context"
    assert report["once"]["cached"] == 0
    assert report["twice"]["cached"] == 8192, "a prefix of 8k tokens is found at its second sighting"
    assert report["pages in use"] == report["failures"] == report["preemptions"] == 0
