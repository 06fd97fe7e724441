"""A machine that boots: systemd as process 1 in a container of systemd-nspawn that has no network but its own loopback.

    with Machine("bookworm", work) as machine:
        machine.boot()
        machine.run("systemctl is-system-running").check()
        machine.power_cut()      # every process dies at once, in the middle of whatever it did
        machine.boot()

Everything that a machine runs lives in one control group of its own. That is how it is killed in one go, how nothing
of it can stay behind, and where `ConnectCounter` counts. Needs root, cgroup v2 (beside v1 will do) and Linux 5.14.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connects import ConnectCounter
from rootfs import copy_root

REBOOTED = 133  # nspawn's exit code with --keep-unit: whoever started it is to start it again
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# nspawn keeps notes in /run of the host, and leaves them where /run is no file system in memory: it gets its own.
OWN_RUN = 'mkdir -p /run/systemd/nspawn && mount -t tmpfs -o mode=0700 atoll-boot /run/systemd/nspawn && exec "$@"'


class MachineError(Exception):
    """The machine did not do what a machine does; the message carries the end of its console."""


@dataclass(frozen=True)
class Ran:
    """A command that ran inside."""

    command: str
    code: int
    out: str
    err: str
    seconds: float
    waited: float = 0.0
    """Of these, how long the machine waited for processors that others on the host had."""

    def check(self, code: int = 0) -> "Ran":
        """This, if it ended with that exit code."""
        assert self.code == code, f"{self}\nexit code {self.code}, expected {code}"
        return self

    @property
    def json(self) -> Any:
        assert self.out, str(self)
        return json.loads(self.out)

    def __str__(self) -> str:
        return f"$ {self.command}  → {self.code} after {self.seconds:.1f} s\n{self.out}\n{self.err}"


class Machine:
    """One machine: a copy of a root, a directory that stands for its USB port, a control group."""

    _made = 0

    def __init__(self, suite: str, work: Path, *, hostname: str = "atoll-test") -> None:
        Machine._made += 1
        self.name = f"atoll-boot-{os.getpid()}-{Machine._made}"
        self.suite, self.hostname = suite, hostname
        self.home = work / self.name
        self.root = self.home / "root"
        self.media = self.home / "media"
        """What lies here the machine sees under /media, read-only, at once."""
        self.console = self.home / "console.log"
        self.boots = 0
        self._cgroup = cgroup2() / self.name
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._watch: subprocess.Popen[bytes] | None = None
        self.connects: ConnectCounter

    def __enter__(self) -> "Machine":
        sweep(self.home.parent)
        self.media.mkdir(parents=True)
        self.root.mkdir(mode=0o755)
        try:
            copy_root(self.suite, self.root)
            (self.root / "etc/hostname").write_text(f"{self.hostname}\n")
            (self.root / "etc/hosts").write_text(f"127.0.0.1 localhost {self.hostname}\n::1 localhost\n")
            for part in (self._cgroup, self._cgroup / "machine", self._cgroup / "operator"):
                part.mkdir()
            self._watch = _watch_over(self._cgroup)
            self.connects = ConnectCounter(self._cgroup)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.power_cut()
        self.connects.close()
        self._remove()

    def boot(self, timeout: float = 60.0) -> float:
        """Power on; returns the seconds until systemd had started everything."""
        assert self._nspawn is None, "it runs"
        began = time.monotonic()
        (self._cgroup / "machine").mkdir(exist_ok=True)
        command = [
            "unshare", "--mount", "--propagation=private", "--", "/bin/sh", "-c", OWN_RUN, "sh",
            "systemd-nspawn", "--quiet", "--boot", f"--directory={self.root}", f"--machine={self.name}",
            f"--hostname={self.hostname}", "--private-network", "--register=no", "--keep-unit", "--link-journal=no",
            "--resolv-conf=off", "--timezone=off", "--console=pipe", f"--bind-ro={self.media}:/media",
        ]  # fmt: skip
        environment = {"PATH": PATH, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1", "SYSTEMD_NSPAWN_LOCK": "0"}
        with self.console.open("ab") as console:
            self._nspawn = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, env=environment,
                preexec_fn=lambda: self._enter("machine"),
            )  # fmt: skip
        self._wait_until_up(began + timeout)
        return time.monotonic() - began

    def reboot(self, timeout: float = 120.0) -> float:
        """`systemctl reboot`, as an operator does it; returns the seconds until it is up again."""
        began = time.monotonic()
        assert self._nspawn is not None, "it is off"
        self.run("systemctl reboot")
        code = self._nspawn.wait(timeout)
        if code != REBOOTED:
            raise MachineError(f"{self.name} went off with {code} instead of a reboot:\n{self.console_tail()}")
        self._nspawn = None
        self.boot(began + timeout - time.monotonic())
        return time.monotonic() - began

    def power_cut(self) -> None:
        """SIGKILL to every process of the machine in one stroke of the kernel. What was not synced to disk is not
        lost, as it would be with a real one: the host's page cache lives on."""
        kill_cgroup(self._cgroup)
        if self._nspawn is not None:
            self._nspawn.wait()
            self._nspawn = None
        for part in ("machine", "operator"):
            remove_cgroup(self._cgroup / part)
        (self._cgroup / "operator").mkdir(exist_ok=True)

    def popen(self, command: str, *, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Start a shell command inside as root, as an operator's session would; `run` waits for it as well."""
        return subprocess.Popen(self.session(command, env), text=True, preexec_fn=self.enter_session, **options)

    def session(self, command: str, env: dict[str, str] | None = None) -> list[str]:
        """The words that `popen` starts; who starts them on a pty calls `enter_session` in the child."""
        leader = self._leader()
        if leader is None:
            raise MachineError(f"{self.name} is off; the end of its console:\n{self.console_tail()}")
        # nsenter stays as the parent, outside: `kill_sessions` kills the command itself, this process's pid would not.
        return ["nsenter", f"--target={leader}", "--all", "--", "/usr/bin/env", "-i", f"PATH={PATH}", "HOME=/root",
                "LANG=C.UTF-8", "COLUMNS=110", *(f"{k}={v}" for k, v in (env or {}).items()),
                "/bin/sh", "-c", f"cd /root; {command}"]  # fmt: skip

    def enter_session(self) -> None:
        """In a child before exec."""
        self._enter("operator")

    def run(self, command: str, *, timeout: float = 120.0, input: str = "", env: dict[str, str] | None = None) -> Ran:
        """Run a shell command inside as root and wait for its end."""
        began, waited = time.monotonic(), self.waited_for_cpu()
        pipe = subprocess.PIPE
        process = self.popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe)
        try:
            out, err = process.communicate(input, timeout)
        except subprocess.TimeoutExpired:
            kill_cgroup(self._cgroup / "operator")
            out, err = process.communicate()
            raise MachineError(f"$ {command}\nhad not ended after {timeout:.0f} s\n{out}\n{err}") from None
        seconds, waited = time.monotonic() - began, self.waited_for_cpu() - waited
        return Ran(command, process.returncode, out, err, seconds, waited)

    def kill_sessions(self, *, jobs: bool = True) -> None:
        """SIGKILL to every command that `run` or `popen` started, and, with `jobs`, to those of ours that do their work
        in units of their own; services go on."""
        for job in self._cgroup.rglob("atoll-job-*.service") if jobs else ():
            kill_cgroup(job)
        kill_cgroup(self._cgroup / "operator")

    def beside(self, words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """A program of the *host* whose only network is the machine's: how somebody on its LAN sees it."""
        return subprocess.run(self.beside_command(words), text=True, capture_output=True, **options)

    def beside_command(self, words: list[str]) -> list[str]:
        """The command line that `beside` runs."""
        return ["nsenter", f"--target={self._leader()}", "--net", "--", *words]

    def waited_for_cpu(self) -> float:
        """Seconds so far in which the machine could do nothing because others had every processor: what a measured
        time is too long by when the host does other work as well. 0 where the kernel does not count that."""
        with contextlib.suppress(OSError, StopIteration):
            lines = self.pressure.read_text().splitlines()
            full = next(line for line in lines if line.startswith("full"))
            return int(full.rsplit("=", 1)[1]) / 1e6
        return 0.0

    @property
    def pressure(self) -> Path:
        """The kernel's count of the time that everything in the machine waited for processors."""
        return self._cgroup / "cpu.pressure"

    def path(self, inside: str | Path) -> Path:
        """Where a path of the machine lies on the host."""
        return self.root / str(inside).lstrip("/")

    def journal(self, *arguments: str, lines: int = 200) -> str:
        """The machine's own journal."""
        return self.run(f"journalctl --no-pager -n {lines} {' '.join(arguments)}").out

    def console_tail(self, lines: int = 30) -> str:
        if not self.console.exists():
            return "(nothing)"
        return "\n".join(self.console.read_text("utf-8", "replace").splitlines()[-lines:])

    def _wait_until_up(self, deadline: float) -> None:
        leader = None
        while leader is None or not Path(f"/proc/{leader}/root/run/systemd/private").exists():
            self._still_running(deadline, "start systemd")
            time.sleep(0.02)
            leader = self._leader()
        state = self.run("systemctl is-system-running --wait", timeout=max(1.0, deadline - time.monotonic()))
        self.boots += 1
        self.state = state.out.strip() or state.err.strip()
        if self.state not in ("running", "degraded"):
            raise MachineError(f"{self.name} came up '{self.state}'; the end of its console:\n{self.console_tail()}")

    def _still_running(self, deadline: float, what: str) -> None:
        if self._nspawn is None or self._nspawn.poll() is not None:
            raise MachineError(f"{self.name} went off instead of going to {what}:\n{self.console_tail()}")
        if time.monotonic() > deadline:
            raise MachineError(f"{self.name} did not {what} in time; the end of its console:\n{self.console_tail()}")

    def _leader(self) -> int | None:
        """The machine's process 1 as the host numbers it."""
        with contextlib.suppress(OSError, IndexError):
            return int((self._cgroup / "machine/payload/init.scope/cgroup.procs").read_text().split()[0])
        return None

    def _enter(self, part: str) -> None:
        """In a child before exec: into the machine's control group."""
        (self._cgroup / part / "cgroup.procs").write_text("0")
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if os.getsid(0) != os.getpid():
            os.setpgid(0, 0)  # Ctrl-C at the test's terminal is the test's

    def _remove(self) -> None:
        kill_cgroup(self._cgroup)
        remove_cgroup(self._cgroup)
        shutil.rmtree(self.home, ignore_errors=True)
        if self._watch is not None:
            assert self._watch.stdin is not None
            self._watch.stdin.close()
            self._watch.wait()


def _watch_over(group: Path) -> "subprocess.Popen[bytes]":
    """A process that kills the group when this one is gone, however it went: its standard input ends then."""
    script = 'while read -r line; do :; done; [ ! -e "$0" ] || echo 1 > "$0"'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, str(group / "cgroup.kill")], stdin=subprocess.PIPE, start_new_session=True
    )


