"""The GPU checks against machines with scripted faults: a tree of kernel files, and an nvidia-smi that says so."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from preflight_kit import CUDA13, GIB, FakeMachine, FakeSmi, context, on_path, without_nvml

from installer.preflight import (
    CHECKS,
    CheckRecord,
    ModelNeed,
    PreflightContext,
    gpu,
    gpu_problems,
    gpu_state,
)
from installer.preflight.torch_build import TorchBuild

Checks = {check.id: check for check in CHECKS}
GPU_IDS = ("gpu", "nvml", "driver", "compute-capability", "vram", "gpu-health", "gpu-modes", "gpu-nodes",
           "fabric-manager")  # fmt: skip


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    made = FakeSmi(tmp_path / "bin")
    monkeypatch.setenv("PATH", on_path(made.directory))
    without_nvml(tmp_path, monkeypatch)
    return made


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path / "root").with_gpu()


@pytest.fixture
def look(tmp_path: Path, smi: FakeSmi, machine: FakeMachine) -> Callable[..., CheckRecord]:
    def run(id: str, **facts: Any) -> CheckRecord:
        record = Checks[id](context(tmp_path, machine=machine, **facts))
        assert record.observed
        assert record.required
        assert record.why
        assert record.status == "pass" or record.fix
        return record

    return run


def test_a_healthy_h100_passes_everything(look: Callable[..., CheckRecord]) -> None:
    for id in GPU_IDS:
        record = look(id, weight_bytes=16 * GIB)
        assert record.status == "pass", record
    assert look("driver").observed == "580.159.04, CUDA 13.0"
    assert "NVIDIA H100 80GB HBM3" in look("gpu").observed


@pytest.mark.parametrize("id", GPU_IDS)
def test_without_a_gpu_nothing_is_needed_on_the_cpu(tmp_path: Path, id: str) -> None:
    for facts in ({"device": "cpu"}, {"device": "auto"}, {"device": "auto", "torch": TorchBuild("2", None, True)}):
        record = Checks[id](context(tmp_path, machine=FakeMachine(tmp_path / "bare"), **facts))
        assert record.status == "pass"
        assert record.observed.startswith("not needed")


def test_a_gpu_that_a_cpu_build_cannot_use_is_told(tmp_path: Path, machine: FakeMachine) -> None:
    record = gpu.gpu(context(tmp_path, system=True, machine=machine, device="auto", torch=TorchBuild("2", None, True)))
    assert record.status == "warn"
    assert "CPU" in record.observed


# -- 5, 6: is there one, does it answer


def test_no_gpu(tmp_path: Path) -> None:
    bare = FakeMachine(tmp_path / "bare")
    bare.pci_device("0000:00:02.0", "030000", vendor="0x8086")
    bare.pci_device("0000:01:00.1", "040300")  # a GPU's sound
    record = gpu.gpu(context(tmp_path, machine=bare))
    assert (record.status, record.strict, record.observed) == ("fail", True, "no NVIDIA GPU")
    assert "--device cpu" in record.fix


def test_nouveau(look: Callable[..., CheckRecord], machine: FakeMachine) -> None:
    machine.put("/proc/modules", "nouveau 1 0 - Live 0x0\n")
    record = look("gpu")
    assert record.status == "warn"
    assert "nouveau" in record.command


@pytest.mark.parametrize(
    ("fault", "word", "command"),
    [
        ("mismatch", "mismatch", "apt-mark hold"),
        ("unknown-error", "Unknown Error", "dmesg"),
    ],
)
def test_a_driver_that_fails(
    look: Callable[..., CheckRecord], smi: FakeSmi, fault: str, word: str, command: str
) -> None:
    smi.plan(fault=fault)
    record = look("nvml")
    assert (record.status, record.strict) == ("fail", True)
    assert word in record.observed
    assert command in record.command
    for id in ("compute-capability", "vram"):
        assert look(id).status == "fail"


def test_a_driver_that_hangs(
    look: Callable[..., CheckRecord], smi: FakeSmi, monkeypatch: pytest.MonkeyPatch
) -> None:
    from installer.gpu import smi as asked

    monkeypatch.setattr(asked.query, "__defaults__", (0.6,))
    smi.plan(fault="hang")
    record = look("nvml")
    assert record.status == "fail"
    assert "no answer within" in record.observed


def test_no_driver_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("installer.gpu.smi.find", lambda: None)
    without_nvml(tmp_path, monkeypatch)
    bare = FakeMachine(tmp_path / "bare")
    bare.pci_device("0000:00:06.0", "030200")
    record = gpu.nvml(context(tmp_path, machine=bare))
    assert record.status == "fail"
    assert "no NVIDIA driver is loaded" in record.observed
    assert gpu.driver(context(tmp_path, machine=bare)).status == "fail"


def test_a_kernel_module_of_another_version(look: Callable[..., CheckRecord], machine: FakeMachine) -> None:
    machine.with_gpu(driver="570.86.15")
    record = look("nvml")
    assert record.status == "fail"
    assert "570.86.15" in record.observed


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x@y)", "580.159.04"),
        ("NVRM version: something else", ""),
        ("", ""),
    ],
)
def test_the_version_of_the_kernel_module(machine: FakeMachine, line: str, version: str) -> None:
    machine.put("/proc/driver/nvidia/version", f"{line}\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
    assert machine.kernel_driver() == version


# -- 7: driver and CUDA


@pytest.mark.parametrize(
    ("version", "speaks", "build", "status"),
    [
        ("580.159.04", "13.0", CUDA13, "pass"),
        ("590.10", "13.1", CUDA13, "pass"),
        ("570.86.15", "12.8", CUDA13, "fail"),
        ("535.104.05", "12.2", CUDA13, "fail"),
        ("580.159.04", "13.0", TorchBuild("2.16.0", (13, 2), True), "warn"),
        ("535.104.05", "12.2", TorchBuild("2.8.0", (12, 8), True), "warn"),
        ("570.86.15", "12.8", TorchBuild("2.8.0", (12, 8), True), "pass"),
        ("580.159.04", "13.0", TorchBuild("2.8.0", (12, 8), True), "pass"),
        ("515.65.01", "11.7", TorchBuild("2.8.0", (12, 8), True), "fail"),
        ("580.159.04", "13.0", TorchBuild("2.20.0", (14, 0), True), "warn"),
        ("580.159.04", "13.0", TorchBuild(), "pass"),
        ("570.86.15", "12.8", TorchBuild(), "fail"),  # nothing known: as for CUDA 13
        ("580.159.04", "13.0", TorchBuild("2.13.0", None, True), "fail"),  # a CPU build, and --device cuda
    ],
)
def test_drivers(
    look: Callable[..., CheckRecord], smi: FakeSmi, machine: FakeMachine, version: str, speaks: str, build: TorchBuild,
    status: str,
) -> None:
    smi.driver(version, speaks)
    machine.with_gpu(driver=version)
    assert look("driver", torch=build).status == status


def test_the_bundles_own_floor(look: Callable[..., CheckRecord]) -> None:
    assert look("driver", driver_min=">=580.200").status == "fail"
    assert look("driver", driver_min=">=580").status == "pass"


def test_the_bundles_own_cuda(look: Callable[..., CheckRecord]) -> None:
    build = TorchBuild("2.13.0", (12, 8), True)
    record = look("driver", torch=build, cuda=">=13.0")
    assert record.status == "fail"
    assert "13.0" in record.required
    assert look("driver", torch=build, cuda="12.8").status == "pass"


@pytest.mark.parametrize(
    ("wheels", "expected"),
    [
        (["torch-2.13.0+cu130-cp311-cp311-manylinux_2_28_x86_64.whl"], TorchBuild("2.13.0", (13, 0), True)),
        (["torch-2.8.0%2Bcu128-cp312-cp312-linux_x86_64.whl"], TorchBuild("2.8.0", (12, 8), True)),
        (["torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"], TorchBuild("2.13.0", None, True)),
        (["torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl", "nvidia_cuda_runtime-13.0.48-py3-none-any.whl"],
         TorchBuild("2.13.0", (13, 0), True)),
        (["torch-2.8.0-cp311-cp311-x.whl", "nvidia_cuda_runtime_cu12-12.8.90-py3-none-x.whl"],
         TorchBuild("2.8.0", (12, 8), True)),
        (["torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl"], TorchBuild("2.13.0", None, False)),
        (["torchvision-0.20.0+cu130-cp311-cp311-x.whl"], None),
        ([], None),
    ],
)  # fmt: skip
def test_the_cuda_of_a_wheel(tmp_path: Path, wheels: list[str], expected: TorchBuild | None) -> None:
    (tmp_path / "wheels").mkdir()
    for name in wheels:
        (tmp_path / "wheels" / name).touch()
    assert TorchBuild.of_runtime(tmp_path) == expected


def test_the_installed_torch_is_known_without_importing_it() -> None:
    build = TorchBuild.installed()
    assert build.known
    assert build.version.split(".")[0].isdigit()


# -- 8: compute capability


@pytest.mark.parametrize(("version", "status"), [("9.0", "pass"), ("8.0", "pass"), ("7.5", "fail"), ("13.0", "warn")])
def test_compute_capabilities(
    look: Callable[..., CheckRecord], smi: FakeSmi, version: str, status: str
) -> None:
    smi.compute_cap(version)
    assert look("compute-capability").status == status


def test_what_the_bundle_asks_of_the_gpu(look: Callable[..., CheckRecord]) -> None:
    assert look("compute-capability", compute_cap=">=10.0").status == "fail"


def test_two_different_gpus(look: Callable[..., CheckRecord], smi: FakeSmi) -> None:
    smi.second("NVIDIA L40S", "8.9")
    record = look("compute-capability")
    assert record.status == "warn"
    assert "different GPUs" in record.observed
    assert "NVIDIA L40S" in record.observed
    assert "GPU-00000000-1111" in record.fix  # the better one
    assert look("compute-capability", gpus=(0,)).status == "pass"  # the others are not meant


def test_an_old_card_for_the_screen(look: Callable[..., CheckRecord], smi: FakeSmi) -> None:
    smi.second("Tesla T4", "7.5")
    assert look("compute-capability").status == "warn"
    assert look("compute-capability", gpus=(0, 1)).status == "fail"
    assert look("compute-capability", models=(ModelNeed("a", GIB, gpus=("GPU-99999999",)),)).status == "fail"


# -- 9: memory


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        ({"weight_bytes": 60 * GIB}, "pass"),
        ({"weight_bytes": 71 * GIB}, "warn"),   # fits, but hardly any conversation with it
        ({"weight_bytes": 75 * GIB}, "fail"),
        ({"weight_bytes": GIB, "vram_gib": 100}, "fail"),
        ({"weight_bytes": GIB, "gpus": (5,)}, "fail"),
        ({"models": (ModelNeed("a", 40 * GIB), ModelNeed("b", 40 * GIB))}, "fail"),
    ],
)
def test_memory_of_the_gpu(look: Callable[..., CheckRecord], facts: dict[str, Any], status: str) -> None:
    record = look("vram", **facts)
    assert (record.status, record.strict) == (status, True)


def test_tables_in_main_memory_are_not_counted(look: Callable[..., CheckRecord], machine: FakeMachine) -> None:
    """Gemma 4's per-layer embeddings: on the host where there is room, unless the settings say otherwise."""
    model = ModelNeed("e4b", 75 * GIB, table_bytes=15 * GIB)
    machine.put("/proc/meminfo", f"MemTotal: {64 * 2**20} kB\nMemAvailable: {60 * 2**20} kB\n")
    record = look("vram", models=(model,))
    assert record.status == "pass"
    assert "without the 15.0 GiB in main memory" in record.required
    assert look("vram", models=(replace(model, tables="gpu"),)).status == "fail"
    machine.put("/proc/meminfo", f"MemTotal: {24 * 2**20} kB\nMemAvailable: {20 * 2**20} kB\n")
    assert look("vram", models=(model,)).status == "fail", "there is no room: the engine takes the GPU's"
    assert look("vram", models=(replace(model, tables="host"),)).status == "pass"


