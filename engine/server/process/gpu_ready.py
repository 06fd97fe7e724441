"""`atoll gpu-ready`: wait until the GPU can be used, and say what is missing when it cannot.

If an engine started a moment before its driver, it would find no GPU, and after a boot it would run on the CPU or in a
crash loop. So the unit first checks the device nodes, NVML, and that the loaded driver and the library have the same
version. Exit status: 0 ready, 1 not ready in time, 2 wrong flags.
"""

import ctypes
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from engine.errors import told
from engine.message import msg, reason
from engine.server.process.notify import Notifier
from engine.server.settings.help_parser import HelpParser, help_text

POLL_SECONDS = 1.0
LIBRARY = "libnvidia-ml.so.1"

_MISMATCH = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH
_WORDS = {
    2: msg("an argument was refused"),
    3: msg("not supported"),
    4: msg("no permission"),
    9: msg("the driver is not loaded"),
    12: msg("a library function is missing"),
    15: msg("the GPU has fallen off the bus"),
    16: msg("the GPU must be reset"),
    _MISMATCH: msg("driver and library have different versions"),
    999: msg("unknown error"),
}
_HELP = """\
examples:
  atoll gpu-ready                 wait up to 120 s
  atoll gpu-ready --timeout 0     look once
  atoll gpu-ready --json          the facts, for programs
"""


@dataclass(slots=True)
class Readiness:
    """The result of one check. `problem` is "" when the GPU can be used; `fix` is the next command."""

    problem: str = ""
    fix: str = ""
    driver: str = ""
    gpus: list[str] = field(default_factory=list)  # UUIDs


def inspect_gpu(root: Path = Path("/"), library: str = LIBRARY) -> Readiness:
    """Check device nodes, versions and NVML once."""
    version = root / "proc/driver/nvidia/version"
    try:
        kernel = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)", version.read_text())
    except OSError:
        return Readiness(msg("The NVIDIA driver is not loaded."), "modprobe nvidia; dmesg | grep -i nvidia")
    driver = kernel[1] if kernel else ""
    for node, fix in (("nvidiactl", "nvidia-modprobe -c0"), ("nvidia-uvm", "nvidia-modprobe -u -c0")):
        if not (root / "dev" / node).exists():
            return Readiness(msg("/dev/{node} does not exist.", node=node), fix, driver)
    try:
        found = _nvml(library)
    except OSError as error:
        return Readiness(msg("The driver's library cannot be loaded: {error}.", error=reason(error)),
                         msg("reinstall the driver's packages"), driver)
    if isinstance(found, int):
        if found == _MISMATCH:
            return Readiness(
                msg("Driver and library have different versions (the loaded driver is {driver}).", driver=driver),
                msg("reboot, then keep the packages from upgrading: apt-mark hold 'nvidia-*'"), driver)
        said = _WORDS.get(found) or f"error {found}"
        return Readiness(msg("NVML answers: {said}.", said=said), "nvidia-smi; dmesg | grep -i nvrm", driver)
    if not found:
        return Readiness(msg("The driver works, but finds no GPU."), "lspci -d 10de:; dmesg | grep -i nvrm", driver)
    return Readiness(driver=driver, gpus=found)


def _nvml(library: str) -> list[str] | int:
    """UUIDs of the GPUs, or NVML's error number. Raises OSError if the library is missing or is not one."""
    nvml = ctypes.CDLL(library)
    try:
        start, stop, count = nvml.nvmlInit_v2, nvml.nvmlShutdown, nvml.nvmlDeviceGetCount_v2
        handle, name = nvml.nvmlDeviceGetHandleByIndex_v2, nvml.nvmlDeviceGetUUID
    except AttributeError as error:
        raise OSError(str(error)) from None
    if error := start():
        return int(error)
    try:
        number = ctypes.c_uint()
        if error := count(ctypes.byref(number)):
            return int(error)
        uuids: list[str] = []
        for index in range(number.value):
            device, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
            if error := handle(ctypes.c_uint(index), ctypes.byref(device)):
                return int(error)
            if error := name(device, text, ctypes.c_uint(len(text))):
                return int(error)
            uuids.append(text.value.decode(errors="replace"))
        return uuids
    finally:
        stop()


def main(argv: Sequence[str]) -> int:
    """Entry point of `atoll gpu-ready`; returns the exit status."""
    parser = HelpParser(prog="atoll gpu-ready", description="Wait until the GPU can be used.", epilog=_HELP)
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS",
                        help=help_text("how long to wait (120)"))
    parser.add_argument("--json", action="store_true", help=help_text("print one JSON object"))
    parser.add_help_flags()
    options = parser.parse_args(argv)
    notifier, deadline, said = Notifier(), time.monotonic() + options.timeout, ""
    while (found := inspect_gpu()).problem and time.monotonic() < deadline:
        if found.problem != said:
            said = found.problem
            notifier.status(said)
            if not options.json:
                print(told(msg("waiting: {said}", said=said)), file=sys.stderr)
        time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
    if options.json:
        print(json.dumps({"ready": not found.problem, **asdict(found)}))
    elif found.problem:
        print(told(msg("The GPU is not ready. {problem}\n  Next: {fix}", problem=found.problem, fix=found.fix)),
              file=sys.stderr)
    else:
        count = len(found.gpus)
        ready = msg("{count} GPU ready, driver {driver}", count=count, driver=found.driver)
        if count != 1:
            ready = msg("{count} GPUs ready, driver {driver}", count=count, driver=found.driver)
        print(told(ready))
    return 1 if found.problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
