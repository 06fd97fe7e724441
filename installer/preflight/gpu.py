"""Accelerators. This form of the installer runs on the CPU; it only says whether a GPU was seen."""

from pathlib import Path

from installer.preflight.record import CheckRecord, PreflightContext

_PCI = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers


def nvidia_pci_devices(root: Path = _PCI) -> list[str]:
    """PCI addresses of NVIDIA display controllers, from sysfs: works without any driver."""
    found = []
    for device in sorted(root.glob("*")):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == _NVIDIA and kind.startswith(_DISPLAY_CLASSES):
            found.append(device.name)
    return found


def gpu(context: PreflightContext) -> CheckRecord:
    """Whether there is a GPU on the bus; its absence is not a fault."""
    devices = nvidia_pci_devices()
    observed = f"NVIDIA GPU at {', '.join(devices)}" if devices else "no GPU found: the CPU device is used"
    why = "For information: without a GPU the model answers on the CPU, more slowly."
    return CheckRecord("gpu", "pass", observed, "nothing", why, evidence="/sys/bus/pci/devices")
