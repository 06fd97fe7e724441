"""GPU facts from NVML, by a child process that may hang or die."""

import json
import sys
from pathlib import Path
from typing import Any

from installer.gpu import values
from installer.gpu.command import clean, run
from installer.gpu.facts import Gpu, GpuFacts, GpuProcess

BUDGET = 7.0  # seconds, of the ten that a preflight may take
_PROBE = Path(__file__).with_name("nvml_probe.py")
_TEXTS = {"uuid": values.uuid, "pci": values.pci, "name": values.word, "compute_mode": values.compute_mode}
_SWITCHES = ("persistence", "mig", "ecc", "remap_pending", "remap_failed")
_COUNTS = ("index", "minor", "memory_total", "memory_used", "memory_free", "ecc_corrected", "ecc_uncorrected",
           "pcie_gen", "pcie_width", "pcie_width_max", "temperature")  # fmt: skip
_WATTS = ("power_draw", "power_limit", "power_default")


def query(budget: float = BUDGET) -> GpuFacts:
    """Ask NVML. Never raises."""
    output = run([sys.executable, "-I", "-S", str(_PROBE)], budget)
    if not output.ok:
        code = output.code or 0
        died = f"the probe died of signal {-code}" if code < 0 else output.said
        return GpuFacts(nvml_error=f"NVML: {died}")
    return parse(output.stdout)


def parse(text: str) -> GpuFacts:
    """The probe's answer as facts. It comes from a foreign library, so every value is checked."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        return GpuFacts(nvml_error="NVML: no usable answer")
    if "error" in data:
        return GpuFacts(nvml_error=f"NVML: {clean(str(data['error']))}")
    gpus = [_gpu(entry) for entry in _list(data.get("gpus"))[:64] if isinstance(entry, dict)]
    problems = "; ".join(clean(str(problem)) for problem in _list(data.get("problems"))[:8])
    cuda = data.get("cuda")
    return GpuFacts(
        tuple(gpus),
        values.driver(data["driver"]) if isinstance(data.get("driver"), str) else None,
        _pair(cuda),
        nvml_error=f"NVML: {problems}" if problems else "",
        sources=("NVML",),
    )


def _gpu(entry: dict[str, Any]) -> Gpu:
    given: dict[str, Any] = {}
    for name, read in _TEXTS.items():
        value = entry.get(name)
        given[name] = read(value) if isinstance(value, str) else None
    for name in _SWITCHES:
        value = entry.get(name)
        given[name] = value if isinstance(value, bool) else None
    for name in _COUNTS:
        given[name] = _count(entry.get(name))
    for name in _WATTS:
        value = entry.get(name)
        known = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6
        given[name] = float(value) if isinstance(value, int | float) and known else None
    processes = [p for p in _list(entry.get("processes"))[:4096] if isinstance(p, dict) and _count(p.get("pid"))]
    used = tuple(GpuProcess(p["pid"], used=_count(p.get("used"))) for p in processes)
    return Gpu(**given, compute_cap=_pair(entry.get("compute_cap")), processes=used)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def _pair(value: Any) -> tuple[int, int] | None:
    whole = isinstance(value, list) and len(value) == 2 and all(type(v) is int and 0 <= v < 1000 for v in value)
    return (value[0], value[1]) if whole else None
