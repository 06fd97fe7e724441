"""The machine itself: processor, C library, Python, memory, clock."""

import platform
import sys
import time
from pathlib import Path

import psutil

from installer.preflight.record import CheckRecord, PreflightContext, gib

_V2 = {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
GLIBC_MIN = (2, 28)        # the manylinux_2_28 wheels of torch
PYTHON_MIN = (3, 11)
RAM_OVERHEAD = 1 << 30     # interpreter, libraries, a small cache


def cpu(context: PreflightContext) -> CheckRecord:
    """x86-64-v3 runs everything; v2 runs slowly; SHA instructions make verification four times as fast."""
    machine = platform.machine()
    required = "x86-64 with AVX2 (x86-64-v3)"
    why = "The bundled libraries are built for it."
    if machine != "x86_64":
        return CheckRecord("cpu", "fail", machine, required, why, "Use an x86-64 server.", "uname -m", strict=True)
    info = Path("/proc/cpuinfo").read_text()
    flags = set(next((line.split(":", 1)[1].split() for line in info.splitlines() if line.startswith("flags")), []))
    name = next((line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")), machine)
    evidence = "/proc/cpuinfo flags"
    if _V2 - flags:
        missing = " ".join(sorted(_V2 - flags))
        return CheckRecord(
            "cpu", "fail", f"{name}, without {missing}", required, why, "Use a newer processor, or pass its features "
            "through to the virtual machine (CPU type 'host').", evidence, strict=True,
        )
    if _V3 - flags:
        missing = " ".join(sorted(_V3 - flags))
        why, fix = "It will run, but slowly.", "In a virtual machine, set the CPU type to 'host'."
        return CheckRecord("cpu", "warn", f"{name}, without {missing}", required, why, fix, evidence)
    if "sha_ni" not in flags:
        why = "Without SHA instructions verification takes about four times as long."
        return CheckRecord("cpu", "warn", f"{name}, without sha_ni", "SHA instructions", why, "", evidence)
    return CheckRecord("cpu", "pass", name, required, why, evidence=evidence)


def glibc(context: PreflightContext) -> CheckRecord:
    """The C library must be as new as the one that the wheels were built against."""
    library, version = platform.libc_ver()
    required = f"glibc ≥ {'.'.join(map(str, GLIBC_MIN))}"
    why = "The bundled libraries are linked against it."
    observed = f"{library or 'unknown C library'} {version}".strip()
    good = library == "glibc" and tuple(int(part) for part in version.split(".")[:2]) >= GLIBC_MIN
    fix = "" if good else "Use a distribution from 2019 or later with glibc (Debian 11, RHEL 8, Ubuntu 20.04 or newer)."
    return CheckRecord("glibc", "pass" if good else "fail", observed, required, why, fix, "ldd --version", strict=True)


def python(context: PreflightContext) -> CheckRecord:
    """The interpreter that will run the service is the one that runs this."""
    good = sys.version_info[:2] >= PYTHON_MIN and sys.maxsize > 2**32
    required = f"Python ≥ {'.'.join(map(str, PYTHON_MIN))}, 64 bit"
    fix = "" if good else "Run the installer with a newer python3."
    observed = f"{platform.python_version()} at {sys.executable}"
    why = "The service runs on it."
    return CheckRecord("python", "pass" if good else "fail", observed, required, why, fix, strict=True)


def memory(context: PreflightContext) -> CheckRecord:
    """On the CPU the weights live in main memory, with room to work."""
    memory = psutil.virtual_memory()
    need = max(int(context.weight_bytes * 1.25) + RAM_OVERHEAD, context.host_ram_bytes or 0)
    observed = f"{gib(memory.total)} in all, {gib(memory.available)} available"
    required = f"{gib(need)} (1.25 × weights + 1 GiB, or what the bundle asks for)"
    why = "The model's weights and the cache of its conversations are held in memory."
    fix = ""
    status = "pass"
    if memory.total < need:
        status, fix = "fail", "Add memory, or install a bundle with a smaller model."
    elif memory.available < need:
        status, fix = "warn", "Stop other programs; see which use most with: ps aux --sort=-rss | head"
    return CheckRecord("memory", status, observed, required, why, fix, "/proc/meminfo", strict=True)


def clock(context: PreflightContext) -> CheckRecord:
    """A clock before the bundle's date makes certificates, key expiry and logs wrong."""
    now = time.time()
    observed = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    if context.bundle_created is None:
        return CheckRecord("clock", "pass", observed, "not before the bundle", "Expiry dates and logs depend on it.")
    created = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(context.bundle_created))
    good = now >= context.bundle_created - 86400
    fix = "" if good else "Set the clock: timedatectl set-time 'YYYY-MM-DD HH:MM:SS'"
    return CheckRecord(
        "clock", "pass" if good else "fail", observed, f"not before {created}, when the bundle was made",
        "Expiry dates and logs depend on it.", fix, "date -u",
    )
