"""A machine of the tests is one: it boots bare and without a network, reboots, survives power cuts, leaves nothing."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from machine import Machine, cgroup2, when
from measures import Measures

NewMachine = Callable[..., Machine]

TRY_TO_LEAVE = """
import socket
for family, address in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(family, kind) as attempt:
            try:
                attempt.connect((address, 443))
            except OSError as error:
                print(error.errno)
try:
    print(socket.getaddrinfo("deb.debian.org", 443))
except socket.gaierror:
    print("no name service")
"""


def prove_no_network(machine: Machine) -> None:
    """Only the loopback, no route, and what tries to leave fails: 101 is ENETUNREACH. The counter sees each try."""
    links = machine.run("ip -oneline link").check().out.splitlines()
    assert len(links) == 1, links
    assert ": lo:" in links[0]
    assert machine.run("ip route; ip -6 route show default").check().out == ""
    before = {str(attempt) for attempt in machine.connects.outbound()}
    tried = machine.run(f"python3 -c '{TRY_TO_LEAVE}'").check().out.split("\n")
    assert tried[:5] == ["101"] * 4 + ["no name service"], tried
    seen = {str(attempt) for attempt in machine.connects.outbound()} - before
    assert {(a.kind, a.address) for a in machine.connects.outbound()} >= {
        (kind, address) for kind in ("TCP", "UDP") for address in ("192.0.2.1", "2001:db8::1")
    }, seen


def prove_bare(machine: Machine) -> None:
    for program in ("cc", "gcc", "clang", "c++", "ld", "make", "pip", "pip3", "uv", "curl", "wget"):
        assert machine.run(f"command -v {program}").code != 0, program
    for module in ("pip", "ensurepip", "torch", "cryptography", "typer"):
        assert machine.run(f"python3 -c 'import {module}'").code != 0, module


def test_it_boots_bare_and_without_network(new_machine: NewMachine, suite: str, measure: Measures) -> None:
    machine = new_machine(suite)
    measure(f"{suite}: boot", machine.boot())
    assert machine.state == "running", machine.run("systemctl --failed --no-legend").out
    assert machine.run("cat /proc/1/comm").out == "systemd\n"
    assert machine.run("systemctl show -P Version").check().out
    prove_no_network(machine)
    prove_bare(machine)


def test_commands_reboots_and_power_cuts(new_machine: NewMachine) -> None:
    machine = new_machine("bookworm")
    machine.boot()
    failed = machine.run("echo out; echo err >&2; cat; exit 7", input="in")
    assert (failed.code, failed.out, failed.err) == (7, "out\nin", "err\n")
    assert machine.run("hostname").out == "atoll-test\n"
    (machine.media / "disk").mkdir()
    (machine.media / "disk/file").write_text("on the disk")
    assert machine.run("cat /media/disk/file").out == "on the disk"
    assert machine.run("touch /media/disk/other").code != 0

    machine.run("echo kept > /root/kept; systemd-run --unit=sleeper sleep 1000").check()
    boot_id = machine.run("cat /proc/sys/kernel/random/boot_id").out
    machine.reboot()
    assert machine.run("cat /proc/sys/kernel/random/boot_id").out != boot_id
    assert machine.run("cat /root/kept").out == "kept\n"
    assert machine.run("systemctl is-active sleeper").code != 0
    assert "sleeper" in machine.journal("-b -1", lines=2000)

    running = machine.popen("echo begun > /root/begun; sleep 1000; echo ended > /root/ended")
    when(machine.path("/root/begun").exists, 10, "the command")
    machine.power_cut()
    assert running.wait(10) == -signal.SIGKILL
    machine.boot()
    assert not machine.path("/root/ended").exists()
    assert machine.boots == 3

    (machine.path("/root/begun")).unlink()
    session = machine.popen("echo begun > /root/begun; sleep 1000")
    when(machine.path("/root/begun").exists, 10, "the command")
    machine.kill_sessions()
    assert session.wait(10) == -signal.SIGKILL
    assert machine.run("pgrep -x sleep").code != 0


def test_the_host_reaches_the_machine_and_nothing_else(new_machine: NewMachine) -> None:
    machine = new_machine("bookworm")
    machine.boot()
    machine.run("systemd-run --unit=web python3 -m http.server --bind 127.0.0.1 8080").check()
    ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8080/', timeout=5).status)"
    when(lambda: machine.beside([sys.executable, "-c", ask]).stdout == "200\n", 10, "its web server")
    assert [attempt for attempt in machine.connects.attempts() if attempt.outbound] == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_behind(work: Path, how: signal.Signals) -> None:
    """A test run that is interrupted or killed takes its machine along; what a kill leaves, the next run removes."""
    script = f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from machine import Machine
        with Machine("bookworm", Path({str(work)!r})) as machine:
            machine.boot()
            print(machine.name, flush=True)
            time.sleep(100)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    group = cgroup2() / name
    assert "populated 1" in (group / "cgroup.events").read_text()
    os.kill(process.pid, how)
    process.wait(30)
    when(lambda: not group.exists() or "populated 0" in (group / "cgroup.events").read_text(), 20, "its end")
    with Machine("bookworm", work):
        pass
    assert not group.exists()
    assert not (work / name).exists()
    assert name not in Path("/proc/self/mounts").read_text()
