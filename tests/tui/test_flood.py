"""A job that floods its log: keys are answered all the same, and what is shown stays whole."""

import threading
import time
from pathlib import Path
from typing import Any

from screens import until, widths

from installer.base.layout import Layout
from tui.app import Wizard
from tui.dialogs.ask import Read
from tui.following import MOST_LINES, Following


async def median_wait(app: Wizard, pilot: Any) -> float:
    """Seconds from a key until its screen is there, by this test's own clock."""
    waits = []
    for _ in range(7):
        for key, shown in (("f1", True), ("escape", False)):
            began = time.monotonic()
            await pilot.press(key)
            await until(pilot, lambda shown=shown: isinstance(app.screen, Read) == shown)
            waits.append(time.monotonic() - began)
    return sorted(waits)[len(waits) // 2]


async def test_keys_are_answered_while_a_job_floods_its_log(tmp_path: Path) -> None:
    app, stop = Wizard(Layout.at(tmp_path / "prefix"), "en"), threading.Event()

    def flood(reader: Following) -> tuple[dict, dict[str, str]]:
        number = 0
        while not stop.is_set():
            for _ in range(200):
                number += 1
                reader.note(f"line {number} of what nobody can read at this speed")
                reader.progress("copying", number << 20, 1 << 40)
            reader.step(f"task {number % 50}", "begin")
            time.sleep(0.01)  # about 20,000 lines a second
        return {}, {}

    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.standing is not None and app.machine is not None)
        app.set_focus(None)
        await pilot.press("3")
        quiet = await median_wait(app, pilot)
        try:
            app.following = Following(flood, "install").start()
            await until(pilot, lambda: app.pulse > 2)
            loud = await median_wait(app, pilot)
            assert widths(app) == {80}
            assert len(app.following.lines) == MOST_LINES  # the oldest go, memory does not grow
        finally:
            stop.set()
        await until(pilot, lambda: app.following is None)
    assert loud < 4 * quiet + 0.2, (quiet, loud)
