"""What is known about the GPUs of this machine, from any source.

None means everywhere: no source reported it. Sizes in bytes, power in watts.
"""

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU."""

    pid: int
    name: str = ""
    used: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `compute_mode`: default, exclusive, prohibited. PCIe widths in lanes."""

    index: int | None = None
    uuid: str | None = None
    pci: str | None = None                      # as sysfs writes it: 0000:06:00.0
    minor: int | None = None                    # /dev/nvidia<minor>
    name: str | None = None
    compute_cap: tuple[int, int] | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    memory_free: int | None = None
    persistence: bool | None = None
    compute_mode: str | None = None
    mig: bool | None = None
    ecc: bool | None = None
    ecc_corrected: int | None = None            # volatile: since the driver was loaded
    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    power_draw: float | None = None             # now, or the mean of the last second
    power_limit: float | None = None
    power_default: float | None = None
    temperature: int | None = None
    fabric_state: str | None = None             # in progress, completed, … where NVSwitch joins GPUs
    processes: tuple[GpuProcess, ...] = ()

    @property
    def label(self) -> str:
        """Its name in messages: number and model."""
        number = "?" if self.index is None else self.index
        return f"GPU {number} ({self.name or self.uuid or self.pci or 'unnamed'})"

    def filled_from(self, other: "Gpu") -> "Gpu":
        """This, with unknown fields taken from `other`."""
        missing = {f.name: getattr(other, f.name) for f in fields(self) if getattr(self, f.name) in (None, ())}
        processes = {p.pid: p for p in (*other.processes, *self.processes)}
        for known in other.processes:  # NVML gives no names
            mine = processes[known.pid]
            processes[known.pid] = GpuProcess(known.pid, mine.name or known.name, mine.used or known.used)
        return replace(self, **missing) if not processes else replace(
            self, **{**missing, "processes": tuple(processes[pid] for pid in sorted(processes))}
        )

    def is_the_same_as(self, other: "Gpu") -> bool:
        """Whether both are the same device: by UUID, else by PCI address, else by index."""
        for name in ("uuid", "pci", "index"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None and theirs is not None:
                return mine == theirs
        return False


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What one source, or all of them together, know. An error is a line as the source wrote it; "": it
    answered."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None                    # 580.159.04
    cuda: tuple[int, int] | None = None          # the highest CUDA version that the driver supports
    nvml_error: str = ""
    smi_error: str = ""
    sources: tuple[str, ...] = field(default=())

    @property
    def answered(self) -> bool:
        """Whether the driver answered at all."""
        return bool(self.sources)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        for gpu in data["gpus"]:
            gpu["compute_cap"] = _dotted(gpu["compute_cap"])
        return {**data, "cuda": _dotted(self.cuda)}


def _dotted(version: tuple[int, int] | None) -> str | None:
    return None if version is None else f"{version[0]}.{version[1]}"


def merge(*sources: GpuFacts) -> GpuFacts:
    """All sources as one. If two disagree, the earlier one wins."""
    gpus: list[Gpu] = []
    for source in sources:
        for gpu in source.gpus:
            at = next((i for i, known in enumerate(gpus) if known.is_the_same_as(gpu)), None)
            if at is None:
                gpus.append(gpu)
            else:
                gpus[at] = gpus[at].filled_from(gpu)
    gpus.sort(key=lambda gpu: (gpu.index is None, gpu.index or 0))
    return GpuFacts(
        tuple(gpus),
        next((s.driver for s in sources if s.driver), None),
        next((s.cuda for s in sources if s.cuda), None),
        next((s.nvml_error for s in sources if s.nvml_error), ""),
        next((s.smi_error for s in sources if s.smi_error), ""),
        tuple(name for s in sources for name in s.sources),
    )
