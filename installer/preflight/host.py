"""The machine itself: privileges, processor, system, C library, Python, memory, clock."""

import ctypes
import os
import platform
import re
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from itertools import islice
from typing import Any

from installer.base import lock
from installer.base.i18n import t
from installer.gpu.command import run
from installer.preflight.record import ModelNeed, PreflightContext, Seen, check, gib
from installer.preflight.torch_build import MAX_FILES

_V2 = {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
GLIBC_MIN = (2, 28)        # the manylinux_2_28 wheels of torch
PYTHON_MIN = (3, 11)
RAM_SERVER = 16 * 10**9    # of a machine with a GPU: "16 GB", part of which firmware keeps, hence not GiB
RAM_OVERHEAD = 1 << 30     # without one: interpreter, libraries, a small cache
SYSTEMD_GOOD, SYSTEMD_LEAST = 252, 249
_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_")


@check(
    1, "rights", t("Rights and lock"),
    required=t("root for a server; no other Atoll command running"),
    why=t("Users, units and /opt belong to root; two installs at once would overwrite each other."),
)  # fmt: skip
def rights(context: PreflightContext) -> Seen:
    """Only the server form needs root. The lock is inspected, not taken."""
    uid = os.geteuid()
    if context.system and uid != 0:
        fix = t("Run it as root, or install under a directory of your own with --prefix DIR.")
        return Seen("fail", t("user id {uid}", uid=uid), fix, "sudo sh install.sh", "id -u")
    holder = lock.holder(context.layout.lock)
    if holder is not None and f"process {os.getpid()}," not in holder:
        fix = t("Wait until it has finished, then run this again.")
        evidence = str(context.layout.lock)
        return Seen("fail", t("the lock is held by {who}", who=holder), fix, "atoll status", evidence)
    return Seen("pass", t("user id {uid}, no other Atoll command", uid=uid), evidence="id -u")


@check(
    2, "cpu", t("Processor"),
    required=t("x86-64 with AVX2 (x86-64-v3) and SHA instructions"),
    why=t("The bundled libraries are built for it."),
)  # fmt: skip
def cpu(context: PreflightContext) -> Seen:
    """x86-64-v3 runs everything, v2 runs slowly. SHA instructions make verification four times as fast."""
    machine = platform.machine()
    if machine != "x86_64":
        return Seen("fail", machine, t("Use an x86-64 server."), evidence="uname -m")
    lines = context.machine.read("/proc/cpuinfo").splitlines()
    flags = set(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), machine)
    evidence = "/proc/cpuinfo: flags"
    virtual = t("In a virtual machine, pass the processor's features through (CPU type 'host').")
    if missing := " ".join(sorted(_V2 - flags)):
        fix = t("Use a newer processor. {else_}", else_=virtual)
        return Seen("fail", t("{name}, without {missing}", name=name, missing=missing), fix, "lscpu", evidence)
    if missing := " ".join(sorted(_V3 - flags)):
        seen = t("{name}, without {missing}", name=name, missing=missing)
        return Seen("warn", seen, virtual, "lscpu", evidence, why=t("It will run, but slowly."))
    if "sha_ni" not in flags:
        why = t("Without SHA instructions verification takes about four times as long.")
        seen = t("{name}, without {missing}", name=name, missing="sha_ni")
        return Seen("warn", seen, virtual, "lscpu", evidence, why=why)
    return Seen("pass", name, evidence=evidence)