def test_two_models_on_two_gpus(look: Callable[..., CheckRecord], smi: FakeSmi) -> None:
    smi.second("NVIDIA H100 80GB HBM3")
    apart = (ModelNeed("a", 60 * GIB, gpus=(0,)), ModelNeed("b", 60 * GIB, gpus=("GPU-99999999-1111",)))
    assert look("vram", models=apart).status == "pass"
    together = (ModelNeed("a", 60 * GIB, gpus=(0,)), ModelNeed("b", 60 * GIB, gpus=(0,)))
    assert look("vram", models=together).status == "fail"
    spread = (ModelNeed("a", 120 * GIB, gpus=(0, 1)),)
    assert look("vram", models=spread).status == "pass"


def test_a_foreign_process_holds_memory(look: Callable[..., CheckRecord], smi: FakeSmi, machine: FakeMachine) -> None:
    smi.process(4242, "/usr/bin/python3", 20_000)
    machine.put("/proc/4242/comm", "ollama\n")
    machine.put("/proc/4242/cgroup", "0::/system.slice/ollama.service\n")
    record = look("vram", weight_bytes=16 * GIB)
    assert record.status == "warn"
    assert "process 4242 (ollama) of ollama.service holds 19.5 GiB" in record.observed
    assert record.command == "systemctl stop ollama.service"
    ours = look("vram", weight_bytes=60 * GIB, own_pids=frozenset({4242}))
    assert ours.status == "pass"


