"""Machines for the preflight's tests: a tree with /proc, /sys and /dev, a scripted nvidia-smi, and a context."""

import json
import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from installer.base.layout import Layout
from installer.gpu import nvml
from installer.preflight import PreflightContext
from installer.preflight.machine import Machine
from installer.preflight.torch_build import TorchBuild
from installer.release.config import Endpoint

DATA = Path(__file__).with_name("nvidia_smi")
CUDA13 = TorchBuild("2.13.0", (13, 0), True)
GIB = 1 << 30


class FakeSmi:
    """An `nvidia-smi` in a directory of its own, that tells of GPUs like a real H100 with changes."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.root = ET.fromstring((DATA / "h100.xml").read_text())
        self.program = directory / "nvidia-smi"
        source = (DATA / "fake_nvidia_smi.py").read_text()
        self.program.write_text(f"#!{sys.executable} -IS\n{source}")
        self.program.chmod(0o755)
        self.plan()
        self.write()

    def plan(self, **plan: Any) -> None:
        (self.directory / "plan.json").write_text(json.dumps(plan))

    def write(self) -> None:
        (self.directory / "report.xml").write_bytes(ET.tostring(self.root, xml_declaration=True))

    def change(self, gpu: int = 0, **values: str) -> "FakeSmi":
        """`change(mig_mode__current_mig="Enabled")`: texts by their path, two underscores for a slash."""
        node = self.root.findall("gpu")[gpu]
        for name, text in values.items():
            found = node.find(name.replace("__", "/"))
            assert found is not None, name
            found.text = text
        self.write()
        return self

    def driver(self, version: str, cuda: str) -> "FakeSmi":
        for name, text in (("driver_version", version), ("cuda_version", cuda)):
            node = self.root.find(name)
            assert node is not None
            node.text = text
        self.write()
        return self

    def second(self, name: str, compute_cap: str = "9.0") -> "FakeSmi":
        """Another GPU beside the first."""
        node = ET.fromstring(ET.tostring(self.root.findall("gpu")[0]))
        node.set("compute_cap", compute_cap)
        self.root.append(node)
        return self.change(1, product_name=name, uuid="GPU-99999999-1111-2222-3333-444444444444", minor_number="1",
                           pci__pci_bus_id="00000000:00:07.0")  # fmt: skip

    def compute_cap(self, version: str) -> "FakeSmi":
        self.root.findall("gpu")[0].set("compute_cap", version)
        self.write()
        return self

    def process(self, pid: int, name: str, mib: int) -> "FakeSmi":
        processes = self.root.findall("gpu")[0].find("processes")
        assert processes is not None
        entry = ET.SubElement(processes, "process_info")
        for tag, text in (("pid", pid), ("type", "C"), ("process_name", name), ("used_memory", f"{mib} MiB")):
            ET.SubElement(entry, tag).text = str(text)
        return self.change(fb_memory_usage__used=f"{mib} MiB", fb_memory_usage__free=f"{81079 - mib} MiB")

    @property
    def calls(self) -> list[tuple[str, int]]:
        """Arguments and process id of every call."""
        try:
            lines = (self.directory / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(arguments, int(pid)) for arguments, pid in (line.split("\t") for line in lines)]


class FakeMachine(Machine):
    """A tree that the kernel's files are read from."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        root.mkdir(exist_ok=True)

    def put(self, path: str, text: str = "", mode: int = 0o644) -> Path:
        at = self.at(path)
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text)
        at.chmod(mode)
        return at

    def pci_device(self, address: str, kind: str, vendor: str = "0x10de") -> None:
        self.put(f"/sys/bus/pci/devices/{address}/vendor", f"{vendor}\n")
        self.put(f"/sys/bus/pci/devices/{address}/class", f"0x{kind}\n")

    def with_gpu(self, driver: str = "580.159.04") -> "FakeMachine":
        """One GPU on the bus, its module, its nodes, and its entry in modules-load.d."""
        self.pci_device("0000:00:06.0", "030200")
        self.put("/proc/modules", "nvidia_uvm 1 0 - Live 0x0\nnvidia 2 1 nvidia_uvm, Live 0x0\n")
        line = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build  (a@b)  Mon\n"
        self.put("/proc/driver/nvidia/version", line)
        for node in ("nvidiactl", "nvidia0", "nvidia-uvm"):
            self.put(f"/dev/{node}", mode=0o666)
        self.put("/etc/modules-load.d/nvidia.conf", "nvidia-uvm\n")
        return self


def context(tmp_path: Path, *, system: bool = False, **facts: Any) -> PreflightContext:
    """Plans for `tmp_path`/prefix (or a server's tree there), on this machine unless told otherwise."""
    root = tmp_path / "prefix"
    layout = Layout.server(root) if system else Layout.at(root)
    host, port = facts.pop("host", "127.0.0.1"), facts.pop("port", 8123)
    return PreflightContext(layout, Endpoint(host, port), **{"torch": CUDA13, "device": "cuda", **facts})


def without_nvml(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the library of a machine that really has one: the scripted nvidia-smi alone shall be heard."""
    probe = directory / "no_nvml.py"
    probe.write_text("print('{\"error\": \"libnvidia-ml.so.1 is not installed\"}')\n")
    monkeypatch.setattr(nvml, "_PROBE", probe)


def on_path(directory: Path) -> str:
    return f"{directory}{os.pathsep}{os.environ['PATH']}"
