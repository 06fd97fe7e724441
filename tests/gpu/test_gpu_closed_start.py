"""The engine starts on a GPU with no compiler on the path, no network, and a home that nobody can write to.

A child process (closed_child.py) does it and notes every program it starts: Triton's own assembler, ptxas, is the only
one allowed. The network is taken away by a namespace where the system permits it, else by refusing connections.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

HERE = Path(__file__).parent
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "vocab_size": 1000, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "eos_token_id": 0,
}  # fmt: skip


def no_network() -> list[str]:
    """The words that start a program in an empty network namespace; none if this system forbids it."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return []
    for words in ([unshare, "--net"], [unshare, "--user", "--map-root-user", "--net"]):
        if subprocess.run([*words, sys.executable, "-c", ""], capture_output=True, check=False).returncode == 0:
            return words
    return []


def start(directory: Path, device: str = "cuda", **environment: str) -> dict:
    """Start the engine in a closed process, with `environment` on top of next to nothing."""
    model, path, temporary = (directory / name for name in ("model", "path", "tmp"))
    for made in (model, path, temporary):
        made.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    keep = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "LANG")
    closed = {name: os.environ[name] for name in keep if name in os.environ}
    closed |= {
        "PATH": str(path), "HOME": "/proc", "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *filter(None, sys.path)]),
    }  # fmt: skip
    namespace = no_network()
    child = [sys.executable, str(HERE / "closed_child.py"), str(model), device, str(time.time())]
    done = subprocess.run(
        [*namespace, *child, "0" if namespace else "1"], env=closed | environment, cwd=directory, capture_output=True,
        text=True, timeout=280, check=False,
    )  # fmt: skip
    reports = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    assert reports, done.stdout[-2000:]
    report = json.loads(reports[-1].removeprefix("REPORT "))
    report["closed_by"] = "an empty network namespace" if namespace else "refused connections"
    assert report["tokens"] == [24] * 6
    assert report["connections"] == []
    assert not namespace or set(report["interfaces"]) <= {"lo"}
    assert report["on_path"] == [], "the path holds programs"
    assert strangers(report["programs"]) == [], "programs other than our workers and Triton's assembler were started"
    return report


def strangers(programs: list[list[str]]) -> list[list[str]]:
    """The started programs that are neither the ptxas that comes with Triton nor our own workers, which compile."""
    import triton

    bundled = Path(triton.__file__).resolve().parent / "backends/nvidia/bin"
    return [words for words in programs if not _is_ptxas(Path(words[0]), bundled) and not is_worker(words)]


def is_worker(words: list[str]) -> bool:
    return words == [sys.executable, "-P", "-m", "engine.kernels.runtime.compile_worker"]


def _is_ptxas(program: Path, bundled: Path) -> bool:
    return program.is_absolute() and program.resolve().parent == bundled and program.name.startswith("ptxas")


def test_it_starts_closed_and_keeps_kernels_in_a_private_place(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    report = start(tmp_path)
    cache = Path(report["cache"])
    assert cache.parent == tmp_path / "tmp"
    assert not cache.exists(), "a temporary cache ends with its process"
    assert any(is_worker(words) for words in report["programs"]), "kernels must have been compiled"
    with capsys.disabled():
        print(f"\nclosed start by {report['closed_by']}, nothing compiled before: ready after "
              f"{report['ready_s']:.1f} s, first token {report['first_token_s']:.1f} s")  # fmt: skip


def test_a_second_start_compiles_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """With a cache directory of systemd's kind."""
    kept = tmp_path / "cache"
    kept.mkdir()
    first, second = (start(tmp_path, CACHE_DIRECTORY=str(kept)) for _ in range(2))
    for report in (first, second):
        assert report["cache"] == str(kept / "triton")
    assert stat.S_IMODE((kept / "triton").stat().st_mode) == 0o700
    compiled = [words for words in second["programs"] if "--version" not in words]
    assert compiled == [], f"compiled again: {len(compiled)} kernels"
    with capsys.disabled():
        print(f"\nclosed start again, kernels at hand: ready after {second['ready_s']:.1f} s, first token "
              f"{second['first_token_s']:.1f} s")  # fmt: skip


def test_the_watch_would_see_a_compiler() -> None:
    assert strangers([["/usr/bin/cc", "-shared", "x.c"], ["gcc", "x.c"], ["ptxas", "x.ptx"]]) != []
    assert len(strangers([["/sbin/ldconfig", "-p"], ["/usr/local/cuda/bin/ptxas", "x"]])) == 2
