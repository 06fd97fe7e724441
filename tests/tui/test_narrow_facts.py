"""What stands on 80 columns: stale marks with their words, the facts of GPUs, a pilot at work; nothing is cut off."""

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checklist_kit import Desk
from screens import rows, seen, until, widths
from still import GPU, still
from test_wizard import opened

from appliance.service import facts
from appliance.service.desk import Desk as ServiceDesk
from appliance.service.facts import GpuFact
from appliance.service.findings import made
from appliance.service.gpu_details import GpuDetails
from appliance.service.pilot.board import PilotBoard, StageSeen
from appliance.service.state import STATUS_WORDS
from appliance.service.words import t
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import told
from tui.following import Following
from tui.look import SHORT
from tui.parts.trials import Trials
from tui.steps import gpu
from tui.steps.gpu import alike

STEPS = ("gpu", "model", "install", "tune", "verify", "pilot")


def marks(app: Any) -> dict[str, str]:
    """Step -> its mark and word, as they stand on the left."""
    left = [row[:18] for row in rows(app)]
    found = {}
    for step in STEPS:
        at = next(number for number, row in enumerate(left) if app.say(SHORT[step]) in row)
        word = "" if re.match(r"...? \d ", left[at + 1]) else left[at + 1].strip().split("  ")[0]
        found[step] = f"{left[at][2]} {word}".strip()
    return found


@pytest.mark.parametrize("language", ["en", "ko"])
@pytest.mark.parametrize(("change", "first"), [("gpu", "gpu"), ("model", "model"), ("setting", "install")])
async def test_what_changed_marks_the_later_steps_stale(
    desk: Desk, language: str, change: str, first: str, monkeypatch: pytest.MonkeyPatch, bundle: Any
) -> None:
    desk.run()
    app = opened(desk, language)
    stale = f"~ {told(STATUS_WORDS['stale'], language)}"
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.standing is not None)
        await until(pilot, lambda: set(marks(app).values()) == {"✓"}, 10)
        if change == "gpu":
            machine = facts.machine_facts(desk.layout)
            other = GpuFact(index=0, uuid="GPU-2", name="NVIDIA L4", memory_bytes=24 << 30, compute_capability="8.9")
            monkeypatch.setattr(facts, "machine_facts", lambda _: machine.model_copy(update={"gpus": (other,)}))
        elif change == "model":
            app.desk.amend(review={"tiny": {**app.desk.answers.review["tiny"].model_dump(mode="json"),
                                            "reviewer": "Lee"}})  # fmt: skip
        else:
            app.desk.amend(preset={"workload": "documents"})
        app.look_again()
        begin = STEPS.index(first)
        wanted = dict.fromkeys(STEPS[:begin], "✓") | dict.fromkeys(STEPS[begin:], stale)
        await until(pilot, lambda: marks(app) == wanted, 10)
        assert widths(app) == {80}
        for number in range(begin + 1, len(STEPS) + 1):
            app.set_focus(None)
            await pilot.press(str(number))
            await until(pilot, lambda number=number: app.body is app.checklist.pane.bodies.get(number))
            # The first says why it is stale, a later one which step comes before it.
            why = app.standing.step(STEPS[number - 1]).why if number == begin + 1 else (
                t("Step {number} comes first ({title}). Its key is {number}.", number=begin + 1,
                  title=app.standing.steps[begin].title))  # fmt: skip
            await until(pilot, lambda why=app.say(why): why in seen(app), 10)


async def test_tables_keep_their_columns_when_the_terminal_changes_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = still(tmp_path, "en", False, monkeypatch)
    result = {"rate": 30.0, "goodput": 6.5, "latency_ms": {"ttft": {"p95": 287.0}, "itl": {"p95": 157.0}}}
    tried = [{"setting": {"max-num-seqs": number}, "result": result, "why": ""} for number in (64, 128)]
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.standing is not None and app.machine is not None)
        app.set_focus(None)
        await pilot.press("2")
        await until(pilot, lambda: "Apache-2.0" in seen(app))
        for size, name in (((120, 40), "chat 1.0.0"), ((80, 24), "chat ")):
            await pilot.resize_terminal(*size)
            await until(pilot, lambda name=name, size=size: name in seen(app) and widths(app) == {size[0]}, 10)
            await pilot.pause(0.3)
            assert re.search(r"\[ \]  large.* 140\.0 GiB .*too large  MIT", seen(app)), seen(app)
        app.set_focus(None)
        await pilot.press("4")
        await until(pilot, lambda: app.body is app.checklist.pane.bodies.get(4) and app.body.board is not None)
        trials = app.body.query_one(Trials)
        trials.show_result({"trials": tried, "before": result, "after": result})
        trials.display = True
        for size in ((120, 40), (80, 24)):
            await pilot.resize_terminal(*size)
            await pilot.pause(0.5)
            assert re.search(r"the current set\S* .* 287 ms +157 ms", seen(app)), seen(app)


