"""The disk under the tree: space, inodes, and a file system that can hold a service."""

import os
from pathlib import Path
from typing import Any

import psutil

from installer.base import fs
from installer.base.i18n import Text, joined, t
from installer.preflight.machine import Machine
from installer.preflight.record import PreflightContext, Seen, check, gib

SLACK = 256 << 20          # journal, logs, caches
SERVER_SLACK = 20 * 10**9  # for years of operation, with the next release beside the last
INODES = 1000
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "glusterfs", "lustre"}
_ANOTHER = t("Choose another --prefix, or mount a larger disk there.")


def existing_parent(path: Path) -> Path:
    """The nearest existing directory on the way to `path`."""
    while not path.exists():
        path = path.parent
    return path


@check(
    15, "disk", t("Disk space"), strict=True,
    required=t("room for what is copied"),
    why=t("Models and code are copied once; nothing is unpacked elsewhere."),
)  # fmt: skip
def disk(context: PreflightContext) -> Seen:
    """Models and code may be on two disks; each must hold its part."""
    model_at, code_at = existing_parent(context.layout.lib), existing_parent(context.layout.opt)
    parts = {os.stat(model_at).st_dev: (model_at, context.copy_bytes)}
    device = os.stat(code_at).st_dev
    at, size = parts.get(device, (code_at, 0))
    parts[device] = (at, size + context.code_bytes)
    seen = [_room(context, at, size) for at, size in parts.values()]
    return min(seen, key=lambda one: ("fail", "warn", "pass").index(one.status))


def _room(context: PreflightContext, at: Path, size: int) -> Seen:
    usage = os.statvfs(at)
    free = usage.f_bavail * usage.f_frsize
    used = 1 - usage.f_bfree / usage.f_blocks if usage.f_blocks else 0.0
    need = size + (SLACK if size else SLACK // 4)
    comfortable = int(size * 1.1) + (SERVER_SLACK if context.system else 2 * SLACK)
    observed = t("{free} free at {at}, {used} % used", free=gib(free), at=at, used=round(used * 100))
    required = t("{need} ({size} to copy, and room for logs)", need=gib(need), size=gib(size))
    evidence = f"df -B1 {at}"
    if free < need:
        return Seen("fail", observed, t("Free some space. {else_}", else_=_ANOTHER), f"df -h {at}", evidence, required)
    if usage.f_files and usage.f_favail < INODES:
        seen = t("{count} inodes free at {at}", count=usage.f_favail, at=at)
        fix = t("Remove small files. {else_}", else_=_ANOTHER)
        return Seen("fail", seen, fix, f"df -i {at}", f"df -i {at}", t("{count} inodes", count=INODES))
    if free < comfortable:
        fix = t("Plan for a larger disk: an upgrade keeps the previous model until the new one has proven itself.")
        required = t("{need} to be comfortable", need=gib(comfortable))
        return Seen("warn", observed, fix, f"df -h {at}", evidence, required)
    if context.system and used >= 0.8:
        fix = t("Free some space before the disk is full.")
        return Seen("warn", observed, fix, f"du -xh {at} | sort -h | tail", evidence, t("less than 80 % used"))
    return Seen("pass", observed, evidence=evidence, required=required)


@check(
    16, "filesystem", t("File system"),
    required=t("local (ext4, xfs, btrfs), writable, without noexec; no symlinks inside the tree"),
    why=t("The release is run from there, and the journal relies on its fsync."),
)  # fmt: skip
def filesystem(context: PreflightContext) -> Seen:
    """No symlinks that could redirect a write; code and caches may be executed; everything is writable and local."""
    layout = context.layout
    for root in layout.roots:
        if link := fs.symlink_on_the_way(layout.prefix, root):
            fix = t("Make it a directory, and mount the other disk on it.")
            command = f"rm {link} && mkdir {link} && mount --bind {link.resolve()} {link}"
            return Seen("fail", t("{link} is a symlink", link=link), fix, command, f"ls -ld {link}")
    kinds: list[str] = []
    for root, runs in ((layout.opt, True), (layout.cache, True), (layout.lib, False)):
        at = existing_parent(root)
        mount = mount_of(at)
        kind, mountpoint = (mount.fstype, mount.mountpoint) if mount else ("?", str(at))
        if (problem := _unfit(at, kind, mountpoint, runs)) is not None:
            return problem
        kinds.append(f"{kind} {mountpoint}")
    observed = joined(dict.fromkeys(kinds))
    evidence = f"findmnt -T {layout.lib}"
    if any(text.split()[0] in _NETWORK for text in kinds):
        fix, why = t("Use a local disk."), t("Locks and fsync are weaker on a network disk.")
        return Seen("warn", observed, fix, f"findmnt -T {layout.lib}", evidence, why=why)
    return Seen("pass", observed, evidence=evidence)


def _unfit(at: Path, kind: str, mountpoint: str, runs: bool) -> Seen | None:
    flags = os.statvfs(at).f_flag
    where = f"{kind} {mountpoint}"
    seen: Text | None = None
    fix, command = _ANOTHER, f"findmnt -T {at}"
    if not at.is_dir():
        seen = t("{at} is not a directory", at=at)
    elif flags & os.ST_RDONLY:
        seen, fix = t("{where} is read-only", where=where), t("Mount it writable, or choose another --prefix.")
        command = f"mount -o remount,rw {mountpoint}"
    elif runs and flags & os.ST_NOEXEC:
        seen, fix = t("{where} is mounted noexec", where=where), t("Mount it with exec, or choose another --prefix.")
        command = f"mount -o remount,exec {mountpoint}"
    elif not os.access(at, os.W_OK | os.X_OK):
        seen = t("{at} is not writable by this user", at=at)
        fix = t("Choose a --prefix of your own, or run this as its owner.")
    return None if seen is None else Seen("fail", seen, fix, command, f"findmnt -T {at}")


def mount_of(path: Path) -> Any:
    """psutil's entry of the mount that holds `path`; None in unusual containers. If several were mounted there, the
    last one counts."""
    real = path.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    longest = max((len(part.mountpoint) for part in mounts), default=0)
    return next((part for part in reversed(mounts) if len(part.mountpoint) == longest), None)


def block_device(machine: Machine, path: Path) -> Path | None:
    """The block device that holds `path`, or None (a network disk, memory, an overlay, btrfs)."""
    number = os.stat(path).st_dev
    table = machine.read(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/uevent")
    name = next((line.partition("=")[2] for line in table.splitlines() if line.startswith("DEVNAME=")), "")
    device = machine.at(f"/dev/{name}") if name and ".." not in name else None
    return device if device is not None and device.exists() else None
