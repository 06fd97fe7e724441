"""The real thing: the CPU build of torch and every package, installed without a network, and how long it takes."""

import os
import resource
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from runtime_kit import UNSHARE, bare_path, build, install, trees

from installer.release.code_tree import verify_code
from offline_bundle.runtime import wheels
from offline_bundle.runtime.verify import inspect_runtime
from offline_bundle.signing.keys import KeyPair

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare(1) of util-linux"),
]
LIMIT = 90.0  # seconds for a whole install without the model's copy; this is its largest part


def test_the_whole_runtime(vendor: KeyPair, own_wheel: Path, tmp_path: Path) -> None:
    packages = wheels.requirements()
    medium = build(tmp_path / "medium", vendor, own_wheel=own_wheel, packages=packages)
    requires = inspect_runtime(medium / "runtime").requires
    assert requires.torch is not None
    assert requires.torch.endswith("+cpu")
    assert requires.cuda is None
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = install(medium, bare_path(tmp_path / "path"), "--prefix", tmp_path / "p", "--trust-key", vendor.public_path)
    took, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    worked = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert "Code installed in" in done.stderr, done.stderr
    (name,) = trees(tmp_path / "p")
    tree = tmp_path / "p/opt/atoll/code" / name
    assert verify_code(tree) == []
    run = {"capture_output": True, "text": True, "env": {"PATH": str(tmp_path / "path")}}
    for command, words in (("version", requires.torch), ("serve --help", "OpenAI"), ("doctor --help", "GPU")):
        done = subprocess.run([UNSHARE, "-rn", tree / "bin/atoll", *command.split()], **run)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout
    assert verify_code(tree) == []  # nothing was written by running it
    used = sum(path.stat().st_blocks * 512 for path in tree.rglob("*") if path.is_file())
    assert used < requires.disk_bytes
    print(f"installed in {took:.1f} s, {worked:.1f} s of processor time, {used >> 20} MiB")
    assert worked < LIMIT * 2 / 3
    assert took < LIMIT or os.getloadavg()[0] > (os.cpu_count() or 1)  # a busy machine says nothing
