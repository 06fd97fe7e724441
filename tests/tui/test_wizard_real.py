"""The whole checklist by keyboard alone, on a prefix with the demonstration's model: real jobs, real tokens, 80x24."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from checklist_kit import REVIEW
from ports import free_port
from real_service import SMALL_LOAD, SMALL_MODEL, signed
from screens import seen, until, widths

from appliance.service.steps import STEPS
from installer.base.errors import InstallError
from installer.base.layout import Layout
from installer.operate.lifecycle import stop
from tui.app import Wizard
from tui.dialogs.ask import Read
from tui.dialogs.form import Form
from tui.parts.trials import Trials

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]



@pytest.fixture(autouse=True)
def _jobs_of_this_test(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are processes of their own here, and find each other through the environment."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    monkeypatch.setattr(os, "access", lambda path, mode: False if str(path) == "/run" else _access(path, mode))


_access = os.access


@pytest.fixture(autouse=True)
def _forked_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_LANG", "en")


@pytest.fixture
def layout(tmp_path: Path, smollm2_dir: Path, signer: Any) -> Iterator[Layout]:
    """Nothing is installed. `answers.toml` beside it says all but what a person decides at the screen."""
    bundle = signed(smollm2_dir, tmp_path, signer)
    (tmp_path / "tiny.toml").write_text(SMALL_LOAD)
    profile = str(tmp_path / "tiny.toml")
    answers = {
        "schema_version": 1, "bundle": str(bundle), "trust_keys": [str(signer.public_path)], "device": "cpu",
        "port": free_port(), "waivers": SMALL_MODEL, "review": {"smollm2-135m-instruct": REVIEW},
        "tune": {"profile": profile, "budget": "60s", "load_seconds": 2.0, "only": ["max-num-seqs"]},
        "verify": {"profile": profile, "requests": 6, "soak_seconds": 4.0},
        "pilot": {"interval": 0.5, "stages": [
            {"name": "everybody", "users": ["*"], "duration": 4.0, "stop": {"window": 2.0}, "goal": {"requests": 0}}]},
    }  # fmt: skip
    (tmp_path / "answers.toml").write_text(tomlkit.dumps(answers))
    found = Layout.at(tmp_path / "prefix")
    yield found
    with contextlib.suppress(InstallError):  # it came to no install
        stop(found)


async def test_from_nothing_to_a_signed_pilot(layout: Layout, tmp_path: Path) -> None:
    app = Wizard(layout, "en")
    async with app.run_test(size=(80, 24)) as pilot:

        def status(step: str) -> str:
            return app.standing.step(step).status if app.standing else "open"

        async def green(step: str, seconds: float = 300.0) -> None:
            await until(pilot, lambda: app.following is None and status(step) in ("green", "failed"), seconds)
            assert status(step) == "green", seen(app)
            assert widths(app) == {80}

        async def read_to_the_end() -> None:
            await until(pilot, lambda: isinstance(app.screen, Read))
            text = app.screen
            while not text.at_end():
                await pilot.press("pagedown")
                await pilot.pause(0.05)
            await pilot.press("enter")
            await until(pilot, lambda: app.screen is not text)

        await until(pilot, lambda: app.standing is not None)
        await pilot.press("tab", "tab", "tab", *str(tmp_path / "answers.toml"), "enter")
        await until(pilot, lambda: app.position == 1)
        await pilot.press("enter")
        await green("gpu")

        await pilot.press("enter")
        await until(pilot, lambda: all(word in seen(app) for word in ("smollm2-135m", "fits", "Apache-2.0")))
        await pilot.press("enter")
        await read_to_the_end()
        await read_to_the_end()
        await green("model")

        await pilot.press("enter", "enter")
        await read_to_the_end()  # the plan
        await until(pilot, lambda: "The key of the endpoint is" in seen(app), 300)
        await read_to_the_end()
        await green("install")

        await pilot.press("enter")
        await until(pilot, lambda: "computes on the CPU" in seen(app))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Form))
        await pilot.press(*"ttft=none", "enter", "enter", "enter")
        assert isinstance(app.screen, Form)  # no target is called so
        app.screen.query("Input").first().focus()
        await pilot.press(*"ttft=20s", "enter", "enter", "enter")  # what is selected gives way
        await until(pilot, lambda: app.body.query_one(Trials).display and "Requests/s" in seen(app), 120)
        await green("tune")
        await until(pilot, lambda: "Before" in seen(app))  # the state is green before it is drawn

        await pilot.press("enter", "g")
        await until(pilot, lambda: isinstance(app.screen, Form))
        await pilot.press(*"20000", "enter", "enter", "enter", "enter", "enter")
        await until(pilot, lambda: "first token 20,000 ms" in seen(app))
        await pilot.press("enter")
        await until(pilot, lambda: "throughput" in seen(app) and "target 20,000 ms" in seen(app), 300)  # while it runs
        assert "at work" in seen(app)
        await green("verify")
        assert "met" in seen(app)

        await pilot.press("enter")
        await until(pilot, lambda: "everybody" in seen(app) and "stops at" in seen(app))
        await pilot.press("enter")
        await until(pilot, lambda: "running" in seen(app).lower() and "everybody" in seen(app))
        await until(pilot, lambda: app.following is None and status("pilot") == "failed", 120)
        await until(pilot, lambda: "Sign it" in seen(app))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Form))
        await pilot.press("enter", *"Kim", "enter", "enter")
        await until(pilot, lambda: app.following is None and status("pilot") == "green", 120)
        await until(pilot, lambda: "signed by Kim" in seen(app))
    shown = subprocess.run([sys.executable, "-m", "appliance.cli", "checklist", "show", "--json", "--prefix",
                            str(layout.prefix)], capture_output=True, text=True, check=True)  # fmt: skip
    assert {each["id"]: each["status"] for each in json.loads(shown.stdout)["steps"]} == {
        step.id: "green" for step in STEPS}  # fmt: skip
    again = Wizard(layout, "ko")
    async with again.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: again.position == len(STEPS))
        for number in range(7):
            await pilot.press(str(number))
            await pilot.pause(0.5)
            assert widths(again) == {120}
