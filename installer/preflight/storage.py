"""The disk under the prefix: room, inodes, and a file system that can hold a service."""

import os
from pathlib import Path
from typing import Any

import psutil

from installer import fs
from installer.preflight.record import CheckRecord, PreflightContext, gib

SLACK = 256 << 20   # journal, logs, caches
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "glusterfs", "lustre"}


def existing_parent(path: Path) -> Path:
    """The nearest directory on the way to `path` that is already there."""
    while not path.exists():
        path = path.parent
    return path


def disk(context: PreflightContext) -> CheckRecord:
    """Room for what is still to be copied, with a tenth to spare; inodes too."""
    at = existing_parent(context.layout.lib)
    usage = os.statvfs(at)
    free = usage.f_bavail * usage.f_frsize
    need = context.copy_bytes + (SLACK if context.copy_bytes else SLACK // 4)
    comfortable = int(context.copy_bytes * 1.1) + 2 * SLACK
    observed = f"{gib(free)} free at {at}"
    required = f"{gib(need)} ({gib(context.copy_bytes)} of model still to copy, and room for logs)"
    why = "The model is copied once into a read-only store; nothing is unpacked anywhere else."
    evidence = f"df -B1 {at}"
    if free < need:
        fix = "Free some space, or choose a --prefix on a larger disk."
        return CheckRecord("disk", "fail", observed, required, why, fix, evidence, strict=True)
    if usage.f_files and usage.f_favail < 1000:
        observed = f"{usage.f_favail} inodes free at {at}"
        fix = "Remove small files, or choose another --prefix."
        return CheckRecord("disk", "fail", observed, "1000 inodes", why, fix, f"df -i {at}", strict=True)
    if free < comfortable:
        fix = "Plan for a larger disk: upgrades keep the previous model until the new one has proved itself."
        return CheckRecord("disk", "warn", observed, f"{gib(comfortable)} to be comfortable", why, fix, evidence)
    return CheckRecord("disk", "pass", observed, required, why, evidence=evidence)


def filesystem(context: PreflightContext) -> CheckRecord:
    """Writable, not noexec, and no symlinks inside the tree that could lead a write elsewhere."""
    at = existing_parent(context.layout.prefix)
    required = "a local, writable file system without noexec; no symlinks inside the tree"
    why = "The release is run from there, and the journal relies on its fsync."
    for root in context.layout.roots:
        if link := fs.symlink_on_the_way(context.layout.prefix, root):
            fix = f"Move it away, or give the real directory as --prefix: {link.resolve()}"
            observed = f"{link} is a symlink"
            return CheckRecord("filesystem", "fail", observed, required, why, fix, f"ls -ld {link}", strict=True)
    flags = os.statvfs(at).f_flag
    mount = _mount_of(at)
    kind = mount.fstype if mount else "unknown"
    mountpoint = mount.mountpoint if mount else at
    observed = f"{kind} at {mountpoint}"
    evidence = f"findmnt -T {at}"
    fail = fix = ""
    if not at.is_dir():
        fail, fix = f"{at} is not a directory", "Choose another --prefix."
    elif flags & os.ST_RDONLY:
        fail = f"{observed} is read-only"
        fix = f"Remount it (mount -o remount,rw {mountpoint}) or choose another --prefix."
    elif flags & os.ST_NOEXEC:
        fail, fix = f"{observed} is mounted noexec", "Choose a --prefix on another file system."
    elif not os.access(at, os.W_OK | os.X_OK):
        fail, fix = f"{at} is not writable by this user", "Choose a --prefix that you own, or run as its owner."
    if fail:
        return CheckRecord("filesystem", "fail", fail, required, why, fix, evidence, strict=True)
    if kind in _NETWORK:
        fix = "Choose a --prefix on a local disk."
        return CheckRecord("filesystem", "warn", observed, required, "Locks and fsync are weaker there.", fix, evidence)
    return CheckRecord("filesystem", "pass", observed, required, why, evidence=evidence, strict=True)


def _mount_of(path: Path) -> Any:
    """psutil's entry of the mount that holds `path`; None in odd containers."""
    real = path.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint), default=None)
