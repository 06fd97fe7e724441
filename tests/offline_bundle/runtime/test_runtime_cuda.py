"""The real thing for a server with a GPU: the CUDA build of torch and every package, on a machine without one.

What needs no GPU is shown here: what is on the medium, that tampering is found, how long an install takes, that the
unpacked code compiles a kernel for a GPU with nothing but what the medium brought. `make test-runtime-cuda`.
"""

import json
import os
import resource
import shutil
import subprocess
import time
import zipfile
from pathlib import Path

import pytest
from bundle_kit import refused
from runtime_kit import UNSHARE, bare_path, build, copy, flip, install, trees

from installer.release.code_tree import read_facts, verify_code
from offline_bundle.errors import BundleError
from offline_bundle.runtime import wheels as runtime_wheels
from offline_bundle.runtime.verify import inspect_runtime, verify_runtime
from offline_bundle.signing.keys import KeyPair, load_trusted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare(1) of util-linux"),
]
LIMIT = 90.0  # seconds for a whole install without the model's copy

# Compiles a kernel of the engine for an H100, with the medium's Triton and assembler; tells what it started for that.
COMPILE = """
import json, os, subprocess, sys
sys.path.insert(0, sys.argv[1])
started = []
class Watched(subprocess.Popen):
    def __init__(self, command, *more, **options):
        started.append(os.path.basename(command[0] if isinstance(command, list) else command.split()[0]))
        super().__init__(command, *more, **options)
subprocess.Popen = Watched
import torch
from engine.kernels.pointwise import norm
from engine.kernels.runtime import launcher
assert torch.version.cuda and not torch.cuda.is_available()
row = "*bf16!"
types = (row, None, row, row, None, None, "i32!", "fp32", "fp32")
constants = {"N": 1024, "BLOCK": 1024, "WIDE": False}
binary = launcher.compile_for(norm._rms_norm_kernel, types, constants, 4, 3, (9, 0))
print(json.dumps({"bytes": len(binary.asm["cubin"]), "started": sorted(set(started))}))
"""


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory, vendor: KeyPair, own_wheel: Path) -> Path:
    """Built once; packages come from .cache after the first time (2.7 GB)."""
    out, packages = tmp_path_factory.mktemp("cuda") / "medium", runtime_wheels.requirements()
    began = time.monotonic()
    try:
        build(out, vendor, own_wheel=own_wheel, packages=packages, torch="cuda")
    except BundleError as e:
        if "CPU build only" in e.message or "has the CUDA build" in e.message:
            pytest.skip(str(e))
        raise
    manifest = inspect_runtime(out / "runtime")
    print(f"\nbuilt in {time.monotonic() - began:.0f} s, {manifest.total_bytes >> 20} MiB")
    return out


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, medium: Path, vendor: KeyPair) -> Path:
    """The code, installed without a network; the time that it took is held against the limit."""
    base = tmp_path_factory.mktemp("installed")
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = install(medium, bare_path(base / "path"), "--prefix", base / "p", "--trust-key", vendor.public_path)
    took, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    worked = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert "Code installed in" in done.stderr, done.stderr
    print(f"\ninstalled in {took:.1f} s, {worked:.1f} s of processor time")
    assert worked < LIMIT
    assert took < LIMIT or os.getloadavg()[0] > (os.cpu_count() or 1)  # a busy machine says nothing
    (name,) = trees(base / "p")
    return base / "p/opt/atoll/code" / name


def test_all_that_the_gpu_needs_and_nothing_else(medium: Path) -> None:
    runtime = medium / "runtime"
    requires = inspect_runtime(runtime).requires
    assert requires.torch is not None
    assert requires.cuda is not None
    assert requires.driver_min == runtime_wheels.DRIVER_MIN[requires.cuda.split(".")[0]]
    files = {path.name.split("-")[0].replace("_", "-").lower(): path for path in (runtime / "wheels").iterdir()}
    assert {"atoll", "torch", "triton", "nvidia-cublas", "nvidia-cuda-runtime", "nvidia-cuda-nvrtc"} <= files.keys()
    assert not {"pytest", "transformers", "openai", "ruff", "hypothesis", "pyright"} & files.keys()
    for name, path in files.items():
        tags = path.stem.split("-")[-1].split(".")
        assert all(tag == "any" or ("linux" in tag and tag.endswith("x86_64")) for tag in tags), path.name
        assert list((runtime / "licenses" / name.replace("_", "-")).iterdir()), name
    with zipfile.ZipFile(files["triton"]) as wheel:
        assert "triton/backends/nvidia/bin/ptxas" in wheel.namelist()


