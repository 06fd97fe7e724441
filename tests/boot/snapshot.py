"""What a machine looks like on its disk: every file, user, group and unit. Two snapshots show what came and went."""

import hashlib
import os
import stat
from pathlib import Path

# What a running system changes by itself; nothing of Atoll's lies there.
ITS_OWN = (
    "root/", "tmp/", "var/tmp/", "var/log/journal/", "var/log/wtmp", "var/log/btmp", "var/log/lastlog",
    "var/lib/systemd/random-seed", "var/lib/systemd/credential.secret", "var/lib/systemd/linger",
    "var/lib/systemd/timesync/", "var/lib/private", "var/cache/private", "var/log/private",
    "etc/passwd-", "etc/group-", "etc/shadow-", "etc/gshadow-", "etc/.pwd.lock", "etc/.updated", "var/.updated",
    "var/backups/", "var/lib/logrotate", "var/lib/apt/", "var/cache/apt/", "var/lib/dpkg/lock", "var/lib/man-db",
)  # fmt: skip
MIB = 1 << 20


def snapshot(root: Path) -> dict[str, str]:
    """Path → kind, owner, mode and content of everything on the disk."""
    found = {}
    for directory, directories, files in os.walk(root):
        for name in [*directories, *files]:
            path = Path(directory) / name
            inside = path.relative_to(root).as_posix()
            if inside.startswith(ITS_OWN) or inside + "/" in ITS_OWN or "/__pycache__" in inside:
                continue
            status = path.lstat()
            found[inside] = f"{stat.filemode(status.st_mode)} {status.st_uid}:{status.st_gid} {_content(path, status)}"
    return found


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """One line for each thing that was added, is gone, or is not what it was."""
    lines = [f"added    {path}  {after[path]}" for path in sorted(after.keys() - before.keys())]
    lines += [f"gone     {path}  {before[path]}" for path in sorted(before.keys() - after.keys())]
    common = before.keys() & after.keys()
    lines += [f"changed  {p}  {before[p]} -> {after[p]}" for p in sorted(common) if before[p] != after[p]]
    return lines


def _content(path: Path, status: os.stat_result) -> str:
    if stat.S_ISLNK(status.st_mode):
        return f"-> {path.readlink()}"
    if not stat.S_ISREG(status.st_mode):
        return ""
    if path.parts[-2:] != () and status.st_size <= MIB and "/usr/" not in str(path):
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return f"{status.st_size} bytes"
