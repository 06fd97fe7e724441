"""Ask the driver through NVML and print one JSON object. A program of its own: a driver that hangs or crashes takes
only this process with it. Run with `python -I -S`; needs nothing but the standard library.

Every value that this driver or this GPU does not give is null. Sizes in bytes, power in watts.
"""

import ctypes
import json
import sys
from ctypes import Structure, byref, c_char, c_int, c_uint, c_ulonglong, c_void_p, create_string_buffer

LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "/usr/lib64/libnvidia-ml.so.1")
SUCCESS, INSUFFICIENT_SIZE = 0, 7
COMPUTE_MODES = ("default", "exclusive", "prohibited", "exclusive")
MAX_GPUS, MAX_PROCESSES = 64, 4096


class Memory2(Structure):
    _fields_ = [("version", c_uint), ("total", c_ulonglong), ("reserved", c_ulonglong), ("free", c_ulonglong),
                ("used", c_ulonglong)]  # fmt: skip


class Memory1(Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


class Pci(Structure):
    _fields_ = [("legacy", c_char * 16), ("domain", c_uint), ("bus", c_uint), ("device", c_uint),
                ("device_id", c_uint), ("subsystem_id", c_uint), ("bus_id", c_char * 32)]  # fmt: skip


class Process(Structure):
    _fields_ = [("pid", c_uint), ("used", c_ulonglong), ("gpu_instance", c_uint), ("compute_instance", c_uint)]


class Nvml:
    """The library, called by name. A missing symbol counts as 'not supported'."""

    def __init__(self, library):
        self.library = library

    def call(self, names, *arguments):
        """Return code of the first of `names` that exists; None if none does."""
        for name in names.split():
            function = getattr(self.library, name, None)
            if function is not None:
                function.restype = c_int
                return function(*arguments)
        return None

    def good(self, names, *arguments):
        return self.call(names, *arguments) == SUCCESS

    def number(self, names, device, kind=c_uint, *before):
        value = kind()
        return value.value if self.good(names, device, *before, byref(value)) else None

    def text(self, names, *before):
        buffer = create_string_buffer(96)
        return buffer.value.decode("utf-8", "replace") if self.good(names, *before, buffer, c_uint(96)) else None

    def two(self, names, device):
        """Two numbers from one call."""
        first, second = c_uint(), c_uint()
        return (first.value, second.value) if self.good(names, device, byref(first), byref(second)) else (None, None)

    def error(self, code):
        function = getattr(self.library, "nvmlErrorString", None)
        if function is None:
            return f"error {code}"
        function.restype = ctypes.c_char_p
        said = function(c_int(code))
        return said.decode("utf-8", "replace") if said else f"error {code}"


def memory(nvml, device):
    """Total, used, free. The second version counts memory reserved by the driver apart from memory used by programs."""
    newer = Memory2(version=ctypes.sizeof(Memory2) | 2 << 24)
    if nvml.good("nvmlDeviceGetMemoryInfo_v2", device, byref(newer)):
        return newer.total, newer.used, newer.free
    older = Memory1()
    if nvml.good("nvmlDeviceGetMemoryInfo", device, byref(older)):
        return older.total, older.used, older.free
    return None, None, None


def processes(nvml, device):
    names = "nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetComputeRunningProcesses_v2"
    count = c_uint(0)
    code = nvml.call(names, device, byref(count), None)
    if code != INSUFFICIENT_SIZE or not count.value:
        return []
    count = c_uint(min(count.value + 16, MAX_PROCESSES))  # more may start in the meantime
    table = (Process * count.value)()
    if not nvml.good(names, device, byref(count), table):
        return []
    unknown = (1 << 64) - 1
    return [{"pid": p.pid, "used": None if p.used == unknown else p.used} for p in table[: count.value]]


def gpu(nvml, index, device):
    total, used, free = memory(nvml, device)
    bus = Pci()
    has_bus = nvml.good("nvmlDeviceGetPciInfo_v3 nvmlDeviceGetPciInfo_v2", device, byref(bus))
    major, minor = nvml.two("nvmlDeviceGetCudaComputeCapability", device)
    mode = nvml.number("nvmlDeviceGetComputeMode", device)
    rows = [c_uint() for _ in range(4)]
    remapped = nvml.good("nvmlDeviceGetRemappedRows", device, *map(byref, rows))
    switches = {
        "persistence": nvml.number("nvmlDeviceGetPersistenceMode", device),
        "mig": nvml.two("nvmlDeviceGetMigMode", device)[0],
        "ecc": nvml.two("nvmlDeviceGetEccMode", device)[0],
        "remap_pending": rows[2].value if remapped else None,
        "remap_failed": rows[3].value if remapped else None,
    }
    limits = {
        "power_draw": nvml.number("nvmlDeviceGetPowerUsage", device),
        "power_limit": nvml.number("nvmlDeviceGetPowerManagementLimit", device),
        "power_default": nvml.number("nvmlDeviceGetPowerManagementDefaultLimit", device),
    }
    ecc = [nvml.number("nvmlDeviceGetTotalEccErrors", device, c_ulonglong, c_int(kind), c_int(0)) for kind in (0, 1)]
    return {
        "index": index,
        "uuid": nvml.text("nvmlDeviceGetUUID", device),
        "pci": bus.bus_id.decode("ascii", "replace") if has_bus else None,
        "minor": nvml.number("nvmlDeviceGetMinorNumber", device),
        "name": nvml.text("nvmlDeviceGetName", device),
        "compute_cap": None if major is None else [major, minor],
        "memory_total": total,
        "memory_used": used,
        "memory_free": free,
        "compute_mode": COMPUTE_MODES[mode] if mode is not None and mode < len(COMPUTE_MODES) else None,
        "ecc_corrected": ecc[0],
        "ecc_uncorrected": ecc[1],
        "pcie_gen": nvml.number("nvmlDeviceGetCurrPcieLinkGeneration", device),
        "pcie_width": nvml.number("nvmlDeviceGetCurrPcieLinkWidth", device),
        "pcie_width_max": nvml.number("nvmlDeviceGetMaxPcieLinkWidth", device),
        "temperature": nvml.number("nvmlDeviceGetTemperature", device, c_uint, c_int(0)),
        "processes": processes(nvml, device),
        **{name: None if value is None else bool(value) for name, value in switches.items()},
        **{name: None if value is None else value / 1000 for name, value in limits.items()},
    }


def probe():
    """Everything, or {"error": why}."""
    library = None
    said = "libnvidia-ml.so.1 is not installed"
    for name in LIBRARIES:
        try:
            library = ctypes.CDLL(name)
            break
        except OSError as error:
            if "cannot open shared object file" not in str(error):
                said = str(error)
    if library is None:
        return {"error": said}
    nvml = Nvml(library)
    code = nvml.call("nvmlInit_v2 nvmlInit")
    if code != SUCCESS:
        return {"error": "libnvidia-ml.so.1 lacks nvmlInit" if code is None else nvml.error(code)}
    count = c_uint(0)
    code = nvml.call("nvmlDeviceGetCount_v2 nvmlDeviceGetCount", byref(count))
    if code != SUCCESS:
        return {"error": "no count of devices" if code is None else nvml.error(code)}
    version, cuda = c_int(), None
    if nvml.good("nvmlSystemGetCudaDriverVersion_v2 nvmlSystemGetCudaDriverVersion", byref(version)):
        cuda = [version.value // 1000, version.value % 1000 // 10]
    gpus, problems = [], []
    for index in range(min(count.value, MAX_GPUS)):
        device = c_void_p()
        code = nvml.call("nvmlDeviceGetHandleByIndex_v2 nvmlDeviceGetHandleByIndex", c_uint(index), byref(device))
        if code == SUCCESS:
            gpus.append(gpu(nvml, index, device))
        else:
            problems.append(f"GPU {index}: {nvml.error(code)}")
    return {"driver": nvml.text("nvmlSystemGetDriverVersion"), "cuda": cuda, "gpus": gpus, "problems": problems}


if __name__ == "__main__":
    json.dump(probe(), sys.stdout)
