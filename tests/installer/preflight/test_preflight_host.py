"""The checks of the machine itself, against this one and against trees of kernel files."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest
from preflight_kit import GIB, FakeMachine, context

from installer.base.lock import InstallLock
from installer.preflight import ModelNeed, host
from installer.preflight.owners import Owner

V2 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
V3 = V2 + " avx avx2 bmi1 bmi2 f16c fma movbe"


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path / "root")


def program(directory: Path, name: str, said: str) -> None:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\necho '{said}'\n")
    path.chmod(0o755)


# -- 1


def test_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert host.rights(context(tmp_path)).status == "pass"
    record = host.rights(context(tmp_path, system=True))
    assert record.status == "fail"
    assert record.command == "sudo sh install.sh"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert host.rights(context(tmp_path, system=True)).status == "pass"


def test_another_command_holds_the_lock(tmp_path: Path) -> None:
    plans = context(tmp_path)
    plans.layout.state.mkdir(parents=True)
    with InstallLock(plans.layout.lock, "upgrade"):
        assert host.rights(plans).status == "pass"  # its own
        pid = os.fork()
        if not pid:
            os._exit(0 if host.rights(plans).status == "fail" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert host.rights(plans).status == "pass"


# -- 2


@pytest.mark.parametrize(
    ("flags", "status", "word"),
    [(V3 + " sha_ni", "pass", "Test CPU"), (V3, "warn", "sha_ni"), (V2, "warn", "avx2"), ("ssse3", "fail", "sse4_2")],
)
def test_processors(tmp_path: Path, machine: FakeMachine, flags: str, status: str, word: str) -> None:
    machine.put("/proc/cpuinfo", f"processor\t: 0\nmodel name\t: Test CPU\nflags\t\t: {flags}\n")
    record = host.cpu(context(tmp_path, machine=machine))
    assert (record.status, word in record.observed) == (status, True)


def test_another_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.platform, "machine", lambda: "aarch64")
    assert host.cpu(context(tmp_path)).status == "fail"


# -- 3


@pytest.mark.parametrize(
    ("said", "cgroup", "status"),
    [
        ("systemd 252 (252.39-1~deb12u1)", 2, "pass"),
        ("systemd 257 (257.9)", 2, "pass"),
        ("systemd 250 (250.3)", 2, "warn"),
        ("systemd 245 (245.4)", 2, "fail"),
        ("systemd 252 (252.39)", 1, "fail"),
        ("what?", 2, "fail"),
    ],
)
def test_systemd(
    tmp_path: Path, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, said: str, cgroup: int, status: str
) -> None:
    machine.put("/etc/os-release", 'ID=debian\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n')
    machine.at("/run/systemd/system").mkdir(parents=True)
    if cgroup == 2:
        machine.put("/sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
    program(tmp_path / "bin", "systemctl", said)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    record = host.systemd(context(tmp_path, system=True, machine=machine))
    assert record.status == status
    assert "Debian" in record.observed


def test_a_system_without_systemd(tmp_path: Path, machine: FakeMachine) -> None:
    assert host.systemd(context(tmp_path, system=True, machine=machine)).status == "fail"
    assert host.systemd(context(tmp_path, machine=machine)).status == "pass"


# -- 4


@pytest.mark.parametrize(
    ("library", "wheels", "status"),
    [
        (("glibc", "2.36"), [], "pass"),
        (("glibc", "2.28"), ["a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"], "pass"),
        (("glibc", "2.28"), ["a-1-cp311-cp311-manylinux_2_34_x86_64.whl"], "fail"),
        (("glibc", "2.28"), ["a-1-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_34_x86_64.whl"], "pass"),
        (("glibc", "2.17"), [], "fail"),
        (("", ""), [], "fail"),  # musl does not tell
    ],
)
def test_c_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: tuple[str, str], wheels: list[str], status: str
) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    for name in wheels:
        (runtime / name).touch()
    monkeypatch.setattr(host.platform, "libc_ver", lambda: library)
    record = host.glibc(context(tmp_path, runtime=runtime))
    assert record.status == status
    assert "glibc" in record.required


def test_the_installed_wheels_tell_what_they_need(tmp_path: Path) -> None:
    assert host.glibc(context(tmp_path)).status == "pass"  # they run here


# -- 14


def memory_of(machine: FakeMachine, total: float, available: float) -> None:
    text = f"MemTotal: {int(total * 2**20)} kB\nMemFree: 1 kB\nMemAvailable: {int(available * 2**20)} kB\n"
    machine.put("/proc/meminfo", text)


@pytest.mark.parametrize(
    ("total", "available", "weights", "shard", "status"),
    [
        (128, 120, 60, 5, "pass"),
        (48, 40, 60, 5, "warn"),     # less than the weights: no page cache for the next start
        (24, 20, 10, 9, "warn"),     # not 1.25 × the shard + 16 GB
        (14, 13, 1, 1, "fail"),
        (15.5, 15.2, 0, 0, "pass"),  # a "16 GB" machine
        (128, 10, 60, 5, "warn"),
    ],
)
def test_memory_with_a_gpu(
    tmp_path: Path, machine: FakeMachine, total: float, available: float, weights: int, shard: int, status: str
) -> None:
    memory_of(machine, total, available)
    plans = context(tmp_path, machine=machine, weight_bytes=weights * GIB, shard_bytes=shard * GIB)
    assert host.memory(plans).status == status


@pytest.mark.parametrize(
    ("total", "tables", "status", "asked"),
    [
        (32, "auto", "pass", "26.2 GiB"),
        (24, "auto", "warn", "26.2 GiB"),  # 16 GB and the table, but the largest file is 5 GiB
        (22, "auto", "warn", "21.2 GiB"),  # the table goes to the GPU: only less than the weights, for the next start
        (19, "host", "fail", "26.2 GiB"),  # the engine would refuse
        (32, "gpu", "pass", "21.2 GiB"),
    ],
)
def test_memory_for_tables_beside_a_gpu(
    tmp_path: Path, machine: FakeMachine, total: int, tables: str, status: str, asked: str
) -> None:
    memory_of(machine, total, total - 1)
    need = ModelNeed("e4b", 23 * GIB, table_bytes=int(7.5 * GIB) if total == 22 else 5 * GIB, tables=tables)
    plans = context(tmp_path, machine=machine, weight_bytes=23 * GIB, shard_bytes=5 * GIB, models=(need,))
    record = host.memory(plans)
    assert (record.status, record.required.split(" (")[0]) == (status, asked)
    assert ("per-layer embeddings" in record.required) == (asked == "26.2 GiB")


@pytest.mark.parametrize(
    ("total", "available", "facts", "status"),
    [
        (4, 3, {"weight_bytes": GIB}, "pass"),
        (4, 1, {"weight_bytes": GIB}, "warn"),
        (2, 2, {"weight_bytes": GIB}, "fail"),
        (4, 3, {"host_ram_bytes": 8 * GIB}, "fail"),
    ],
)
def test_memory_on_the_cpu(
    tmp_path: Path, machine: FakeMachine, total: float, available: float, facts: dict[str, int], status: str
) -> None:
    memory_of(machine, total, available)
    assert host.memory(context(tmp_path, machine=machine, device="cpu", **facts)).status == status


# -- 20


@pytest.mark.parametrize(("ahead", "status"), [(-3600, "pass"), (3600, "warn"), (3 * 86400, "fail")])
def test_clocks(tmp_path: Path, ahead: int, status: str) -> None:
    record = host.clock(context(tmp_path, bundle_created=time.time() + ahead))
    assert record.status == status
    assert status == "pass" or "timedatectl" in record.command


@pytest.mark.parametrize(("steered", "status"), [(True, "pass"), (False, "warn")])
def test_a_clock_that_nothing_keeps_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steered: bool, status: str
) -> None:
    assert isinstance(host._synchronised(), bool)  # the real one answers
    monkeypatch.setattr(host, "_synchronised", lambda: steered)
    assert host.clock(context(tmp_path, system=True)).status == status
    assert host.clock(context(tmp_path)).status == "pass"


# -- 26


def test_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.python(context(tmp_path)).status == "pass"
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert host.python(context(tmp_path, pythons=("3.99", mine))).status == "pass"
    assert "python3.99" in host.python(context(tmp_path, pythons=("3.99",))).command
    monkeypatch.setattr(host, "PYTHON_MIN", (sys.version_info.major, sys.version_info.minor + 1))
    assert host.python(context(tmp_path)).status == "fail"


# -- who is it


def test_owners(machine: FakeMachine) -> None:
    group = "0::/system.slice/docker-0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef.scope\n"
    machine.put("/proc/7/comm", "python3\n")
    machine.put("/proc/7/cgroup", group)
    assert Owner.of(machine, 7).text == "process 7 (python3) in container 0123456789ab"
    assert Owner.of(machine, 7).stop_command == "docker stop 0123456789ab"
    machine.put("/proc/8/comm", "bash\n")
    machine.put("/proc/8/cgroup", "0::/user.slice/user-1000.slice/session-3.scope\n")
    assert Owner.of(machine, 8).text == "process 8 (bash) of session-3.scope"
    assert Owner.of(machine, 8).stop_command == "kill 8"
    assert Owner.of(machine, 9, "/usr/bin/gone").name == "/usr/bin/gone"


def test_this_very_process_has_a_name() -> None:
    from installer.preflight.machine import Machine

    assert Owner.of(Machine(), os.getpid()).name == psutil.Process().name()