def test_gpus_that_are_alike_stand_together() -> None:
    four = [replace(GPU, index=number, temperature=40 + number, processes=()) for number in range(4)]
    assert [[each.index for each in group] for group in alike(four)] == [[0, 1, 2, 3]]
    four[2] = replace(four[2], ecc_uncorrected=3)
    assert [[each.index for each in group] for group in alike(four)] == [[0, 1, 3], [2]]
    held = [replace(each, processes=GPU.processes) for each in four[:2]]
    assert [[each.index for each in group] for group in alike(held)] == [[0], [1]]


@pytest.mark.parametrize(("language", "plain"), [("en", True), ("en", False), ("ko", False)])
async def test_the_facts_of_eight_gpus_leave_room_for_the_checks(
    tmp_path: Path, language: str, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = still(tmp_path, language, plain, monkeypatch)
    name = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
    eight = [replace(GPU, index=number, name=name, temperature=40 + number, processes=(), mig=True, ecc_uncorrected=12)
             for number in range(8)]  # fmt: skip
    eight[3] = replace(eight[3], processes=((4711, "/opt/somebody/else/with-a-long-path/python3", 70 << 30),) * 5)
    monkeypatch.setattr(gpu, "gpu_details", lambda: GpuDetails(tuple(eight), "580.95.05", "13.0"))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.standing is not None and app.machine is not None)
        app.set_focus(None)
        await pilot.press("1")
        await until(pilot, lambda: "GPU 0-2,4-7  RTX PRO 6000 Blackwell Max-Q" in seen(app))
        for fact in ("cc 9.0", "MIG", "PCIe 5 x16", "40-47", "700 W", "8443"):
            assert fact in seen(app)
        assert widths(app) == {80}
        await pilot.resize_terminal(120, 40)
        await until(pilot, lambda: "GPU 3  NVIDIA RTX PRO 6000" in seen(app))
        assert "-long-path/python3" in seen(app)


def running(waits: bool = False) -> PilotBoard:
    """A pilot with large numbers, as they come with a busy server."""
    goals = (made("errors", "block", True, t("Errors"), observed="0.94%", required=t("at most {limit}", limit="1.00%")),
             made("ttft", "block", False, t("Requests within the target"), observed="93.41% (1,284,301)",
                  required=t("first token within {limit} ms for {share}", limit="1000", share="95%")))  # fmt: skip
    figures = tuple((t("First token, 95 of 100"), "12,345 ms") for _ in range(6))
    stage = StageSeen(
        "search-and-hr-of-all-sites-01", "running", t("running"), tuple(f"0a1b2c3{n}" for n in range(8)), 1_199_000.0,
        1_209_600.0, (), (), (), figures, goals, waits)  # fmt: skip
    later = replace(stage, name="everybody", status="open", status_text=t("not begun"), users=("*",),
                    limits=(t("errors above {limit}", limit="5.0%"),), needs=(), figures=(), goals=(),
                    waits=False)  # fmt: skip
    return PilotBoard((stage, later), True, True, None, 0, False, None)


@pytest.mark.parametrize(("language", "plain"), [("en", True), ("en", False), ("ko", False)])
async def test_a_pilot_at_work_shows_its_figures_and_its_keys(
    tmp_path: Path, language: str, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, over = still(tmp_path, language, plain, monkeypatch), threading.Event()
    waits = False
    monkeypatch.setattr(ServiceDesk, "pilot", lambda self: running(waits))

    def work(reader: Following) -> tuple[dict, dict[str, str]]:
        reader.checklist_step("pilot", "Pilot", "begin")
        over.wait()
        return {}, {}

    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.standing is not None and app.machine is not None)
        app.following = Following(work, "pilot").start()
        try:
            app.set_focus(None)
            await pilot.press("6")
            stop, further = app.say(t("Stop it")), app.say(t("Next stage"))
            await until(pilot, lambda: f"X {stop}" in rows(app)[-1])
            assert f"N {further}" not in rows(app)[-1], "its time is not over"
            for said in ("search-and-hr-of-all-sites-01", "0a1b2c31", "93.41% (1,284,301)", "12,345 ms", "+6"):
                await until(pilot, lambda said=said: said in seen(app))
            assert widths(app) == {80}
            assert not plain or seen(app).isascii()
            waits = True
            app.body._look()
            await until(pilot, lambda: f"N {further}" in rows(app)[-1])
            assert f"X {stop}" in rows(app)[-1]
        finally:
            over.set()
        await until(pilot, lambda: app.following is None)


async def test_what_to_do_after_an_error_is_not_cut_off_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = still(tmp_path, "en", False, monkeypatch)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.standing is not None and app.machine is not None)
        app.set_focus(None)
        await pilot.press("3")
        await until(pilot, lambda: app.position == 3)
        app.trouble = InstallError("a long answer " * 25, exit_code=ExitCode.UNHEALTHY, changed="nothing " * 15,
                                   hint="The log says why: /var/log/atoll/serve.log")  # fmt: skip
        await until(pilot, lambda: "Next: The log says why: /var/log/atoll/serve.log" in " ".join(seen(app).split()))
