"""Each screen by keyboard alone: what it shows, what it refuses in clear words, what survives a small or changing
terminal, the Korean keyboard, and leaving."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from checklist_kit import Desk
from screens import rows, seen, until, widths
from textual.command import CommandPalette
from textual.widgets import Input

from appliance.service import answers as answers_of
from appliance.service import jobs
from appliance.service.desk import Desk as Desk_
from appliance.service.desk import Person
from installer.base.layout import Layout
from tui.app import Wizard
from tui.dashboard.dashboard import Dashboard
from tui.dialogs.ask import Ask, Read
from tui.dialogs.form import Form, Pick

STEPS = range(7)


@pytest.fixture
def empty(tmp_path: Path) -> Wizard:
    """Nothing is installed, and nothing was said."""
    return Wizard(Layout.at(tmp_path / "prefix"), "en")


async def ready(app: Wizard, pilot: Any) -> None:
    await until(pilot, lambda: app.standing is not None and app.machine is not None)


async def opened(app: Wizard, pilot: Any, position: int) -> None:
    app.set_focus(None)
    await pilot.press(str(position))
    await until(pilot, lambda: app.body is not None and app.body is app.checklist.pane.bodies.get(position))
    await pilot.pause(0.3)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("language", ["en", "ko"])
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_every_screen_fills_its_cells(empty: Wizard, language: str, size: tuple[int, int], plain: bool) -> None:
    empty.plain = plain
    empty.set_reactive(Wizard.language, language)
    async with empty.run_test(size=size) as pilot:
        await ready(empty, pilot)
        for position in STEPS:
            await opened(empty, pilot, position)
            assert widths(empty) == {size[0]}
            if plain:
                assert language == "ko" or seen(empty).isascii(), seen(empty)
            for key in ("f1", "f8", "f3"):
                await pilot.press(key)
                await pilot.pause(0.1)
                assert widths(empty) == {size[0]}
                await pilot.press("escape")
                await pilot.pause(0.1)


async def test_help_belongs_to_the_step(empty: Wizard) -> None:
    async with empty.run_test(size=(120, 40)) as pilot:
        await ready(empty, pilot)
        texts = set()
        for position in STEPS:
            await opened(empty, pilot, position)
            await pilot.press("f1")
            await until(pilot, lambda: isinstance(empty.screen, Read))
            texts.add(seen(empty).partition("Enter        continue")[0])
            await pilot.press("escape")
        assert len(texts) == len(STEPS)


async def test_the_menu_names_everything_and_does_it(empty: Wizard) -> None:
    async with empty.run_test(size=(80, 24)) as pilot:
        await ready(empty, pilot)
        await pilot.press("f3")
        await pilot.pause(0.5)
        await until(pilot, lambda: "Leave; running work continues" in seen(empty))  # all of it fits 24 lines
        listed = [row.split()[0] for row in rows(empty) if re.match(r" +(F\d+|Ctrl-L|[0-6]) ", row)]
        assert listed == ["F12", *"0123456", "F5", "F8", "F7", "F6", "F2", "F4", "F1", "Ctrl-L", "F10"]
        assert "What do you want to do?" in seen(empty)
        await pilot.press(*"Open step: Ver")
        await pilot.pause(1.0)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: empty.position == 5)


async def test_wrong_paths_and_files_are_named(empty: Wizard, tmp_path: Path) -> None:
    wrong = tmp_path / "answers.toml"
    wrong.write_text('schema_version = 1\nmediun = ["/media"]\n')
    async with empty.run_test(size=(120, 40)) as pilot:
        await ready(empty, pilot)
        await pilot.press("tab", "tab", "tab", *str(wrong), "enter")
        await until(pilot, lambda: "did you mean medium?" in seen(empty))
        assert empty.position == 0
        await pilot.press(*["backspace"] * 200, *"/nowhere", "enter")
        await until(pilot, lambda: "There is nothing at /nowhere. Correct the path." in seen(empty))
        await pilot.press("9")
        await until(pilot, lambda: "There is nothing" not in seen(empty))  # it was about another path
        await pilot.press("backspace", "shift+tab", "shift+tab", "shift+tab", *"/media/none", "enter", "enter")
        await until(pilot, lambda: "nothing at /media/none. Mount the medium" in seen(empty))
        assert empty.focused is empty.body.query_one("#medium", Input)
        await pilot.press(*["backspace"] * 11, "tab", "tab", "tab", "end")
        await pilot.press(*["backspace"] * 9, *"한ㄱ", "enter")  # half a syllable is a path that is not there
        await until(pilot, lambda: "There is nothing at 한ㄱ." in seen(empty))
        assert widths(empty) == {120}


@pytest.mark.parametrize(("goals", "costs", "plan"), [("ㅎ", "ㅏ", "ㅔ"), ("G", "K", "P")], ids=["korean", "capitals"])
async def test_letters_work_with_the_korean_keyboard_and_with_caps_lock(
    empty: Wizard, goals: str, costs: str, plan: str
) -> None:
    """The key bar writes them as capitals."""
    async with empty.run_test(size=(80, 24)) as pilot:
        await ready(empty, pilot)
        await opened(empty, pilot, 5)
        await pilot.press(goals)
        await until(pilot, lambda: isinstance(empty.screen, Form))
        await pilot.press("escape")
        await opened(empty, pilot, 6)
        await pilot.press(costs)
        await until(pilot, lambda: "an hour" in seen(empty))
        await pilot.press(plan)
        await until(pilot, lambda: isinstance(empty.screen, Pick))


async def test_a_step_whose_forerunner_is_not_done_names_it(empty: Wizard) -> None:
    async with empty.run_test(size=(80, 24)) as pilot:
        await ready(empty, pilot)
        await opened(empty, pilot, 3)
        assert "Step 1 comes first (GPU and machine). Its key is 1." in seen(empty)
        assert "Make the plan" not in seen(empty)
        await pilot.press("enter")
        assert empty.following is None


async def test_who_watches_is_offered_nothing_to_decide(empty: Wizard, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Person("7", "kim", "10.1.2.3", 7, 0.0)
    monkeypatch.setattr(Desk_, "somebody_else", lambda self: other)
    async with empty.run_test(size=(120, 40)) as pilot:
        await ready(empty, pilot)
        await until(pilot, lambda: "works here" in seen(empty))
        for position, keys in ((2, "u"), (4, "mu"), (5, "g"), (6, "pel")):
            await opened(empty, pilot, position)
            assert "You only watch. F11 asks" in seen(empty)
            for key in keys:
                assert f" {key.upper()} " not in rows(empty)[-1]
                await pilot.press(key)
                await pilot.pause(0.1)
                assert empty.screen is empty.checklist, key
        await pilot.press("k")
        await until(pilot, lambda: "an hour" in seen(empty))  # looking is free


async def test_the_dashboard_opens_once(empty: Wizard) -> None:
    async with empty.run_test(size=(80, 24)) as pilot:
        await ready(empty, pilot)
        await pilot.press("f12")
        await until(pilot, lambda: isinstance(empty.screen, Dashboard))
        await pilot.press("f12")
        await pilot.pause(0.2)
        await pilot.press("escape")
        await until(pilot, lambda: empty.screen is empty.checklist)


async def test_a_log_is_opened_at_its_end(empty: Wizard) -> None:
    async with empty.run_test(size=(80, 24)) as pilot:
        await ready(empty, pilot)
        lines = "\n".join(f"line {number}." for number in range(100))
        await empty.push_screen(Read(empty.say, "Log", lines, at_its_end=True))
        await until(pilot, lambda: "line 99." in seen(empty) and "Page Up shows what came before." in seen(empty))
        await pilot.press("pageup")
        await until(pilot, lambda: "line 99." not in seen(empty))


async def test_colours_are_no_key_of_a_terminal_that_has_only_its_own(tmp_path: Path) -> None:
    app = Wizard(Layout.at(tmp_path / "prefix"), "en", plain=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        assert "F4" not in rows(app)[-1]
        await pilot.press("f4")
        await until(pilot, lambda: "only its own 16 colours" in seen(app))


async def test_targets_are_numbers(empty: Wizard) -> None:
    async with empty.run_test(size=(80, 24)) as pilot:
        await ready(empty, pilot)
        await opened(empty, pilot, 5)
        await pilot.press("g")
        await until(pilot, lambda: isinstance(empty.screen, Form))
        await pilot.press("5", "x", "ㅁ", "0", "0", "enter", "enter", *"0", "enter", "enter", "enter")
        await until(pilot, lambda: "users" in seen(empty) and isinstance(empty.screen, Form))  # 0 users
        await pilot.press("escape")
        assert empty.desk.answers.verify.targets.users is None
        await pilot.press("g")
        await until(pilot, lambda: isinstance(empty.screen, Form))
        await pilot.press("5", "x", "ㅁ", "0", "0", "enter", *"40", "enter", *"16", "enter", "enter", *"30", "enter")
        await until(pilot, lambda: "Targets: first token 500 ms, between tokens 40 ms, users at" in seen(empty))
        assert empty.desk.answers.verify.targets.users == 16
        assert empty.desk.answers.verify.soak_seconds == 30


async def test_a_pilot_is_planned_or_left_out(empty: Wizard) -> None:
    async with empty.run_test(size=(80, 24)) as pilot:
        await ready(empty, pilot)
        await opened(empty, pilot, 6)
        await until(pilot, lambda: "No stage is planned yet" in seen(empty))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(empty.screen, Pick))
        await pilot.press("enter")
        await until(pilot, lambda: "everybody" in seen(empty) and "10 min" in seen(empty))
        assert "stops at: errors above 5.0%" in seen(empty)
        assert "must reach: 1 or more requests" in seen(empty)
        assert empty.desk.answers.pilot.stages[0].duration == 600
        await pilot.press("l")
        await until(pilot, lambda: isinstance(empty.screen, Ask))
        await pilot.press(*"no", "enter")
        assert isinstance(empty.screen, Ask)  # too short a reason
        await pilot.press("escape")
        assert empty.desk.answers.pilot.skip is None


@pytest.mark.parametrize(("plain", "language"), [(True, "en"), (False, "en"), (False, "ko")])
async def test_a_stage_is_edited_on_80_columns(empty: Wizard, plain: bool, language: str) -> None:
    empty.plain = plain
    empty.set_reactive(Wizard.language, language)
    empty.desk.amend(pilot={"stages": [{"name": "everybody", "users": ["*"], "duration": 600.0}]})
    async with empty.run_test(size=(80, 24)) as pilot:
        await ready(empty, pilot)
        await opened(empty, pilot, 6)
        await until(pilot, lambda: "everybody" in seen(empty))
        await pilot.press("ㄷ", "enter")
        await until(pilot, lambda: isinstance(empty.screen, Form))
        await pilot.pause(0.3)
        assert widths(empty) == {80}
        assert "10m" in seen(empty)
        assert "auto" in seen(empty), "the last field"
        assert "F5" in seen(empty)
        assert language == "ko" or not plain or seen(empty).isascii()
        await pilot.press("down", *["backspace"] * 3, *"soon", "f5")
        said = "5d or 2w" if language == "en" else "5d, 2w처럼"
        await until(pilot, lambda: "soon" in seen(empty) and said in seen(empty))
        assert empty.desk.answers.pilot.stages[0].duration == 600
        await pilot.press(*["backspace"] * 4, *"8h", "f5")
        await until(pilot, lambda: not isinstance(empty.screen, Form) and "8" in seen(empty))
        assert empty.desk.answers.pilot.stages[0].duration == 28_800
        await pilot.press("e", "down", "enter")
        await until(pilot, lambda: "stage-1" in seen(empty))
        await pilot.press("e", "up", "up", "enter")
        await until(pilot, lambda: [stage.name for stage in empty.desk.answers.pilot.stages] == ["stage-1"])


async def test_answers_and_report_are_written_from_anywhere(
    empty: Wizard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with empty.run_test(size=(120, 40)) as pilot:
        await ready(empty, pilot)
        await opened(empty, pilot, 4)
        await pilot.press("f6")
        await until(pilot, lambda: "atoll-answers.toml" in seen(empty))
        await pilot.press("f7")
        await until(pilot, lambda: "atoll-report.en.md" in seen(empty))
        empty.language = "ko"
        await pilot.press("f7")
        await until(pilot, lambda: "atoll-report.ko.md" in seen(empty))  # the one that this operator reads
        empty.language = "en"
        tmp_path.joinpath("blocked").mkdir()
        monkeypatch.chdir(tmp_path / "blocked")
        (tmp_path / "blocked/atoll-report.en.md").mkdir()
        await pilot.press("f7")
        await until(pilot, lambda: "The report could not be written" in seen(empty))
    assert answers_of.read(tmp_path / "atoll-answers.toml")
    assert "not begun" in (tmp_path / "atoll-report.en.md").read_text()
    assert "시작" in (tmp_path / "atoll-report.ko.md").read_text() or "체크리스트" in (
        tmp_path / "atoll-report.ko.md").read_text()  # fmt: skip
    assert json.loads((tmp_path / "atoll-report.json").read_text())["next_step"] == "gpu"


async def test_a_terminal_may_change_its_size_while_it_is_drawn(empty: Wizard) -> None:
    async with empty.run_test(size=(120, 40)) as pilot:
        await ready(empty, pilot)
        for number, size in enumerate([(80, 24), (200, 60), (40, 10), (79, 24), (80, 24), (120, 40)] * 2):
            empty.set_focus(None)
            await pilot.press(str(number % 7))
            await pilot.resize_terminal(*size)
            await pilot.pause(0.1)
            assert widths(empty) == {size[0]}
            assert ("too small" in seen(empty)) == (size[0] < 80 or size[1] < 24) or size == (40, 10)


@pytest.mark.parametrize("position", STEPS)
@pytest.mark.parametrize("key", ["ctrl+c", "f10", "ctrl+q"])
async def test_leaving_works_in_every_step_and_dialog(empty: Wizard, position: int, key: str) -> None:
    async with empty.run_test(size=(80, 24)) as pilot:
        await ready(empty, pilot)
        await opened(empty, pilot, position)
        if position % 2:
            await pilot.press("f1")
        await pilot.press(key)
        await pilot.pause(0.2)
        assert not empty.is_running or empty._exit


@pytest.mark.parametrize("position", STEPS[1:])
async def test_leaving_works_while_a_step_opens(empty: Wizard, position: int) -> None:
    async with empty.run_test(size=(80, 24)) as pilot:
        await ready(empty, pilot)
        empty.open_step(position)  # it ends before the step's pane is mounted


@pytest.mark.parametrize(("position", "keys", "screen"), [
    (0, ["f3"], CommandPalette), (5, ["g"], Form), (6, ["p"], Pick), (0, ["f8"], Read), (0, ["f12"], Dashboard),
    (0, ["f12", "slash"], Ask), (0, ["f12", "f9"], Pick),
])  # fmt: skip
async def test_ctrl_c_leaves_from_every_kind_of_dialog(
    empty: Wizard, position: int, keys: list[str], screen: type
) -> None:
    async with empty.run_test(size=(80, 24)) as pilot:
        await ready(empty, pilot)
        await opened(empty, pilot, position)
        for key in keys:
            await pilot.press(key)
            await pilot.pause(0.3)
        await until(pilot, lambda: isinstance(empty.screen, screen))
        await pilot.press("ctrl+c")
        await pilot.pause(0.2)
        assert not empty.is_running or empty._exit


async def test_half_typed_hangul_goes_nowhere_it_does_not_belong(empty: Wizard) -> None:
    """Into a name and a reason as it is; into numbers not at all; on a screen without a field it is no key."""
    async with empty.run_test(size=(80, 24)) as pilot:
        await ready(empty, pilot)
        await pilot.press("tab", "tab", *["backspace"] * 30, *"김ㅁ")
        assert empty.body.query_one("#by", Input).value == "김ㅁ"
        await opened(empty, pilot, 5)
        await pilot.press("ㅎ")
        await until(pilot, lambda: isinstance(empty.screen, Form))
        await pilot.press(*"5ㅁ0가0")
        assert empty.screen.query(Input).first().value == "500"
        await pilot.press("escape")
        await opened(empty, pilot, 3)
        before = seen(empty)
        await pilot.press(*"ㅁㅆ뷁")
        await pilot.pause(0.2)
        assert seen(empty) == before
        assert widths(empty) == {80}


# -- with the installer's small bundle


def wizard(desk: Desk, **more: Any) -> Wizard:
    app = Wizard(desk.layout, "en")
    app.desk.answers = answers_of.from_json(desk.answers(**more))
    return app


async def test_who_comes_second_sees_the_same_and_changes_nothing(desk: Desk) -> None:
    first = wizard(desk, accept_licenses=[])
    async with first.run_test(size=(80, 24)) as pilot:
        await ready(first, pilot)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: first.standing.step("gpu").status == "green" and first.following is None)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: isinstance(first.screen, Read))  # the licence waits for an answer
        second = Wizard(desk.layout, "en")
        async with second.run_test(size=(80, 24)) as other:
            await until(other, lambda: second.following is not None and second.following.is_watcher)
            await opened(second, other, 0)
            await until(other, lambda: "Somebody else works here." in seen(second))
            await opened(second, other, 3)
            assert "Another step is running." in seen(second)
            before = len(jobs.jobs(desk.layout))
            await other.press("enter", "f5")
            await other.pause(0.3)
            assert len(jobs.jobs(desk.layout)) == before
            await other.press("f10")
            assert second.parting
        await pilot.press("escape")
        await until(pilot, lambda: first.following is None)


async def test_leaving_loses_nothing_and_coming_back_lands_on_the_open_step(desk: Desk) -> None:
    app = wizard(desk)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: app.standing.step("gpu").status == "green" and app.following is None)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: app.following is not None or app.standing.step("model").status == "green")
        left_at_work = app.following is not None  # a short step may be done before anybody can leave it
        await pilot.press("ctrl+c")
    assert ("continues" in app.parting) == left_at_work
    desk.wait()
    assert desk.statuses()["model"] == "green"
    again = Wizard(desk.layout, "en")
    async with again.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: again.position == 3)
        assert again.desk.answers.trust_keys  # what was said once is not asked again


async def test_one_of_two_models_is_chosen(desk: Desk, bundle: Any, tmp_path: Path) -> None:
    medium = tmp_path / "medium"
    medium.mkdir()
    for sequence in (1, 2):
        shutil.copytree(bundle(sequence=sequence), medium / f"tiny-{sequence}")
    app = wizard(desk, bundle=None, medium=[str(medium)])
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await opened(app, pilot, 2)
        await until(pilot, lambda: "tiny 1.1.0" in seen(app) and "tiny 1.2.0" in seen(app))
        assert "Space chooses one" in seen(app)
        await pilot.press("enter")
        assert app.following is None
        await pilot.press("down", "space")
        await until(pilot, lambda: "[x]" in seen(app))
        (chosen,) = app.desk.answers.models
        assert chosen.bundle == str(medium / "tiny-2")
        await until(pilot, lambda: "Step 1 comes first (GPU and machine)." in seen(app))
        await pilot.press("enter")
        assert app.following is None
