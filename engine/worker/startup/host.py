"""The memory that is available to this process: the kernel's estimate, and the limits of its control groups."""

from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# A group's usage includes cached file pages, which the kernel reclaims before it refuses memory.
_RECLAIMABLE = ("inactive_file", "active_file")


def host_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> tuple[int, int]:
    """(total bytes, available bytes). A container or a unit with MemoryMax= has at most what its limit leaves."""
    sizes = {}
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        name, value = line.split(":", 1)
        sizes[name] = int(value.split()[0]) * 1024
    left = [room for group in _groups(proc, cgroups) if (room := _room(group)) is not None]
    return sizes["MemTotal"], min([sizes["MemAvailable"], *left])


def _groups(proc: Path, cgroups: Path) -> list[Path]:
    """The control group of this process (version 2) and those around it: each may have a limit."""
    path = "/"
    try:
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::/") and ".." not in line:  # ".." where the mount shows another part of the tree
                path = line[3:]
    except OSError:
        pass
    own = cgroups / path.lstrip("/")
    return [own, *(parent for parent in own.parents if parent.is_relative_to(cgroups))]


def _room(group: Path) -> int | None:
    """Bytes that may still be taken in a group; None if it has no limit."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # no such file, or "max"
    return max(0, limit - used + sum(int(counts.get(name, 0)) for name in _RECLAIMABLE))
