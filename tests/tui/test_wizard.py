"""The screens by keyboard alone, over the real service."""

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from checklist_kit import Desk
from ports import free_port
from rich.cells import cell_len
from textual.widgets import Input

from appliance.service import answers as answers_of
from appliance.service import checklist
from appliance.service.facts import MachineFacts
from appliance.service.state import State, StepState
from appliance.service.steps import STEPS
from tui.app import Wizard
from tui.dialogs.ask import Ask, Read

REPOSITORY = Path(__file__).resolve().parents[2]


def screen(app: Wizard) -> list[str]:
    return ["".join(part.text for part in strip) for strip in app.screen._compositor.render_strips()]


async def until(pilot, true, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "\n".join(screen(pilot.app))
        await pilot.pause(0.05)


def opened(desk: Desk, language: str = "en", **answers: object) -> Wizard:
    app = Wizard(desk.layout, language)
    app.desk.answers = answers_of.from_json(desk.answers(**answers))
    return app


@pytest.mark.parametrize("language", ["en", "ko"])
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_every_row_has_the_width_of_the_terminal(desk: Desk, language: str, size: tuple[int, int]) -> None:
    app = opened(desk, language)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.standing is not None)
        for key in ("enter", "2", "3", "4", "5", "6", "f1", "escape", "f3"):
            await pilot.press(key)
            await pilot.pause(0.05)
            assert {cell_len(row) for row in screen(app)} == {size[0]}


async def test_enter_leads_from_nothing_to_a_service(desk: Desk) -> None:
    app = opened(desk)
    steps = None
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.standing is not None)
        await pilot.press("enter")
        for number, step in ((1, "gpu"), (2, "model"), (3, "install")):
            await until(pilot, lambda: app.screen is app.screen_stack[0])
            assert app.position == number
            await pilot.press("enter")
            await until(pilot, lambda step=step: app.standing.step(step).status == "green")
            await until(pilot, lambda: app.following is None)
            if step != "install":
                await pilot.press("enter")
        steps = {each.id: each.status for each in app.standing.steps}
        await until(pilot, lambda: isinstance(app.screen, Read))  # the key
    assert steps["install"] == "green"


async def test_what_changes_while_the_state_is_read_is_seen(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(desk)
    machine = app.desk.machine

    def meanwhile() -> MachineFacts:
        """Read after the state: another terminal's run begins and ends between the two."""
        monkeypatch.setattr(app.desk, "machine", machine)
        desk.run("gpu")
        return machine()

    monkeypatch.setattr(app.desk, "machine", meanwhile)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.standing is not None)
        await until(pilot, lambda: app.standing.step("gpu").status == "green", seconds=20)


async def test_a_licence_is_accepted_only_at_its_end_and_by_name(desk: Desk) -> None:
    app = Wizard(desk.layout, "en")
    app.desk.answers = answers_of.from_json(desk.answers(accept_licenses=[]))
    app.desk.by = "Kim"  # fills the field of the start
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.standing is not None)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: app.standing.step("gpu").status == "green" and app.following is None)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: isinstance(app.screen, Read))
        await pilot.pause(0.3)
        await pilot.press("enter")
        assert isinstance(app.screen, Read)  # the end was not on the screen yet
        for _ in range(2):
            licence = app.screen
            while not licence.at_end():
                await pilot.press("pagedown")
                await pilot.pause(0.02)
            await pilot.press("enter")
            await until(pilot, lambda licence=licence: app.screen is not licence)
            await pilot.pause(0.5)
        await until(pilot, lambda: app.standing.step("model").status == "green")
    accepted = [event for event in desk.events() if event["event"] == "accepted"]
    assert [event["by"] for event in accepted] == [app.desk.by] * 2
    assert app.desk.by.startswith("Kim (")


