"""Each GPU in detail, for a person who decides whether to use it: memory, health, limits, other processes on it."""

from dataclasses import dataclass

from installer.preflight.machine import Machine


@dataclass(frozen=True)
class GpuDetail:
    """None: the driver does not report it. Bytes, watts, degrees Celsius."""

    index: int | None
    name: str
    memory_total: int | None
    memory_free: int | None
    compute_capability: str
    ecc: bool | None
    ecc_uncorrected: int | None
    mig: bool | None
    pcie_gen: int | None
    pcie_width: int | None
    power_limit: float | None
    temperature: int | None
    processes: tuple[tuple[int, str, int | None], ...]   # pid, name, bytes


@dataclass(frozen=True)
class GpuDetails:
    gpus: tuple[GpuDetail, ...]
    driver: str
    cuda: str


def gpu_details() -> GpuDetails:
    """What NVML and nvidia-smi report now; takes about a second."""
    machine = Machine()
    facts = machine.gpus()
    gpus = tuple(
        GpuDetail(
            gpu.index, gpu.name or gpu.uuid or "GPU", gpu.memory_total, gpu.memory_free,
            ".".join(map(str, gpu.compute_cap)) if gpu.compute_cap else "", gpu.ecc, gpu.ecc_uncorrected, gpu.mig,
            gpu.pcie_gen, gpu.pcie_width, gpu.power_limit, gpu.temperature,
            tuple((each.pid, each.name, each.used) for each in gpu.processes),
        ) for gpu in facts.gpus
    )  # fmt: skip
    return GpuDetails(gpus, facts.driver or machine.kernel_driver(), ".".join(map(str, facts.cuda or ())))
