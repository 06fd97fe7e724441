"""The plug is pulled at every step, again and again: what was begun is gone on with, and comes to its end.

One install, one upgrade and one purge are each run as often as they have records in the journal. Each run of a story
is killed as soon as it has written one record more than the run before it: by SIGKILL to every process of it, and every
third time by cutting the whole machine's power. Nothing is tidied up in between. The run that is not killed any more
must end well, and what it installed must serve.
"""

import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
from desk import JOURNAL, Desk, facts
from machine import Machine
from measures import Measures
from vendor import ensure_vendor

NewMachine = Callable[..., Machine]
LEFT = "ls -d /opt/atoll /var/lib/atoll /etc/atoll /var/cache/atoll /etc/systemd/system/atoll* 2>/dev/null"
RUNS = 60  # more than any story has records


def run_until(desk: Desk, command: str, records: int, *, power_cut: bool, timeout: float = 300.0) -> int | None:
    """Run a command and kill it once it has written that many records; its exit code if it ended before."""
    path = desk.machine.path(JOURNAL)

    def written() -> int:
        return path.read_bytes().count(b"\n") if path.exists() else 0

    before, end = written(), time.monotonic() + timeout
    process = desk.machine.popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None:
            assert time.monotonic() < end, f"{command} does not end"
            if written() - before >= records:
                (desk.machine.power_cut if power_cut else desk.machine.kill_sessions)()
                process.wait(30)
                return None
            time.sleep(0.002)
        desk.said = process.stdout.read() if process.stdout else ""
        return process.returncode
    finally:
        if process.stdout:
            process.stdout.close()


def kill_at_every_record(desk: Desk, command: str) -> list[str]:
    """Run the command until it ends by itself, each run killed one record later. Returns where each run died."""
    died: list[str] = []
    k = 1
    while len(died) < RUNS:
        power_cut, before = len(died) % 3 == 2, len(desk.journal())
        if run_until(desk, command, k, power_cut=power_cut) is not None:
            return died
        if not died:  # what leads to the plan is written in one go, once the plan holds
            k = len(desk.journal()) - before
        k += 1
        died.append(where(desk.journal()) + (" (power)" if power_cut else ""))
        if power_cut:
            desk.machine.boot(timeout=240)
    pytest.fail(f"it never came to an end: {died}")


def where(journal: list[dict[str, Any]]) -> str:
    """The step that the last run was in, and what it wrote last."""
    step = next(record["step"] for record in reversed(journal) if "step" in record)
    return f"{step}:{journal[-1]['event']}"


def steps_of(died: list[str]) -> set[str]:
    return {place.partition(":")[0] for place in died}


def test_killed_at_every_step_it_converges(new_machine: NewMachine, measure: Measures) -> None:
    machine = new_machine("bookworm")
    machine.boot()
    desk = Desk(machine, ensure_vendor())
    desk.prepare()
    desk.plug(desk.vendor.first)

    # While the code is unpacked there is no journal yet: a few moments of that, too.
    for seconds in (0.5, 3.0, 12.0):
        process = machine.popen(desk.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        machine.kill_sessions()
        process.wait(30)

    began = time.monotonic()
    died = kill_at_every_record(desk, desk.command())
    measure(f"kill: a first install killed {len(died)} times", time.monotonic() - began)
    print("\nfirst install killed at", *died)
    assert {"stage", "units", "switch", "start", "smoke", "commit"} <= steps_of(died), died
    # A run that was killed may have made a key that nobody saw: then this one makes another and shows it.
    assert desk.said is not None
    desk.key = next((word for word in desk.said.split() if word.startswith("sk-")), desk.key)
    done = desk.install().check()
    assert facts(done)["outcome"] == "already-installed"
    assert desk.key, f"no run showed a key:\n{desk.said}"
    desk.assert_serves()
    assert desk.status()["problems"] == []

    first = desk.live()
    desk.plug(desk.vendor.later)
    began = time.monotonic()
    died = kill_at_every_record(desk, desk.command())
    measure(f"kill: an upgrade killed {len(died)} times", time.monotonic() - began)
    print("\nupgrade killed at", *died)
    assert {"stage", "switch", "start", "smoke", "commit"} <= steps_of(died), died
    assert desk.live().startswith(desk.vendor.later.version)
    desk.assert_serves()
    assert desk.status()["state"] == "serving"
    desk.atoll("rollback --yes").check()
    assert desk.live() == first
    desk.assert_serves()

    purge = f"atoll uninstall --purge --confirm {machine.hostname}"
    for seconds in (0.3, 0.6, 1.0, 1.5, 2.5):  # its journal goes with the rest, so moments stand for steps
        process = machine.popen(purge, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        machine.kill_sessions()
        process.wait(30)
        if not machine.path("/usr/local/bin/atoll").exists():
            break
    else:
        machine.run(purge, timeout=120).check()
    leftover = machine.run(LEFT)
    if leftover.out:  # it was killed after its command was gone: the medium brings another
        desk.install().check()
        machine.run(purge, timeout=120).check()
        leftover = machine.run(LEFT)
    assert leftover.out == ""
    assert desk.outbound() == []