def test_memory_held_by_what_nobody_shows(look: Callable[..., CheckRecord], smi: FakeSmi) -> None:
    smi.change(fb_memory_usage__free="40000 MiB")
    assert "not shown" in look("vram", weight_bytes=16 * GIB).observed


def test_a_little_held_is_no_matter(look: Callable[..., CheckRecord], smi: FakeSmi) -> None:
    smi.process(4242, "Xorg", 200)
    assert look("vram", weight_bytes=16 * GIB).status == "pass"


# -- 10: health


@pytest.mark.parametrize(
    ("changes", "status", "word"),
    [
        ({"ecc_errors__volatile__dram_correctable": "3"}, "warn", "3 corrected"),
        ({"ecc_errors__volatile__dram_uncorrectable": "1"}, "fail", "1 uncorrected"),
        ({"ecc_errors__volatile__sram_uncorrectable_secded": "2"}, "fail", "2 uncorrected"),
        ({"remapped_rows__remapped_row_pending": "Yes"}, "warn", "waits for a restart"),
        ({"remapped_rows__remapped_row_failure": "Yes"}, "fail", "could not be replaced"),
        ({"ecc_mode__current_ecc": "Disabled"}, "pass", "off"),
    ],
)
def test_health(
    look: Callable[..., CheckRecord], smi: FakeSmi, changes: dict[str, str], status: str, word: str
) -> None:
    smi.change(**changes)
    record = look("gpu-health")
    assert (record.status, record.strict) == (status, False)
    assert word in record.observed


