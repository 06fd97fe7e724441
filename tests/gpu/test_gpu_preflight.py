"""The preflight on a real GPU: its facts against what CUDA itself says, and every GPU check passing."""

import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("installer.gpu", reason="the installer is not beside these tests")

from installer import gpu
from installer.gpu import nvml, smi

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
SAME = ("uuid", "pci", "name", "compute_cap", "memory_total", "persistence", "compute_mode", "mig", "ecc",
        "ecc_uncorrected", "remap_pending", "remap_failed", "pcie_width_max", "power_default")  # fmt: skip


@pytest.fixture(scope="module")
def facts() -> gpu.GpuFacts:
    torch.zeros(1, device="cuda")  # a GPU that sleeps reports its PCIe link at rest
    return gpu.collect()


def test_both_sources_answer_in_time(facts: gpu.GpuFacts) -> None:
    began = time.monotonic()
    assert gpu.collect().sources == ("NVML", "nvidia-smi"), facts
    assert time.monotonic() - began < 7
    assert (facts.nvml_error, facts.smi_error) == ("", "")


def test_the_facts_are_those_of_cuda(facts: gpu.GpuFacts) -> None:
    assert len(facts.gpus) >= torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    mine = next(found for found in facts.gpus if found.uuid == f"GPU-{properties.uuid}")
    assert mine.name == properties.name
    assert mine.compute_cap == (properties.major, properties.minor)
    assert mine.memory_total is not None
    assert 0.95 < properties.total_memory / mine.memory_total <= 1.0
    assert facts.driver
    assert facts.cuda


def test_nvml_and_nvidia_smi_agree() -> None:
    for one, other in zip(nvml.query().gpus, smi.query().gpus, strict=True):
        for name in SAME:
            first, second = getattr(one, name), getattr(other, name)
            assert first is None or second is None or first == second, name


def test_every_gpu_check_passes(tmp_path: Path) -> None:
    for package in ("psutil", "tomlkit", "cryptography"):
        pytest.importorskip(package, reason=f"the preflight needs {package}, which this machine's Python lacks")
    from installer.base.layout import Layout
    from installer.preflight import CHECKS, GPU_CHECKS, PreflightContext, run_checks
    from installer.release.config import Endpoint

    endpoint = Endpoint("127.0.0.1", 8123)
    plans = PreflightContext(Layout.at(tmp_path / "p"), endpoint, device="cuda", weight_bytes=1 << 30)
    began = time.monotonic()
    records = run_checks(plans)
    assert time.monotonic() - began < 10
    assert len(records) == len(CHECKS)
    for record in records:
        assert record.id not in GPU_CHECKS or record.status != "fail", record
        assert record.id != "compiler" or record.status == "pass", record
