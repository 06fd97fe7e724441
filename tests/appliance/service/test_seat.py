"""Two operators, as two real processes: one works, the other asks; consent, refusal, no answer, and a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.service.jobs import seat as seat_module
from appliance.service.jobs import spool
from appliance.service.jobs.seat import Person, Seat
from installer.audit import log
from installer.base.layout import Layout

OTHER = """
import sys, time
from pathlib import Path
from appliance.service.jobs import spool
from appliance.service.jobs.seat import Seat
from installer.base.layout import Layout
spool._base = lambda: Path(sys.argv[2])
def asked(person):
    print("asked" if person else "over", flush=True)
    if person and sys.argv[3] in ("yes", "no"):
        seat.answer(sys.argv[3] == "yes")
    if person is None:
        time.sleep(float(sys.argv[5]))
seat = Seat(Layout.at(Path(sys.argv[1])), asked, lambda: print("held" if seat.held else "lost", flush=True),
            grace=float(sys.argv[4]))
seat.open()
print("open", seat.held, flush=True)
time.sleep(120)
"""
SECONDS = 20.0


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    found = Layout.at(tmp_path / "prefix")
    found.state.mkdir(parents=True)
    return found


@pytest.fixture
def other(layout: Layout) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(answer: str, grace: float = 60.0, farewell: float = 0.0) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", OTHER, str(layout.prefix), str(spool._base()), answer, str(grace),
             str(farewell)],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "SSH_CONNECTION": "10.0.0.7 5 10.0.0.1 22"},
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "open True\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def mine(layout: Layout) -> Iterator[Seat]:
    seat = Seat(layout, lambda person: None, lambda: None)
    yield seat
    seat.close()


def test_the_second_sees_who_works_and_gets_the_seat_with_consent(layout: Layout, other, mine: Seat) -> None:
    process = other("yes")
    mine.open()
    assert not mine.held
    holder = mine.holder()
    assert isinstance(holder, Person)
    assert (holder.origin, holder.pid) == ("10.0.0.7", process.pid)
    mine.ask()
    until(lambda: mine.held)
    assert mine.holder() is None
    assert process.stdout.readline() == "asked\n"
    assert process.stdout.readline() == "over\n"
    assert process.stdout.readline() == "lost\n"
    records, broken = log.read(layout.audit)
    assert broken is None
    assert [(each["event"], each["before"]["origin"]) for each in records] == [("seat-taken-over", "10.0.0.7")]


def test_a_refusal_changes_nothing(layout: Layout, other, mine: Seat) -> None:
    other("no")
    mine.open()
    mine.ask()
    until(lambda: mine.refused)
    time.sleep(1.0)
    assert not mine.held
    assert mine.holder() is not None


def test_nobody_at_the_keyboard_gives_way_after_the_grace(layout: Layout, other, mine: Seat) -> None:
    other("", grace=1.0)
    mine.open()
    time.sleep(1.5)
    assert not mine.held  # nobody has asked
    began = time.monotonic()
    mine.ask()
    until(lambda: mine.held)
    assert time.monotonic() - began >= 0.9


def test_a_holder_who_is_slow_to_leave_does_not_sit_down_again(
    layout: Layout, other, mine: Seat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if the other looks seldom: between two of its looks the seat is left."""
    monkeypatch.setattr(seat_module, "_POLL_SECONDS", 2.0)
    other("yes", farewell=2.2)
    mine.open()
    mine.ask()
    until(lambda: mine.held)


def test_of_two_who_ask_one_is_told_that_it_was_not_granted(layout: Layout, other, mine: Seat) -> None:
    other("", grace=2.0)
    mine.open()
    third = Seat(layout, lambda person: None, lambda: None).open()
    try:
        mine.ask()
        third.ask()
        until(lambda: mine.refused)
        until(lambda: third.held)
        assert not mine.held
    finally:
        third.close()


def test_a_killed_program_frees_the_seat(layout: Layout, other, mine: Seat) -> None:
    process = other("")
    mine.open()
    assert not mine.held
    process.send_signal(signal.SIGKILL)
    until(lambda: mine.held)
    assert json.loads((spool.root_of(layout) / "seat/holder").read_text())["pid"] == os.getpid()