def test_xids_of_the_kernel_log(look: Callable[..., CheckRecord], machine: FakeMachine) -> None:
    machine.put("/dev/kmsg", "4,1,2,-;NVRM: Xid (PCI:0000:00:06): 31, pid=9, a program's fault\n")
    assert look("gpu-health").status == "pass"
    machine.put("/dev/kmsg", "4,1,2,-;NVRM: Xid (PCI:0000:00:06): 79, GPU has fallen off the bus.\n")
    record = look("gpu-health")
    assert record.status == "warn"
    assert "Xid 79 on 0000:00:06" in record.observed


def test_the_real_kernel_log_can_be_read() -> None:
    from installer.preflight.machine import Machine

    assert isinstance(gpu_state.kernel_log(Machine()), list)


# -- 11: modes


@pytest.mark.parametrize(
    ("changes", "status", "command"),
    [
        ({"mig_mode__current_mig": "Enabled"}, "fail", "-mig 0"),
        ({"compute_mode": "Prohibited"}, "fail", "-c DEFAULT"),
        ({"compute_mode": "Exclusive_Process"}, "warn", "-c DEFAULT"),
        ({"persistence_mode": "Disabled"}, "warn", "nvidia-persistenced"),
        ({"pci__pci_gpu_link_info__link_widths__current_link_width": "8x"}, "warn", "-q -d PCIE"),
        ({"gpu_power_readings__current_power_limit": "400.00 W"}, "warn", "-pl 700"),
    ],
)
def test_modes(
    look: Callable[..., CheckRecord], smi: FakeSmi, changes: dict[str, str], status: str, command: str
) -> None:
    smi.change(**changes)
    record = look("gpu-modes")
    assert record.status == status
    assert command in record.command