def cgroup2() -> Path:
    """Where the unified hierarchy is mounted."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        words = line.split()
        if words[2] == "cgroup2":
            return Path(words[1])
    raise MachineError("no cgroup2 file system is mounted")


def kill_cgroup(group: Path) -> None:
    """SIGKILL to everything in it, and wait until all of it is gone."""
    if not group.exists():
        return
    (group / "cgroup.kill").write_text("1")
    end = time.monotonic() + 20
    with contextlib.suppress(FileNotFoundError):  # systemd has removed the group of a unit that has ended
        while "populated 1" in (group / "cgroup.events").read_text():
            if time.monotonic() > end:
                raise MachineError(f"processes of {group.name} do not die")
            time.sleep(0.01)


def remove_cgroup(group: Path) -> None:
    """Remove it with what is below, also where nspawn made it in another hierarchy."""
    below = group.relative_to(cgroup2())
    hierarchies = {cgroup2(), *(path for path in Path("/sys/fs/cgroup").glob("systemd"))}
    for top in (hierarchy / below for hierarchy in hierarchies):
        if top.is_dir():
            for path in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
                _rmdir(path)
            _rmdir(top)


def _rmdir(path: Path) -> None:
    for _ in range(100):  # the kernel lets go of a dead process's group a moment after its end
        with contextlib.suppress(FileNotFoundError, OSError):
            path.rmdir()
        if not path.exists():
            return
        time.sleep(0.02)


def sweep(work: Path) -> None:
    """Remove what machines of test runs that were killed have left."""
    for path in [*cgroup2().glob("atoll-boot-*"), *work.glob("atoll-boot-*")]:
        owner = path.name.split("-")[2]
        if not Path(f"/proc/{owner}").exists():
            group = cgroup2() / path.name
            kill_cgroup(group)
            remove_cgroup(group)
            shutil.rmtree(work / path.name, ignore_errors=True)


def when(condition: Any, timeout: float, what: str, every: float = 0.1) -> Any:
    """Wait for something true; returns it."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > end:
            raise MachineError(f"waited {timeout:.0f} s in vain for {what}")
        time.sleep(every)
    return value
