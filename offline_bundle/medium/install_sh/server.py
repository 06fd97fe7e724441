"""Step 3 of install.sh: whether this server is what the medium was made for, before gigabytes are copied."""

import contextlib
import json
import os
import platform
import sys

from offline_bundle.errors import REPLAY, SPACE_IO, UNTRUSTED
from offline_bundle.limits import MAX_SMALL_FILE
from offline_bundle.medium.install_sh.terminal import PREFLIGHT, refused
from offline_bundle.medium.language import plain, t
from offline_bundle.names import show
from offline_bundle.on_medium import lies_on


def check_server(requires):
    """Refuse a medium for another processor, Python or libc."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    arch = platform.machine()
    if arch != requires["arch"]:
        raise refused(
            PREFLIGHT,
            t("The medium is for {made}; this is {here}.", made=requires["arch"], here=arch),
            t("Ask the vendor for a medium for this processor."),
        )
    if here not in requires["python"]:
        made = ", ".join(requires["python"])
        raise refused(
            PREFLIGHT,
            t("The medium is for Python {made}; {executable} is Python {here}.", made=made, executable=sys.executable,
              here=here),
            t("Name another one with --python DIR, or have the medium built for this one."),
        )
    libc, version = platform.libc_ver()
    have = tuple(int(part) for part in version.split(".")[:2]) if libc == "glibc" else (0, 0)
    if have < tuple(int(part) for part in requires["glibc"].split(".")):
        raise refused(
            PREFLIGHT,
            t("The medium needs glibc {glibc} or newer; this one has {version}.", glibc=requires["glibc"],
              version=version or t("another libc")),
            t("Use a newer release of the distribution (Debian 12, Ubuntu 22.04, RHEL 9 or newer)."),
        )


def check_sequence(options, manifest):
    """Refuse a runtime that is older than the newest one ever installed here."""
    known = 0
    for path, dig in (
        ("var/lib/atoll/state/sequence.json", lambda d: d["sequences"].get("runtime/atoll", 0)),
        ("opt/atoll/current/lib/../runtime.json", lambda d: d["sequence"]),
    ):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                with open(os.path.join(options.root, path), "rb") as file:
                    known = max(known, dig(json.loads(file.read(MAX_SMALL_FILE))))
            except (ValueError, KeyError, TypeError, AttributeError, PermissionError) as e:
                raise refused(
                    SPACE_IO,
                    t("/{path} cannot be read: {why}.", path=path, why=show(plain(e))),
                    t("Restore it, or run as root."),
                ) from None
    if manifest["sequence"] < known and not options.last("--allow-downgrade"):
        raise refused(
            REPLAY,
            t("This runtime has sequence {sequence}, but {known} was installed here already: it is older.",
              sequence=manifest["sequence"], known=known),
            t("Use the newest medium. To go back: atoll rollback. To insist: --allow-downgrade 'the reason'"),
        )


def check_interpreter(medium):
    """Refuse a Python from the medium.

    The shell part has checked before it started this one; this check also sees hard links, other partitions of the disk
    and images on it.
    """
    for path in (sys.executable, getattr(os, "__file__", "")):
        if path and lies_on(path, medium):
            raise refused(
                UNTRUSTED,
                t("The Python {path} lies on the medium {medium}: whoever changed the medium could have changed it "
                  "too.", path=show(path), medium=show(medium)),
                t("Use the server's own python3, or one that did not come with the medium: --python DIR"),
            )


def check_space(where, need):
    """Refuse unless `need` bytes are free at `where`, or at its nearest existing parent."""
    while not os.path.isdir(where):
        where = os.path.dirname(where)
    info = os.statvfs(where)
    if info.f_bavail * info.f_frsize < need:
        free = info.f_bavail * info.f_frsize >> 20
        message = t("{where} has {free} MiB free; the code takes {need} MiB while it is installed.", where=where,
                    free=free, need=need >> 20)
        raise refused(SPACE_IO, message, t("Free some space (df -h), then run again."))