def test_it_verifies_and_a_changed_byte_does_not(medium: Path, vendor: KeyPair, tmp_path: Path) -> None:
    trusted = load_trusted([vendor.public_path], medium)
    total, began = inspect_runtime(medium / "runtime").total_bytes, time.monotonic()
    verify_runtime(medium / "runtime", trusted)
    print(f"\nverified at {(total >> 20) / (time.monotonic() - began):.0f} MiB/s (atoll)")
    path, check = bare_path(tmp_path / "path"), ("--trust-key", vendor.public_path, "--verify-only")
    began = time.monotonic()
    assert install(medium, path, *check).returncode == 0
    print(f"verified at {(total >> 20) / (time.monotonic() - began):.0f} MiB/s (install.sh)")
    for name in ("torch-", "nvidia_nvtx-"):
        bad = copy(medium, tmp_path / name)
        flip(next((bad / "runtime/wheels").glob(f"{name}*")))
        refused(11, name, lambda bad=bad: verify_runtime(bad / "runtime", trusted))
        done = install(bad, path, *check)
        assert (done.returncode, name in done.stderr) == (11, True), done.stderr
        shutil.rmtree(bad)
    lacking = copy(medium, tmp_path / "lacking")
    next((lacking / "runtime/wheels").glob("nvidia_cublas-*")).unlink()
    assert install(lacking, path, *check).returncode == 13


def test_what_lands_is_what_was_said(medium: Path, tree: Path) -> None:
    assert verify_code(tree) == []
    files = [path for path in tree.rglob("*") if path.is_file() and not path.is_symlink()]
    facts, requires = read_facts(tree), inspect_runtime(medium / "runtime").requires
    apparent = sum(path.stat().st_size for path in files)
    used = sum(path.stat().st_blocks * 512 for path in files)
    print(f"\non disk: {used >> 20} MiB in {len(files)} files; room asked for: {requires.disk_bytes >> 20} MiB")
    assert 0 <= apparent - facts["bytes"] < 64 << 10  # all but runtime.json
    wheels = sum(path.stat().st_size for path in (medium / "runtime/wheels").iterdir())
    assert used + wheels < requires.disk_bytes < (used + wheels) * 1.25


def test_a_kernel_is_compiled_for_a_gpu_without_a_compiler(tree: Path, tmp_path: Path) -> None:
    """Triton, its assembler and our launcher out of the medium: no C compiler, no stub, no driver."""
    path, cache = bare_path(tmp_path / "path"), tmp_path / "cache"
    environment = {"PATH": str(path), "HOME": str(tmp_path), "TRITON_CACHE_DIR": str(cache)}
    command = [UNSHARE, "-rn", path / "python3", "-I", "-S", "-B", "-c", COMPILE, tree / "lib"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["bytes"] > 1000
    # NVIDIA's bindings, which torch imports, ask ldconfig where libdl is; nobody asks for a compiler.
    assert "ptxas" in facts["started"], facts
    assert set(facts["started"]) <= {"ptxas", "ptxas-blackwell", "ldconfig"}, facts
    assert [p.name for p in cache.rglob("*.so")] == []


def test_the_gpu_is_missed_in_plain_words(tree: Path, tmp_path: Path, smollm2_dir: Path) -> None:
    run = {"capture_output": True, "text": True, "env": {"PATH": str(bare_path(tmp_path / "path"))}, "timeout": 300}
    command = [UNSHARE, "-rn", tree / "bin/atoll", "serve", smollm2_dir, "--device", "cuda"]
    done = subprocess.run(command, **run)
    assert done.returncode not in (0, 1), done.stderr
    assert "no CUDA GPU is usable" in done.stderr
    assert "Traceback" not in done.stderr
