"""The machine as the checks see it: files of the kernel below one root, and the GPUs, queried once."""

import re
import threading
from pathlib import Path

from installer import gpu
from installer.gpu import GpuFacts


class Machine:
    """A `root` other than / is another machine's tree: a container's, or one that a test made."""

    def __init__(self, root: Path | str = "/") -> None:
        self.root = Path(root)
        self._lock = threading.Lock()
        self._gpus: GpuFacts | None = None

    def at(self, path: str) -> Path:
        """`path` (absolute) below the root."""
        return self.root / path.lstrip("/")

    def read(self, path: str, limit: int = 1 << 20) -> str:
        """The text of a file; empty if it does not exist or may not be read."""
        try:
            with self.at(path).open("rb") as file:
                return file.read(limit).decode("utf-8", "replace")
        except OSError:
            return ""

    def memory(self) -> tuple[int, int]:
        """Bytes of main memory: total, available."""
        table = dict(re.findall(r"^(\w+):\s+(\d+) kB", self.read("/proc/meminfo"), re.MULTILINE))
        return int(table.get("MemTotal", 0)) * 1024, int(table.get("MemAvailable", 0)) * 1024

    def gpus(self) -> GpuFacts:
        """What NVML and nvidia-smi report. The first caller asks, the others wait for the same answer."""
        with self._lock:
            if self._gpus is None:
                self._gpus = gpu.collect()
            return self._gpus

    def modules(self) -> set[str]:
        """Names of the loaded kernel modules."""
        return {line.split()[0] for line in self.read("/proc/modules", 4 << 20).splitlines() if line.split()}

    def pci(self, vendor: str = "0x10de") -> dict[str, str]:
        """PCI address → class (six hex digits) of every device of one vendor. Needs no driver."""
        found = {}
        for device in sorted(self.at("/sys/bus/pci/devices").glob("*")):
            where = f"/sys/bus/pci/devices/{device.name}"
            if self.read(f"{where}/vendor").strip() == vendor:
                found[device.name] = self.read(f"{where}/class").strip().removeprefix("0x")
        return found

    def gpu_addresses(self) -> list[str]:
        """NVIDIA display controllers: VGA (0300) and 3D (0302)."""
        return [address for address, kind in self.pci().items() if kind.startswith(("0300", "0302"))]

    def kernel_driver(self) -> str:
        """Version of the loaded NVIDIA kernel module; empty if none is."""
        found = re.search(r"Module.*?\s(\d{2,4}(?:\.\d{1,4}){1,3})\b", self.read("/proc/driver/nvidia/version"))
        return found[1] if found else ""