def test_exclusive_and_taken(look: Callable[..., CheckRecord], smi: FakeSmi) -> None:
    smi.change(compute_mode="Exclusive_Process").process(4242, "train", 20_000)
    assert look("gpu-modes").status == "fail"
    assert look("gpu-modes", own_pids=frozenset({4242})).status == "warn"


# -- 12: device nodes


def test_no_uvm_node(look: Callable[..., CheckRecord], machine: FakeMachine) -> None:
    machine.at("/dev/nvidia-uvm").unlink()
    record = look("gpu-nodes")
    assert (record.status, record.strict) == ("fail", True)
    assert record.command == "nvidia-modprobe -u -c0"
    assert "/dev/nvidia-uvm" in record.observed


def test_nodes_that_are_not_open_to_all(look: Callable[..., CheckRecord], machine: FakeMachine) -> None:
    machine.at("/dev/nvidia0").chmod(0o660)
    assert look("gpu-nodes", system=True).status == "fail"


def test_the_module_is_not_loaded_at_the_start(look: Callable[..., CheckRecord], machine: FakeMachine) -> None:
    machine.at("/etc/modules-load.d/nvidia.conf").unlink()
    assert look("gpu-nodes").status == "warn"
    assert look("gpu-nodes", system=True).status == "pass"  # the install adds it


def test_the_second_gpus_node(look: Callable[..., CheckRecord], smi: FakeSmi, machine: FakeMachine) -> None:
    smi.second("NVIDIA H100 80GB HBM3")
    assert "/dev/nvidia1" in look("gpu-nodes").observed
    machine.put("/dev/nvidia1", mode=0o666)
    assert look("gpu-nodes").status == "pass"


# -- 13: NVSwitch


def _programs(smi: FakeSmi, active: str, version: str) -> None:
    for name, said in (("systemctl", active), ("nv-fabricmanager", f"Fabric Manager version is : {version}")):
        path = smi.directory / name
        path.write_text(f"#!/bin/sh\necho '{said}'\n")
        path.chmod(0o755)


@pytest.mark.parametrize(
    ("active", "version", "status"),
    [("active", "580.159.04", "pass"), ("inactive", "580.159.04", "fail"), ("active", "570.86.15", "fail")],
)
def test_fabric_managers(
    look: Callable[..., CheckRecord], smi: FakeSmi, machine: FakeMachine, active: str, version: str, status: str
) -> None:
    _programs(smi, active, version)
    machine.pci_device("0000:0a:00.0", "068000")
    record = look("fabric-manager")
    assert (record.status, record.strict) == (status, False)


def test_a_gpu_that_waits_for_its_fabric(look: Callable[..., CheckRecord], smi: FakeSmi) -> None:
    _programs(smi, "active", "580.159.04")
    smi.change(fabric__state="In Progress")
    assert look("fabric-manager").status == "fail"


def test_what_keeps_a_gpu_from_being_used(tmp_path: Path, smi: FakeSmi, machine: FakeMachine) -> None:
    """So that a demonstration can fall back to the CPU; an install never does by itself."""
    plans = context(tmp_path, machine=machine, device="auto", weight_bytes=GIB, runtime=_runtime(tmp_path))
    memory_of(machine)
    assert gpu_problems(plans) == []
    assert gpu_problems(context(tmp_path, machine=FakeMachine(tmp_path / "bare"), device="cpu")) == []
    smi.plan(fault="mismatch")
    fresh = FakeMachine(tmp_path / "root").with_gpu()
    assert "nvml" in {record.id for record in gpu_problems(context(tmp_path, machine=fresh, device="auto"))}


def _runtime(tmp_path: Path) -> Path:
    import sys

    mine = f"cp{sys.version_info.major}{sys.version_info.minor}"
    (tmp_path / "wheels").mkdir()
    (tmp_path / f"wheels/triton-3.6.0-{mine}-{mine}-manylinux_2_27_x86_64.whl").touch()
    return tmp_path / "wheels"


def memory_of(machine: FakeMachine) -> None:
    machine.put("/proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 60000000 kB\n")


def test_the_gpu_is_asked_once_for_all_checks(tmp_path: Path, smi: FakeSmi, machine: FakeMachine) -> None:
    from installer.preflight import run_checks

    plans: PreflightContext = context(tmp_path, machine=machine)
    run_checks(plans)
    assert len(smi.calls) == 2  # one query, one report