async def test_a_failing_check_is_waived_with_a_reason(desk: Desk) -> None:
    app = opened(desk)
    review = {**desk.answers()["review"]["tiny"]}
    del review["export"]
    app.desk.answers = answers_of.from_json(desk.answers(review={"tiny": review}))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.standing is not None)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: app.standing.step("gpu").status == "green" and app.following is None)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: isinstance(app.screen, Ask))  # the open point
        await pilot.press("escape")
        await until(pilot, lambda: app.standing.step("model").status == "failed" and app.following is None)
        await until(pilot, lambda: app.body.chosen() is not None and app.body.chosen().id == "review-export")
        await pilot.press("f9")
        await pilot.press("n", "o", "enter")
        assert isinstance(app.screen, Ask)  # too short a reason
        await pilot.press("w", "enter")
        await until(pilot, lambda: "Waived: Export and regions. Enter runs" in "\n".join(screen(app)))
        assert any("WAIV  Export and regions" in row for row in screen(app))
        assert "--waive" not in "\n".join(screen(app))  # the error that it blocks is settled
        assert "F9 Waive" not in screen(app)[-1]
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Ask))
        await pilot.press("escape")
        await until(pilot, lambda: app.standing.step("model").status == "green")
    assert desk.show().waivers["review-export"].reason == "now"


async def test_a_path_that_is_not_there_is_named(desk: Desk) -> None:
    app = Wizard(desk.layout, "ko")
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.standing is not None)
        await pilot.press(*"/nowhere", "enter", "enter", "enter")
        await pilot.pause(0.2)
        assert app.position == 0
        assert "/nowhere" in screen(app)[22]


async def test_the_port_is_chosen_at_the_start(desk: Desk) -> None:
    desk.run("gpu")
    other = free_port()
    app = opened(desk, bundle=None, medium=[str(desk.bundle)])
    app.desk.waive("port", "it ends tonight")
    async with app.run_test(size=(80, 24)) as pilot:

        async def opens(position: int) -> None:
            """Before that, keys still go to the fields of the step before."""
            await until(pilot, lambda: app.body is app.checklist.pane.bodies.get(position))

        await until(pilot, lambda: app.standing is not None)
        assert app.standing.step("gpu").status == "green"
        await opens(2)
        await pilot.press("0")
        await until(pilot, lambda: "Port; empty: 8000" in "\n".join(screen(app)))
        field = app.body.query_one("#port", Input)
        assert field.value == str(desk.site.port)
        field.focus()
        field.value = "70000"
        await pilot.press("enter")
        await until(pilot, lambda: "from 1 to 65535" in screen(app)[22])
        assert app.position == 0
        assert app.focused is field
        field.value = ""
        await pilot.press(*str(other), "enter")
        await until(pilot, lambda: app.position == 1 and app.standing.step("gpu").status == "stale")
        assert app.desk.answers.port == other
        assert app.desk.answers.waivers == {}
        await opens(1)
        await pilot.press("enter")
        await until(pilot, lambda: app.standing.step("gpu").status == "green" and app.following is None)
        await pilot.press("0")
        await opens(0)
        field.focus()
        field.value = ""
        await pilot.press("enter")
        await until(pilot, lambda: app.position == 1)
        assert app.desk.answers.port is None
    assert answers_of.to_json(checklist.last_answers(desk.layout))["port"] == other


async def test_the_port_of_an_answers_file_is_taken_unless_another_one_is_typed(desk: Desk, tmp_path: Path) -> None:
    file = tmp_path / "answers.toml"
    file.write_text("schema_version = 1\nport = 9443\n")
    for typed, expected in (("", 9443), ("9444", 9444)):
        app = opened(desk)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda app=app: app.standing is not None)
            app.body.query_one("#answers", Input).value = str(file)
            if typed:
                app.body.query_one("#port", Input).value = typed
            app.body.query_one("#answers", Input).focus()
            await pilot.press("enter")
            await until(pilot, lambda app=app: app.position == 1)
            assert app.desk.answers.port == expected


