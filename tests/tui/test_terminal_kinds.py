"""The real program on a pty, as kinds of terminals show it, and what it does when the terminal goes away."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from terminals import ATOLL, KEYS, Pty

COLOUR = re.compile("[349][0-7]|10[0-7]")


def opened(tmp_path: Path, term: str, **environment: str) -> Pty:
    words = {"ATOLL_PREFIX": str(tmp_path / "prefix"), "ATOLL_LANG": "en", "TERM": term, **environment}
    return Pty([ATOLL], words)


def codes(terminal: Pty) -> set[str]:
    """The numbers of all colours and attributes that were asked for."""
    found = re.findall(rb"\x1b\[([0-9;]*)m", bytes(terminal.raw))
    return {number for code in found for number in code.decode().split(";") if number}


@pytest.mark.parametrize("term", sorted(KEYS))
def test_every_screen_of_an_empty_machine(tmp_path: Path, term: str) -> None:
    with opened(tmp_path, term) as terminal:
        terminal.until("where the medium is", "This machine has")
        terminal.press("tab", "f1")
        terminal.until("An answers file of another server", "Esc closes this|Page Down shows more")
        terminal.press("escape", "f3")
        terminal.until("What do you want to do")
        terminal.press("escape", "f12")
        terminal.until("NOT-INSTALLED", "F9 Service")
        terminal.press("f9")
        terminal.until("What do you want to do with the service")
        terminal.press("down", "down", "escape", "escape")
        terminal.until("where the medium is")
        terminal.press("f10")
        assert terminal.wait() == 0
        assert terminal.modes() == terminal.before, "the line discipline is as it was"
        drawn = bytes(terminal.raw)
        assert b"\x1b[?1049l\x1b[?25h" in drawn[-120:], "the screen and the cursor of before"
    if term == "xterm-256color":
        return
    assert drawn.isascii(), sorted({sign for sign in drawn.decode("utf-8") if not sign.isascii()})
    assert not {"38", "48"} & codes(terminal), "16 colours"
    assert not re.search(rb"\x1b\[[<>=]|\x1b\]|\$p", drawn), "nothing that only newer terminals know"
    if term == "vt220":
        assert not [number for number in codes(terminal) if COLOUR.fullmatch(number)], codes(terminal)


def test_the_colours_can_be_the_sixteen_of_the_terminal(tmp_path: Path) -> None:
    """F4 goes through dark, light, high contrast, and the terminal's own 16 colours."""
    with opened(tmp_path, "xterm-256color") as terminal:
        terminal.until("where the medium is", "This machine has")
        looks = []
        for _ in range(4):
            terminal.press("f12")
            terminal.until("NOT-INSTALLED")
            terminal.raw.clear()
            terminal.press("escape")  # the whole screen is drawn
            terminal.until("where the medium is")
            looks.append(codes(terminal) | {f"length {len(terminal.raw)}"})
            terminal.press("f4")
        assert ["48" in look for look in looks] == [True, True, True, False], looks
        assert len({frozenset(look) for look in looks}) == 4, "each looks different"
        terminal.press("f10")
        assert terminal.wait() == 0


def chosen(terminal: Pty) -> list[str]:
    """The lines that have a part in reverse."""
    with terminal._lock:
        return [row for number, row in enumerate(terminal.screen.display)
                if any(cell.reverse for cell in terminal.screen.buffer[number].values())]  # fmt: skip


def test_what_is_chosen_is_seen_without_colours(tmp_path: Path) -> None:
    with opened(tmp_path, "vt220") as terminal:
        terminal.until("This machine has")
        terminal.press("f12")
        terminal.until("F9 Service")
        terminal.press("f9")
        terminal.until("What do you want to do with the service")
        assert any("Start the service" in row for row in chosen(terminal))
        terminal.press("down", "down", "down", "down")
        deadline = time.monotonic() + 30
        while not any("Restart the service" in row for row in chosen(terminal)):
            assert time.monotonic() < deadline, chosen(terminal)
            time.sleep(0.05)
        assert not any("Start the service" in row for row in chosen(terminal))


@pytest.mark.parametrize("how", ["hang up", "SIGHUP", "SIGTERM", "SIGINT", "Ctrl-C"])
def test_it_leaves_with_its_terminal(tmp_path: Path, how: str) -> None:
    """And gives the seat back: who comes next works, and does not look on."""
    with opened(tmp_path, "xterm-256color") as terminal:
        terminal.until("This machine has")
        process = terminal.process
        assert process is not None
        ways: dict[str, Callable[[], object]] = {
            "hang up": terminal.hang_up, "Ctrl-C": lambda: terminal.press("ctrl-c")}  # fmt: skip
        ways.get(how, lambda: process.send_signal(signal.Signals[how]))()
        assert terminal.wait() == 0
        if how != "hang up":
            assert terminal.modes() == terminal.before
        terminal.start()
        time.sleep(0.5)
        assert "works here" not in terminal.until("This machine has")


def test_without_a_terminal_it_is_not_the_terminals_name_that_is_wrong(tmp_path: Path) -> None:
    environment = {**os.environ, "ATOLL_PREFIX": str(tmp_path / "prefix"), "ATOLL_LANG": "en", "TERM": "xterm"}
    for words, instead in (([], "atoll checklist"), (["top"], "atoll top --once")):
        done = subprocess.run([ATOLL, *words], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True)  # fmt: skip
        assert done.returncode == 2
        assert "there is none here" in done.stderr
        assert "TERM" not in done.stderr
        assert instead in done.stderr
