"""The screen of troubles, and two operators at the screens of one installation."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checklist_kit import Desk
from screens import seen, until, widths

from appliance.service import answers as answers_of
from appliance.service.trouble import Action, Scene, Trouble, derive, of_error
from appliance.service.trouble.derive import loading
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.preflight.record import CheckRecord
from tui.app import Wizard
from tui.dialogs.ask import Read
from tui.dialogs.seat import GiveWay, TakeOver
from tui.frame import places
from tui.trouble import TroubleScreen

FAILED = of_error(InstallError(
    t("The service has ended (exit status {code}).", code=1), exit_code=ExitCode.UNHEALTHY,
    log_tail=["error: Cannot listen on 127.0.0.1:8443: Address already in use."],
))  # fmt: skip


def designed() -> list[Trouble]:
    """A screen for each kind of trouble that facts alone lead to."""
    def scene(**facts: Any) -> Scene:
        return Scene("", status={**fine, **facts})

    fine: dict[str, Any] = {
        "state": "serving", "prefix": "/srv/atoll", "service": {"restarts": 0, "last_exit": None, "phase": "running"},
        "health": {"ok": True, "said": "HTTP 200"}, "certificate": None, "disk": {"free_bytes": 90 << 30},
    }  # fmt: skip
    ends = {"days_left": 13, "not_after": "2026-12-06", "source": "local"}
    mismatch = CheckRecord("driver", "fail", "driver 470.57", "driver 580", t("The endpoint listens on it."),
                           t("Stop other programs."), "/proc/driver/nvidia/version",
                           title=t("Driver's age"), command="apt-get install nvidia-driver-580-server")  # fmt: skip
    absent = replace(mismatch, id="gpu", title=t("GPU on the PCI bus"), evidence="lspci -d 10de:", command="lspci")
    scenes = (
        Scene(""), scene(certificate=ends), scene(certificate={**ends, "days_left": -2}),
        scene(disk={"free_bytes": 1 << 30}), scene(state="stopped"), scene(state="draining"),
        replace(scene(), media=(Path("/media/usb"),)), replace(scene(), gpu=(mismatch,)),
        replace(scene(), gpu=(absent,)), replace(scene(state="failed"), log_tail=("info: ready",)),
    )  # fmt: skip
    found = [trouble for scene in scenes for trouble in derive(scene)]
    assert {trouble.id for trouble in found} == {
        "nothing-installed", "certificate-expiring", "disk-full", "stopped", "draining", "medium-missing",
        "driver-mismatch", "no-gpu", "engine-failed"}
    return found


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("language", ["en", "ko"])
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_a_trouble_fills_its_cells_and_says_what_to_do(
    tmp_path: Path, language: str, size: tuple[int, int], plain: bool
) -> None:
    assert FAILED is not None
    app = Wizard(Layout.at(tmp_path / "prefix"), language, plain=plain)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.standing is not None and app.machine is not None)
        more = designed() if size == (80, 24) else []
        for trouble in (FAILED, loading("chat weights 12.10/60.30 GB"), *more):
            await app.push_screen(TroubleScreen([trouble]))
            await pilot.pause(0.2)
            assert widths(app) == {size[0]}
            words = " ".join(seen(app).split())
            assert all(" ".join(action.command.split()) in words for action in trouble.actions), trouble.id
            assert ("What happened" in seen(app)) == (language == "en")
            if plain and language == "en":
                assert seen(app).isascii(), seen(app)
            assert ("20 %" in seen(app)) == (trouble.progress is not None)
            await pilot.press("escape")
            await until(pilot, lambda: app.screen is app.checklist)


async def test_the_menu_finds_what_is_wrong_and_keys_work(tmp_path: Path) -> None:
    app = Wizard(Layout.at(tmp_path / "prefix"), "en")
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.standing is not None and app.machine is not None)
        await app.run_action("trouble")
        await until(pilot, lambda: isinstance(app.screen, TroubleScreen) and "No release is installed" in seen(app))
        assert "atoll setup" in seen(app)
        for key in ("f1", "f8"):
            await pilot.press(key)
            await until(pilot, lambda: isinstance(app.screen, Read))
            await pilot.press("escape")
            await until(pilot, lambda: isinstance(app.screen, TroubleScreen))
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.checklist)


async def test_the_error_of_a_step_stays_until_somebody_has_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking again finds what is wrong now, here "nothing is installed": not why the work ended."""
    ran: list[str] = []
    monkeypatch.setattr("tui.trouble.screen.LOOK_SECONDS", 0.2)
    monkeypatch.setattr(Wizard, "run_step", lambda self, name: ran.append(name))
    app = Wizard(Layout.at(tmp_path / "prefix"), "en")
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.standing is not None and app.machine is not None)
        error = InstallError("it did not answer", exit_code=ExitCode.UNHEALTHY)
        screen = places.trouble(app.front, error, "install")
        assert screen is not None
        await app.push_screen(screen)
        await pilot.pause(1.5)
        assert app.screen is screen
        assert "it did not answer" in seen(app)
        assert "F5 Run it again" in seen(app)
        assert "atoll logs --prefix" in " ".join(seen(app).split())
        await pilot.press("f5")
        await until(pilot, lambda: app.screen is app.checklist and app.position == 3)
        assert ran == ["install"]


async def test_several_troubles_are_turned_like_pages(tmp_path: Path) -> None:
    app = Wizard(Layout.at(tmp_path / "prefix"), "en")
    pages = [Trouble(f"page-{n}", f"title {n}", f"happened {n}", actions=(Action("do", "ls"),)) for n in (1, 2)]
    async with app.run_test(size=(80, 24)) as pilot:
        await app.push_screen(TroubleScreen(pages))
        await until(pilot, lambda: "happened 1" in seen(app))
        await pilot.press("right")
        await until(pilot, lambda: "happened 2" in seen(app) and "2 of 2" in seen(app))
        await pilot.press("left")
        await until(pilot, lambda: "happened 1" in seen(app))


def wizard(desk: Desk) -> Wizard:
    app = Wizard(desk.layout, "en")
    app.desk.answers = answers_of.from_json(desk.answers(accept_licenses=[]))
    return app


async def test_a_second_operator_takes_over_an_open_question_with_consent(desk: Desk) -> None:
    first = wizard(desk)
    async with first.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: first.standing is not None and first.machine is not None)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: first.standing.step("gpu").status == "green" and first.following is None)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: isinstance(first.screen, Read))  # the licence waits for an answer
        second = wizard(desk)
        async with second.run_test(size=(100, 24)) as other:
            await until(other, lambda: second.following is not None and second.following.is_watcher)
            assert "works here" in seen(second).splitlines()[0]
            await other.press("f11")
            await until(other, lambda: isinstance(second.screen, TakeOver))
            assert "You see the same screens" in seen(second)
            await other.press("enter")
            await until(pilot, lambda: isinstance(first.screen, GiveWay))
            await pilot.press("enter")  # meant for the licence below: no consent
            assert isinstance(first.screen, GiveWay)
            await pilot.press("f9")
            await until(other, lambda: isinstance(second.screen, Read))  # the same question, here now
            await until(pilot, lambda: first.watched is not None and first.following.is_watcher)
            assert "works here" in seen(first).splitlines()[0]
            assert not isinstance(first.screen, Read)
            await other.press("escape")
            await until(other, lambda: second.following is None)
            await until(pilot, lambda: first.following is None)
            assert not os.path.exists(desk.layout.journal)
    assert desk.statuses()["model"] == "failed"