@check(
    3, "systemd", t("Operating system and systemd"),
    required=t("systemd 252 or newer, cgroup v2"),
    why=t("systemd starts the service, confines it and keeps it running."),
)  # fmt: skip
def systemd(context: PreflightContext) -> Seen:
    """Only the server form needs systemd."""
    release = context.machine.read("/etc/os-release")
    found = re.search(r'^PRETTY_NAME="?([^"\n]*)', release, re.MULTILINE)
    system = found[1] if found else "Linux"
    if not context.system:
        return Seen("pass", t("{system}; systemd is not needed under a prefix", system=system))
    if not context.machine.at("/run/systemd/system").is_dir():
        fix = t("Use a system that systemd has booted, or install with --prefix DIR.")
        return Seen("fail", t("{system}, not booted by systemd", system=system), fix, evidence="/run/systemd/system")
    version = re.match(r"systemd (\d+)", run(["systemctl", "--version"], 3).stdout)
    number = int(version[1]) if version else 0
    seen, evidence = t("{system}, systemd {number}", system=system, number=number), "systemctl --version"
    upgrade = t("Use Debian 12, Ubuntu 24.04, RHEL 10 or newer.")
    if number < SYSTEMD_LEAST:
        return Seen("fail", seen, upgrade, "systemctl --version", evidence)
    if not context.machine.at("/sys/fs/cgroup/cgroup.controllers").is_file():
        fix = t("Boot with cgroup v2: add systemd.unified_cgroup_hierarchy=1 to the kernel's command line.")
        return Seen("fail", t("{seen}, cgroup v1", seen=seen), fix, "stat -fc %T /sys/fs/cgroup", "/sys/fs/cgroup")
    if number < SYSTEMD_GOOD:
        why = t("Some limits in the units are unknown to it and have no effect.")
        return Seen("warn", seen, upgrade, "systemctl --version", evidence, why=why)
    return Seen("pass", seen, evidence=evidence)


@check(
    4, "glibc", t("C library"),
    required=t("glibc {version} or newer", version="2.28"),
    why=t("The bundled libraries are linked against it."),
)  # fmt: skip
def glibc(context: PreflightContext) -> Seen:
    """The C library must be at least as new as the newest one that a wheel of the runtime was built against."""
    library, version = platform.libc_ver()
    need = max(GLIBC_MIN, _newest_manylinux(context))
    required = t("glibc {version} or newer", version=f"{need[0]}.{need[1]}")
    observed = f"{library or 'libc ?'} {version}".strip()
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if library == "glibc" and numbers and (int(numbers[1]), int(numbers[2])) >= need:
        return Seen("pass", observed, evidence="ldd --version", required=required)
    fix = t("Use a newer distribution with glibc (Debian 12, Ubuntu 24.04, RHEL 9 or newer).")
    return Seen("fail", observed, fix, "ldd --version", "ldd --version", required)


def _newest_manylinux(context: PreflightContext) -> tuple[int, int]:
    """The newest glibc that a wheel needs. A wheel with several tags runs on the oldest of them."""
    if context.runtime is not None:
        texts = [wheel.name for wheel in islice(context.runtime.rglob("*.whl"), MAX_FILES)]
    else:
        texts = [_wheel_tags(name) for name in ("torch", "triton", "numpy")]
    newest = (0, 0)
    for text in texts:
        tags = [(int(major), int(minor)) for major, minor in _MANYLINUX.findall(text)]
        newest = max(newest, min(tags, default=(0, 0)))
    return newest


def _wheel_tags(name: str) -> str:
    """The platforms an installed package's wheel was built for; empty if the package is not installed."""
    try:
        return metadata.distribution(name).read_text("WHEEL") or ""
    except (metadata.PackageNotFoundError, OSError):
        return ""


@check(
    14, "memory", t("Main memory"),
    required=t("room for the weights"), why=t("Weights pass through main memory while they load, or stay in it."),
)  # fmt: skip
def memory(context: PreflightContext) -> Seen:
    """With a GPU: the largest shard, 16 GB, and weights that stay in main memory. On the CPU: all weights, with room to
    work."""
    total, available = context.machine.memory()
    observed = t("{total} in all, {available} available", total=gib(total), available=gib(available))
    add = t("Add memory, or choose a smaller model.")
    asked = context.host_ram_bytes or 0
    if context.no_gpu_needed() is not None:
        need = max(int(context.weight_bytes * 1.25) + RAM_OVERHEAD, asked)
        least, why = need, t("On the CPU, the weights and the KV cache are held in main memory.")
        required = t("{need} (1.25 × weights + 1 GiB, or what the bundle requires)", need=gib(need))
    else:
        shard = context.shard_bytes or context.weight_bytes
        tables = tables_in_main_memory(context.needs, total)
        need, least = max(int(shard * 1.25) + RAM_SERVER + tables, asked), max(RAM_SERVER + tables, asked)
        required = t("{need} (1.25 × the largest file of weights + 16 GB)", need=gib(need))
        if tables:
            required = t("{need} (1.25 × the largest file of weights + 16 GB + {tables} of per-layer embeddings)",
                         need=gib(need), tables=gib(tables))
        why = t("Weights pass through main memory; what stays in the page cache makes the next start fast.")
    said: dict[str, Any] = {"evidence": "/proc/meminfo", "required": required, "why": why}
    if total < least:
        return Seen("fail", observed, add, "free -h", **said)
    if total < need or total < context.weight_bytes:
        return Seen("warn", observed, add, "free -h", **said)
    if available < need:
        fix = t("Stop other programs.")
        return Seen("warn", observed, fix, "ps aux --sort=-rss | head", **said)
    return Seen("pass", observed, **said)


