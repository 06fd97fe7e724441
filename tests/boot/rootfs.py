"""The root file systems that the machines boot: a plain Debian or Ubuntu, made once by debootstrap and kept.

    ATOLL_BOOT_SUITES   which releases of the distribution (default: bookworm trixie)
    ATOLL_BOOT_MIRROR   where debootstrap fetches packages (default: Debian's, or Ubuntu's for a suite of Ubuntu)
    ATOLL_BOOT_CACHE    where the roots are kept (default: .cache/boot)
    ATOLL_BOOT_WORK     where machines live while they run, a few GB, on a real disk (default: /var/tmp)
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import uuid
from pathlib import Path

DEBIAN, UBUNTU = "http://deb.debian.org/debian", "http://archive.ubuntu.com/ubuntu"
UBUNTU_SUITES = ("jammy", "noble", "plucky", "questing", "resolute")

# What an ordinary server has and the smallest variant lacks. No compiler, no pip, nothing for Atoll's sake but python3.
PACKAGES = ("systemd", "systemd-sysv", "dbus", "udev", "python3", "iproute2", "kmod", "procps")
FORMAT = 1  # a change makes the kept roots stale


class NoRoot(Exception):
    """The root could not be made; the message says why."""


def cache() -> Path:
    default = Path(__file__).resolve().parents[2] / ".cache/boot"
    return Path(os.environ.get("ATOLL_BOOT_CACHE") or default).resolve()


def work() -> Path:
    return Path(os.environ.get("ATOLL_BOOT_WORK") or "/var/tmp").resolve() / "atoll-boot"  # not /tmp: often in memory


def suites() -> list[str]:
    return os.environ.get("ATOLL_BOOT_SUITES", "bookworm trixie").split()


def mirror(suite: str) -> str:
    return os.environ.get("ATOLL_BOOT_MIRROR") or (UBUNTU if suite in UBUNTU_SUITES else DEBIAN)


def ensure_root(suite: str) -> Path:
    """The directory of a pristine root. Made first if it is not there: about a minute, and a download of 60 MB."""
    recipe = hashlib.sha256(repr((FORMAT, suite, PACKAGES)).encode()).hexdigest()[:8]
    roots = cache() / "roots"
    root = roots / f"{suite}-{recipe}"
    roots.mkdir(parents=True, exist_ok=True)
    with (roots / f".{suite}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            _make(suite, root)
    return root


def _make(suite: str, root: Path) -> None:
    for old in root.parent.glob(f"{suite}-*"):
        shutil.rmtree(old)
    partial, log = root.with_name(f".{root.name}.partial"), root.with_name(f"{suite}.log")
    shutil.rmtree(partial, ignore_errors=True)
    # Its mounts are its own: killed half way, it must not leave the host's /proc where a removal would walk into it.
    command = ["unshare", "--mount", "--propagation", "private", "debootstrap", "--variant=minbase",
               f"--include={','.join(PACKAGES)}", suite, str(partial), mirror(suite)]  # fmt: skip
    with log.open("wb") as out:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False)
    if done.returncode:
        tail = log.read_text("utf-8", "replace").splitlines()[-5:]
        raise NoRoot(f"debootstrap {suite} from {mirror(suite)} failed; the end of {log}:\n" + "\n".join(tail))
    for package in (partial / "var/cache/apt/archives").glob("*.deb"):
        package.unlink()
    shutil.rmtree(partial / "var/lib/apt/lists")
    (partial / "var/lib/apt/lists/partial").mkdir(parents=True)
    (partial / "etc/resolv.conf").unlink(missing_ok=True)
    for path in ("var/lib/dbus/machine-id", "etc/machine-id"):  # each machine gets its own
        (partial / path).unlink(missing_ok=True)
    (partial / "var/log/journal").mkdir(exist_ok=True)  # what it logs outlives a power cut
    partial.rename(root)


def copy_root(suite: str, to: Path) -> None:
    """A machine's own copy of a suite's root. Not an overlay: nothing stays mounted whatever happens.

    Files of /usr are hard links to the kept root's: nobody writes into them, packages replace them, and it saves the
    copy of 200 MB. Everything else is copied.
    """
    source = ensure_root(suite)
    commands = [
        ["cp", "-a", "--link", f"{source}/usr", f"{to}/"],
        ["cp", "-a", *(str(path) for path in sorted(source.iterdir()) if path.name != "usr"), f"{to}/"],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise NoRoot(f"copying {source} failed: {done.stderr.strip()}")
    (to / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")
