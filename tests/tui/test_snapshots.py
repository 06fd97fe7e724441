"""Every screen as text, beside the text that was accepted: both languages, two sizes, rich and basic.

After a change that is meant: ATOLL_SNAPSHOTS=write, then read the difference in git.
"""

import difflib
import os
from pathlib import Path
from typing import Any

import pytest
from screens import rows, seen, until, widths
from still import FAILED, still

from appliance.service.trouble.derive import loading
from tui.dialogs.ask import Read
from tui.dialogs.form import Form
from tui.trouble import TroubleScreen

ACCEPTED = Path(__file__).with_name("snapshots")
RULE = "=" * 20
STILL = 4  # looks at a screen on which nothing moves


@pytest.mark.parametrize("plain", [False, True], ids=["rich", "basic"])
@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
@pytest.mark.parametrize("language", ["en", "ko"])
async def test_screens_are_as_accepted(
    tmp_path: Path, language: str, size: tuple[int, int], plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = still(tmp_path, language, plain, monkeypatch)
    shots: list[str] = []
    async with app.run_test(size=size) as pilot:

        async def shot(name: str) -> None:
            seen: list[list[str]] = []
            while len(seen) < STILL or any(each != seen[-1] for each in seen[-STILL:]):
                await pilot.pause(0.15)
                await pilot.pause()  # the messages that are on their way
                seen.append(rows(app))
            now = seen[-1]
            assert widths(app) == {size[0]}
            shots.append(f"{RULE} {name}\n" + "\n".join(row.rstrip() for row in now))

        async def opened(position: int) -> Any:
            app.set_focus(None)
            await pilot.press(str(position))
            await until(pilot, lambda: app.body is not None and app.body is app.checklist.pane.bodies.get(position))
            return app.body

        await until(pilot, lambda: app.standing is not None and app.machine is not None)
        for position, name in enumerate(("start", "gpu", "model", "install", "tune", "verify", "pilot")):
            body = await opened(position)
            await until(pilot, lambda body=body: getattr(body, "looked", True))
            if name in ("tune", "pilot"):
                await until(pilot, lambda body=body: body.board is not None)
            await shot(name)
        await opened(5)
        await pilot.press("g")
        await until(pilot, lambda: isinstance(app.screen, Form))
        await shot("targets")
        await pilot.press("escape", "f1")
        await until(pilot, lambda: isinstance(app.screen, Read))
        await shot("help")
        await pilot.press("escape", "f12")
        await until(pilot, lambda: "hr-portal" in seen(app) or "chat" in seen(app))
        await shot("dashboard")
        await pilot.press("3")
        await until(pilot, lambda: isinstance(app.screen, Read))
        await shot("details")
        await pilot.press("escape", "escape")
        await until(pilot, lambda: app.screen is app.checklist)
        assert FAILED is not None
        for trouble in (FAILED, loading("chat weights 12.10/60.30 GB")):
            await app.push_screen(TroubleScreen([trouble]))
            await shot(f"trouble {trouble.id}")
            await pilot.press("escape")
            await until(pilot, lambda: app.screen is app.checklist)
    compare(ACCEPTED / f"{language}.{size[0]}x{size[1]}.{'basic' if plain else 'rich'}.txt", "\n".join(shots) + "\n")


def compare(path: Path, now: str) -> None:
    if os.environ.get("ATOLL_SNAPSHOTS") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(now, "utf-8")
    accepted = path.read_text("utf-8")
    changes = difflib.unified_diff(accepted.splitlines(), now.splitlines(), "accepted", "now", lineterm="", n=2)
    assert accepted == now, "\n".join(changes)
