"""Whether a file comes from the medium that it is supposed to vouch for. A part of install.sh.

Someone who changed the disk could have changed every file on it. So a key or an interpreter is refused if it is

    beneath the medium's directory, also through a link, a hard link or a bind mount;
    on the medium's filesystem, on another partition of its disk, or in an image file on it that is mounted.

A medium that was copied to the server's own disk shares that disk with everything else, so there only the first rule
applies. Operators should copy a key to another filesystem (the server's disk, a tmpfs); such a copy is accepted.
"""

import contextlib
import os
import re

# The server's own filesystems are those that these directories are on.
SERVERS_OWN = ("/", "/usr", "/etc", "/opt", "/root", "/home", "/var", "/srv", "/tmp", "/var/tmp", "~")  # noqa: S108
MAX_LOOKED_AT = 200_000  # entries of a medium that are compared with the file
MOUNTS = "/proc/self/mountinfo"


def lies_on(path, medium):
    """Whether the file `path` is below the directory `medium`, or on its disk. False if it does not exist."""
    path, medium = os.path.realpath(path), os.path.realpath(medium)
    if beneath(path, medium):
        return True
    foreign = marks(medium) - set().union(*(marks(os.path.expanduser(own)) for own in SERVERS_OWN))
    return bool(marks(path) & foreign) or same_file_below(path, medium)


def beneath(path, directory):
    """Whether a resolved path is in a resolved directory. False for `/`, which contains everything."""
    return directory != "/" and (path == directory or path.startswith(directory + "/"))


def marks(path):
    """Identifiers of the filesystem of `path` and of the disk below it: a common mark means a common origin."""
    found = set()
    with contextlib.suppress(OSError):
        found.add(f"filesystem {os.stat(path).st_dev}")
    device = mounted_from(path)
    if device:
        found.add(f"mount {device}")  # btrfs: each subvolume has a st_dev of its own, the mount does not
        found |= disk_marks(f"/sys/dev/block/{device}", 8)
    return found


def mounted_from(path):
    """MAJOR:MINOR of the mount that `path` is in, or None."""
    best, device = -1, None
    try:
        with open(MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        if len(point) >= best and (path == point or path.startswith(point.rstrip("/") + "/")):
            best, device = len(point), fields[2]  # the last mount on a directory hides earlier ones
    return device


def disk_marks(at, depth):
    """The disks below a block device in /sys: its whole disk, the devices it maps, the file behind a loop device."""
    if depth == 0 or not os.path.isdir(at):
        return set()
    at = os.path.realpath(at)
    if os.path.exists(os.path.join(at, "partition")):
        at = os.path.dirname(at)
    found = {f"disk {at}"}
    with contextlib.suppress(OSError):
        for name in os.listdir(os.path.join(at, "slaves")):
            found |= disk_marks(os.path.join(at, "slaves", name), depth - 1)
    with contextlib.suppress(OSError):
        with open(os.path.join(at, "loop/backing_file"), encoding="utf-8", errors="surrogateescape") as file:
            image = file.read().rstrip("\n")
        found.add(f"filesystem {os.stat(image).st_dev}")
        if device := mounted_from(image):
            found |= disk_marks(f"/sys/dev/block/{device}", depth - 1)
    return found


def same_file_below(path, medium):
    """Whether the medium holds this very file under another name: a hard link, or a bind mount of one of its parts."""
    try:
        wanted = os.stat(path)
        if os.stat(medium).st_dev != wanted.st_dev:
            return False
    except OSError:
        return False
    left = MAX_LOOKED_AT
    for directory, _, names in os.walk(medium):
        for name in names:
            with contextlib.suppress(OSError):
                info = os.lstat(os.path.join(directory, name))
                if (info.st_dev, info.st_ino) == (wanted.st_dev, wanted.st_ino):
                    return True
            left -= 1
            if left == 0:
                return True  # no medium is that large: be safe and say yes
    return False