async def test_a_complete_checklist_leads_to_the_dashboard(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    done = State([StepState(step.id, step.title, "green") for step in STEPS], {}, [])
    monkeypatch.setattr(type(Wizard(desk.layout, "en").desk), "state", lambda self: done)
    app = opened(desk)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.standing is not None and app.position == len(STEPS))
        await until(pilot, lambda: "7 opens the dashboard" in screen(app)[22] and "7 Dashboard" in screen(app)[23])
        await pilot.press("7")
        await until(pilot, lambda: app.screen is not app.checklist)


async def test_a_terminal_that_is_too_small_says_so_and_comes_back(desk: Desk) -> None:
    app = opened(desk)
    async with app.run_test(size=(60, 20)) as pilot:
        await pilot.pause(0.2)
        assert "too small" in " ".join(screen(app))
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: "Start" in screen(app)[2])


@pytest.mark.parametrize("term", ["linux", "vt220"])
@pytest.mark.parametrize("how", ["ctrl-c", "SIGTERM"])
def test_the_real_program_starts_and_restores_the_terminal(tmp_path: Path, term: str, how: str) -> None:
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    before = termios.tcgetattr(slave)
    program = subprocess.Popen(
        [sys.executable, "-m", "appliance"], stdin=slave, stdout=slave, stderr=slave, cwd=REPOSITORY,
        env={**os.environ, "TERM": term, "ATOLL_PREFIX": str(tmp_path / "prefix"), "XDG_RUNTIME_DIR": str(tmp_path)},
        start_new_session=True,
    )  # fmt: skip
    seen = b""

    def read_until(sign: bytes, seconds: float) -> None:
        nonlocal seen
        end = time.monotonic() + seconds
        while sign not in seen and time.monotonic() < end:
            if select.select([master], [], [], 0.1)[0]:
                seen += os.read(master, 65536)

    try:
        read_until(b"This machine has", 60)
        assert b"This machine has" in seen, seen[-2000:]
        assert termios.tcgetattr(slave) != before
        if how == "ctrl-c":
            os.write(master, b"\x03")
        else:
            program.send_signal(signal.SIGTERM)
        read_until(b"\x1b[?1049l", 20)
        assert program.wait(20) == 0
        assert b"\x1b[?1049l" in seen
        assert termios.tcgetattr(slave) == before
        assert b"Traceback" not in seen
    finally:
        program.kill()
        program.wait()
        os.close(master)
        os.close(slave)
    assert not (tmp_path / "prefix").exists()  # looking writes nothing


@pytest.mark.parametrize("language", ["en", "ko"])
@pytest.mark.parametrize("argv", [[], ["setup"], ["tui"]])
def test_without_a_terminal_the_command_line_is_named(tmp_path: Path, argv: list[str], language: str) -> None:
    done = subprocess.run([sys.executable, "-m", "appliance", *argv], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, cwd=REPOSITORY, env={**os.environ, "ATOLL_PREFIX": str(tmp_path / "prefix"),
                                                          "ATOLL_LANG": language, "PYTHONUTF8": "1"})  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert "atoll checklist" in done.stderr
    assert ("terminal" in done.stderr) == (language == "en")
    assert not (tmp_path / "prefix").exists()


def test_a_dumb_terminal_is_told_too(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    try:
        done = subprocess.run([sys.executable, "-m", "appliance"], stdin=slave, stdout=slave, stderr=subprocess.PIPE,
                              text=True, cwd=REPOSITORY, env={**os.environ, "TERM": "dumb", "ATOLL_LANG": "en",
                                                              "ATOLL_PREFIX": str(tmp_path)})  # fmt: skip
        assert done.returncode == 2
        assert "TERM is 'dumb'" in done.stderr
        assert "atoll checklist" in done.stderr
        assert not select.select([master], [], [], 0)[0]
    finally:
        os.close(master)
        os.close(slave)