def tables_in_main_memory(needs: Iterable[ModelNeed], memory: int) -> int:
    """Bytes of embedding tables that stay in main memory beside a GPU, if the machine has `memory` bytes. With "auto",
    the engine uses only memory that it needs for nothing else."""
    return sum(need.table_bytes for need in needs
               if need.tables == "host" or (need.tables == "auto" and memory >= RAM_SERVER + need.table_bytes))


@check(
    20, "clock", t("Clock"),
    required=t("later than the bundle's date, and synchronised"),
    why=t("Certificates, expiry of keys and logs depend on it."),
)  # fmt: skip
def clock(context: PreflightContext) -> Seen:
    """A clock before the bundle's date is wrong. One that is not synchronised will become wrong."""
    now = time.time()
    observed = _date(now)
    if context.bundle_created is not None and now < context.bundle_created:
        created = _date(context.bundle_created)
        status = "fail" if now < context.bundle_created - 86400 else "warn"
        required = t("not before {created}, when the bundle was made", created=created)
        command = "timedatectl set-time 'YYYY-MM-DD HH:MM:SS'"
        return Seen(status, observed, t("Set the clock."), command, "date -u", required)
    if context.system and not _synchronised():
        fix = t("Name the site's time server in /etc/chrony/chrony.conf or /etc/systemd/timesyncd.conf.")
        seen = t("{now}, but the clock is not synchronised", now=observed)
        return Seen("warn", seen, fix, "timedatectl timesync-status", "adjtimex(2): STA_UNSYNC")
    return Seen("pass", observed, evidence="date -u")


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def _synchronised() -> bool:
    """Whether the kernel's clock is synchronised. Asks only the kernel."""
    buffer = ctypes.create_string_buffer(512)  # struct timex: modes, offset, freq, maxerror, esterror, status
    if ctypes.CDLL(None, use_errno=True).adjtimex(buffer) < 0:
        return True  # a sandbox that hides it is not a fault of the clock
    status = ctypes.c_int.from_buffer(buffer, 5 * ctypes.sizeof(ctypes.c_long)).value
    return not status & 0x40


@check(
    26, "python", t("Python"),
    required=t("Python {version} or newer, 64 bit", version="3.11"), why=t("The service runs on it."),
)  # fmt: skip
def python(context: PreflightContext) -> Seen:
    """The interpreter that runs this will also run the service."""
    observed, evidence = f"{platform.python_version()}  {sys.executable}", "python3 --version"
    if sys.version_info[:2] < PYTHON_MIN or sys.maxsize <= 2**32:
        fix = t("Run the installer with a newer Python.")
        return Seen("fail", observed, fix, "sudo sh install.sh --python /path/to/python3.12", evidence)
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    if context.pythons and mine not in context.pythons:
        fix = t("Run the installer with the Python that the runtime was built for.")
        command = f"sudo sh install.sh --python /path/to/python{context.pythons[0]}"
        required = t("Python {versions}, for which the runtime was built", versions=", ".join(context.pythons))
        return Seen("fail", observed, fix, command, evidence, required)
    return Seen("pass", observed, evidence=evidence)
