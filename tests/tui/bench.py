"""How fast the screens are: the real `atoll` on a pty, and beside it a real job that floods its log.

    python tests/tui/bench.py                     first paint, idle CPU, keys while nothing runs and in a flood
    python tests/tui/bench.py --term vt220 --lines 5000 --keys 60

A key's time is from writing its bytes to the pty until its effect has come out of it. Exit status 1: a bound is missed.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]
from terminals import ATOLL, Pty  # noqa: E402

from appliance.service.jobs import launch, spool  # noqa: E402
from appliance.service.jobs.frontend import JobFrontend  # noqa: E402
from installer.base.layout import Layout  # noqa: E402

KEY_BOUND, PAINT_BOUND, IDLE_BOUND = 0.050, 0.5, 0.02
IDLE_SECONDS = 15.0
# A key, and what it draws, one after the other: each changes the whole pane.
HERE = b"First the plan"
KEYS = (("f1", b"Enter makes the plan"), ("escape", HERE), ("4", b"The settings that"), ("3", HERE))


def flood(rate: int):
    """The work of a job: `rate` lines a second, a burst every hundredth of a second."""

    def work(front: JobFrontend) -> dict:
        front.checklist_step("install", "Install", "begin")
        front.step("copying", "begin")
        began, said = time.monotonic(), 0
        while True:
            while said < (time.monotonic() - began) * rate:
                said += 1
                front.note(f"line {said} of what nobody can read at this speed, as an installer might write it")
            front.progress("copying", said << 20, 1 << 50)
            time.sleep(0.01)

    return work


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle(terminal: Pty) -> float:
    assert terminal.process is not None
    before = cpu_of(terminal.process.pid)
    time.sleep(IDLE_SECONDS)
    return (cpu_of(terminal.process.pid) - before) / IDLE_SECONDS


def times(terminal: Pty, count: int) -> dict[str, list[float]]:
    """Seconds of `count` keys, by key. They come at odd moments: nothing may be in step with them."""
    found: dict[str, list[float]] = {key: [] for key, _ in KEYS}
    for number in range(-len(KEYS), count):  # the first round opens panes for the first time
        key, effect = KEYS[number % len(KEYS)]
        time.sleep(0.31 + 0.037 * (number % 7))
        since, began = len(terminal.raw), time.monotonic()
        os.write(terminal._master, terminal.keys.get(key, key).encode())
        seconds = terminal.drawn_at(effect, since) - began
        if number >= 0:
            found[key].append(seconds)
    return found


def told(seconds: list[float]) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(seconds)
    share = {"median": 0.5, "p95": 0.95, "worst": 1.0}
    return {name: round(1000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))], 1)
            for name, part in share.items()}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--term", default="xterm-256color")
    parser.add_argument("--lines", type=int, default=5000, help="of the flood, a second (%(default)s)")
    parser.add_argument("--keys", type=int, default=60, help="that are timed (%(default)s)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        layout = Layout.at(Path(directory) / "prefix")
        words = {"ATOLL_PREFIX": str(layout.prefix), "ATOLL_LANG": "en", "TERM": given.term}
        found: dict[str, object] = {"term": given.term, "load": round(os.getloadavg()[0], 1)}
        with Pty([ATOLL], words, draws=False) as terminal:
            begun = terminal.drawn_at(b"\x1b[?1049h")
            first = terminal.drawn_at(b"Medium: where") - begun
            terminal.drawn_at(b"This machine has")
            time.sleep(2)
            share = idle(terminal)
            terminal.press("/", "enter", "/", "enter")
            terminal.drawn_at(b"Can this machine")
            terminal.press("3")
            terminal.drawn_at(b"First the plan")
            quiet = times(terminal, given.keys)
            terminal.press("f10")
            terminal.wait()
        job = launch.new_job(layout, "bench", kind="bench", given={"steps": ["install"]}, interactive=False)
        launch.launch(job, flood(given.lines))
        try:
            with Pty([ATOLL], words, draws=False) as terminal:
                terminal.drawn_at(b"Work is running here")
                terminal.press("enter")
                terminal.drawn_at(b"of what nobody can read")
                began, events = time.monotonic(), (job.path / "progress.jsonl").stat().st_size
                loud = times(terminal, given.keys)
                written = ((job.path / "progress.jsonl").stat().st_size - events) / (time.monotonic() - began)
                assert terminal.process is not None
                busy = idle(terminal)
        finally:
            job.cancel()
            end = time.monotonic() + 20
            while job.end is None and time.monotonic() < end:
                time.sleep(0.05)
            spool.remove(layout)
    found |= {
        "first_paint_ms": round(1000 * first), "idle_cpu": round(share, 4), "cpu_in_flood": round(busy, 2),
        "flood_bytes_a_second": round(written), "key_ms": {key: told(each) for key, each in quiet.items()},
        "key_in_flood_ms": {key: told(each) for key, each in loud.items()},
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    waits = {"escape"} if given.term != "xterm-256color" else set()  # a slow line may still send the rest of a key
    slowest = max(told(each)["p95"] for found_in in (quiet, loud) for key, each in found_in.items() if key not in waits)
    return 0 if first <= PAINT_BOUND and share < IDLE_BOUND and slowest <= 1000 * KEY_BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
