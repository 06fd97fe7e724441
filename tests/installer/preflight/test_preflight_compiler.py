"""Check 23: no compiler is needed, since Triton brings its own, which must run here."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preflight_kit import FakeMachine, FakeSmi, context, on_path, without_nvml

from installer.preflight import CHECKS, CheckRecord, compiler


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CheckRecord]:
    """The check, on a machine with an H100."""
    monkeypatch.setenv("PATH", on_path(FakeSmi(tmp_path / "bin").directory))
    without_nvml(tmp_path, monkeypatch)
    machine = FakeMachine(tmp_path / "root").with_gpu()
    (check,) = (check for check in CHECKS if check.id == "compiler")

    def run(**facts: Any) -> CheckRecord:
        record = check(context(tmp_path, machine=machine, **facts))
        assert record.observed
        assert record.status == "pass" or record.fix
        return record

    return run


def test_triton_for_this_python_and_for_another(look: Callable[..., CheckRecord], tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    (runtime / "wheels").mkdir(parents=True)
    mine = f"cp{sys.version_info.major}{sys.version_info.minor}"
    (runtime / f"wheels/triton-3.6.0-{mine}-{mine}-manylinux_2_27_x86_64.whl").touch()
    assert look(runtime=runtime).status == "pass"
    (runtime / f"wheels/triton-3.6.0-{mine}-{mine}-manylinux_2_27_x86_64.whl").unlink()
    (runtime / "wheels/triton-3.6.0-cp39-cp39-manylinux_2_27_x86_64.whl").touch()
    record = look(runtime=runtime)
    assert record.status == "fail"
    assert "--python" in record.command


@pytest.fixture
def ptxas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The assembler of a Triton that this interpreter would import."""
    home = tmp_path / "triton"
    monkeypatch.setattr(compiler, "triton_home", lambda: home)
    for name in ("_C/libtriton.so", "backends/nvidia/bin/ptxas"):
        (home / name).parent.mkdir(parents=True)
        (home / name).touch()
    program = home / "backends/nvidia/bin/ptxas"
    program.write_text("#!/bin/sh\necho 'ptxas: NVIDIA (R) Ptx optimizing assembler'\n")
    program.chmod(0o755)
    return program


def test_the_installed_triton(look: Callable[..., CheckRecord], ptxas: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look().status == "pass"
    newer = ptxas.with_name("ptxas-blackwell")
    newer.write_text("not a program")
    newer.chmod(0o755)
    record = look()
    assert (record.status, record.command) == ("fail", "sudo sh install.sh")
    assert f"{newer} does not run: Exec format error" in record.observed
    newer.unlink()
    ptxas.unlink()
    assert "is missing" in look().observed
    monkeypatch.setattr(compiler, "triton_home", lambda: None)
    assert look().status == "fail"


def test_an_assembler_without_the_right_to_run(look: Callable[..., CheckRecord], ptxas: Path) -> None:
    ptxas.chmod(0o644)
    record = look()
    assert (record.status, record.command) == ("fail", f"chmod 0755 {ptxas}")
    assert "may not be executed" in record.observed


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_an_assembler_on_a_disk_that_forbids_programs(look: Callable[..., CheckRecord], ptxas: Path) -> None:
    place = ptxas.parent
    text = ptxas.read_text()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec,size=1m", "test", str(place)]).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        ptxas.write_text(text)
        ptxas.chmod(0o755)
        record = look()
    finally:
        subprocess.run(["umount", str(place)], check=True)
    assert (record.status, record.command) == ("fail", f"mount -o remount,exec {place}")
    assert "mounted noexec" in record.observed


@pytest.mark.parametrize("script, said", [
    ("exit 7", "exit status 7"), ("echo cannot open libc >&2; exit 127", "cannot open libc"), ("true", "exit status 0"),
    ("sleep 60", "no answer within"),
])  # fmt: skip
def test_an_assembler_that_does_not_answer(
    look: Callable[..., CheckRecord], ptxas: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    monkeypatch.setattr(compiler, "_SECONDS", 1.0 if "sleep" in script else 60.0)
    ptxas.write_text(f"#!/bin/sh\n{script}\n")
    record = look()
    assert record.status == "fail"
    assert f"{ptxas} does not run: {said}" in record.observed
