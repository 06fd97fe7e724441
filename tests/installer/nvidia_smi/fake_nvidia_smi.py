"""Stands in for nvidia-smi: answers the CSV query and `-q -x` from one report, and fails as it is told to.

Beside it lie `report.xml` (as `nvidia-smi -q -x` writes it) and `plan.json`: {"fault": …, "unknown_fields": […]}.
Faults: hang, die, mismatch, garbage, endless, no-xml, no-csv. Every call is noted in `calls`.
"""

import json
import os
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

HERE = Path(__file__).resolve().parent
WHERE = {
    "uuid": "uuid",
    "pci.bus_id": "pci/pci_bus_id",
    "name": "product_name",
    "memory.total": "fb_memory_usage/total",
    "memory.used": "fb_memory_usage/used",
    "memory.free": "fb_memory_usage/free",
    "persistence_mode": "persistence_mode",
    "compute_mode": "compute_mode",
    "mig.mode.current": "mig_mode/current_mig",
    "ecc.mode.current": "ecc_mode/current_ecc",
    "pcie.link.gen.current": "pci/pci_gpu_link_info/pcie_gen/current_link_gen",
    "pcie.link.width.current": "pci/pci_gpu_link_info/link_widths/current_link_width",
    "pcie.link.width.max": "pci/pci_gpu_link_info/link_widths/max_link_width",
    "power.draw": "gpu_power_readings/average_power_draw",
    "power.limit": "gpu_power_readings/current_power_limit",
    "power.default_limit": "gpu_power_readings/default_power_limit",
    "temperature.gpu": "temperature/gpu_temp",
}


def cell(root: ET.Element, gpu: ET.Element, index: int, field: str) -> str:
    if field == "index":
        return str(index)
    if field == "driver_version":
        return root.findtext("driver_version", "[N/A]")
    if field == "compute_cap":
        return gpu.get("compute_cap", "9.0")
    if field.startswith("ecc.errors."):
        kind = "uncorrectable" if "uncorrected" in field else "correctable"
        counters = gpu.find("ecc_errors/volatile")
        found = [] if counters is None else [c.text or "" for c in counters if f"_{kind}" in c.tag]
        return str(sum(map(int, found))) if found and all(text.isdigit() for text in found) else "[N/A]"
    text = gpu.findtext(WHERE[field], "N/A")
    if text in ("N/A", "[N/A]"):
        return "[N/A]"
    return text.removesuffix("x").split(" ")[0] if field.startswith(("memory", "pcie", "power", "temp")) else text


def main() -> int:
    plan = json.loads((HERE / "plan.json").read_text())
    fault = plan.get("fault")
    with open(HERE / "calls", "a") as calls:
        calls.write(" ".join(sys.argv[1:]) + f"\t{os.getpid()}\n")
    if fault == "hang":
        time.sleep(600)
    if fault == "die":
        os.kill(os.getpid(), 11)
    if fault == "mismatch":
        print("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.159")
        return 18
    if fault == "unknown-error":
        print("Unable to determine the device handle for GPU0000:00:06.0: Unknown Error")
        return 255
    while fault == "endless":
        print("x" * 4096)
    if fault == "garbage":
        sys.stdout.buffer.write((HERE / "garbage").read_bytes())
        return 0
    text = (HERE / "report.xml").read_text()
    query = next((a.split("=", 1)[1].split(",") for a in sys.argv if a.startswith("--query-gpu=")), None)
    if query is None:
        print("" if fault == "no-xml" else text)
        return 1 if fault == "no-xml" else 0
    if fault == "no-csv":
        print("ERROR: Option --query-gpu is not recognized.")
        return 2
    unknown = [field for field in query if field in plan.get("unknown_fields", [])]
    if unknown:
        print(f'Field "{unknown[0]}" is not a valid field to query.')
        return 2
    root = ET.fromstring(text)
    for index, gpu in enumerate(root.findall("gpu")):
        print(", ".join(cell(root, gpu, index, field) for field in query))
    return 0


sys.exit(main())
