"""The dashboard over a real service: its numbers are those of the traffic, by keyboard alone, whatever breaks."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from checklist_kit import Front
from real_service import MODEL, install, signed
from screens import seen, until, widths

from appliance.series import Store, sampler
from appliance.service.dashboard import cells
from appliance.service.dashboard.alerts import alerts
from appliance.service.dashboard.snapshot import GpuRow, ModelRow
from appliance.service.dashboard.watcher import KEY, Watcher
from appliance.service.desk import Desk
from appliance.service.pilot.records import series_of
from appliance.service.trouble import troubles
from installer.access import api_keys
from installer.base.errors import ExitCode, InstallError
from installer.base.layout import Layout
from installer.operate.lifecycle import start, stop
from installer.release import config
from installer.service.choice import service_for
from tui.app import Wizard
from tui.dashboard.columns import columns
from tui.dialogs.ask import Ask, Read
from tui.dialogs.form import Pick
from tui.dialogs.seat import TakeOver

pytestmark = pytest.mark.timeout(600)
MARKER = "Sphinx-of-black-quartz"
REQUESTS, TOKENS = 5, 6


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path, signer: Any) -> Iterator[Layout]:
    root = tmp_path_factory.mktemp("watched")
    layout = install(signed(smollm2_dir, root, signer), root / "prefix", signer, Front())
    yield layout
    stop(layout)


@pytest.fixture(scope="module")
def key(installed: Layout) -> str:
    return api_keys.add(installed.api_keys, "hr-portal").text


def ask(layout: Layout, key: str, count: int = REQUESTS) -> None:
    for _ in range(count):
        body = {"model": MODEL, "prompt": MARKER, "max_tokens": TOKENS, "ignore_eos": True}
        reply = httpx.post(f"{config.standing(layout).url}/v1/completions", json=body, timeout=60,
                           headers={"Authorization": f"Bearer {key}"})  # fmt: skip
        assert reply.status_code == 200


def command(layout: Layout, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return atoll(layout, "top", *words, **environment)


def atoll(layout: Layout, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "appliance.cli", *words], capture_output=True, text=True, timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "ATOLL_PREFIX": str(layout.prefix), "ATOLL_LANG": "en", **environment},
    )  # fmt: skip


def test_the_numbers_are_those_of_the_traffic_and_no_text_is_among_them(installed: Layout, key: str) -> None:
    with Watcher(installed, 1.0) as watcher:
        first = watcher.look()
        assert first.models[0].ttft_p95 is None, "no traffic yet"
        ask(installed, key)
        last = watcher.look()
        names = {entry["name"] for entry in api_keys.read(installed.api_keys)}
        assert KEY in names
    model = last.models[0]
    assert (model.name, model.up, model.running, model.waiting) == (MODEL, True, 0, 0)
    assert last.requests == {"2xx": REQUESTS}
    assert model.tokens_out * (last.at - first.at) == pytest.approx(REQUESTS * TOKENS, rel=0.05)
    assert model.ttft_p95 is not None
    assert model.itl_p95 is not None
    assert model.pages
    assert last.state == "serving"
    assert [row.name for row in last.keys if row.name == KEY] == []
    assert "hr-portal" in [row.name for row in last.keys]
    assert last.alerts == (), "the watcher's own key is no news"
    text = json.dumps(last.to_json())
    assert MARKER not in text
    assert key not in text
    assert KEY not in {entry["name"] for entry in api_keys.read(installed.api_keys)}, "the key went with the watcher"


async def test_active_requests_are_a_table_without_what_they_say(installed: Layout, key: str) -> None:
    body = {"model": MODEL, "prompt": MARKER, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {key}", "X-Request-Id": "payroll-17"}
    app = Wizard(installed, "en", dashboard=True)
    url = f"{config.standing(installed).url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as reply:
        received = reply.iter_lines()  # (a generator that nobody holds closes the connection)
        next(received)
        told = json.loads(command(installed, "--json").stdout)
        assert told["active_total"] == 1
        (row,) = told["active"]
        assert (row["request_id"], row["key"], row["state"], row["model"]) == (
            "payroll-17", "hr-portal", "running", MODEL)
        assert row["prompt_tokens"] > 0
        assert row["output_tokens"] > 0
        assert MARKER not in json.dumps(told)
        printed = command(installed, "--once").stdout
        assert "Active requests: 1, 0 of them waiting." in printed
        assert "payroll-17" in printed
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: "payroll-17" in seen(app))
            await pilot.resize_terminal(80, 24)
            await until(pilot, lambda: "payroll-17" not in seen(app))
            await pilot.press("4")
            await until(pilot, lambda: isinstance(app.screen, Read) and "payroll-17" in seen(app))
            assert "hr-portal" in seen(app)
            assert MARKER not in seen(app)
    rights = list(Path(json.loads(installed.service_state.read_text())["admin"]).parent.glob("admin.sock"))
    assert [path.stat().st_mode & 0o777 for path in rights] == [0o600]


@pytest.mark.parametrize("language", ["en", "ko"])
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
@pytest.mark.parametrize("plain", [False, True])
async def test_it_fits_every_terminal(installed: Layout, language: str, size: tuple[int, int], plain: bool) -> None:
    if plain and language == "ko":
        pytest.skip("consoles that cannot draw Hangul are English")
    app = Wizard(installed, language, plain=plain, dashboard=True)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: MODEL in seen(app))
        assert widths(app) == {size[0]}
        assert ("SERVING" if language == "en" else "서비스 중") in seen(app)
        if plain:
            assert [row for row in seen(app).splitlines() if not row.isascii()] == []


async def test_by_keyboard_alone(installed: Layout, key: str) -> None:
    app = Wizard(installed, "en", dashboard=True)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: MODEL in seen(app))
        ask(installed, key, 1)
        await pilot.press("3")
        await until(pilot, lambda: isinstance(app.screen, Read) and "KV pages in use" in seen(app))
        assert "hr-portal" in seen(app)
        await pilot.press("escape")
        await pilot.press("slash")
        await until(pilot, lambda: isinstance(app.screen, Ask))
        await pilot.press(*"no-such-word", "enter")
        await until(pilot, lambda: "0 lines with 'no-such-word'" in seen(app))
        await pilot.press("escape")
        assert "no-such-word" not in seen(app)
        await pilot.press("space")
        await until(pilot, lambda: "HELD" in seen(app))
        await pilot.press("space")
        await pilot.press("f1")
        await until(pilot, lambda: "BETWEEN: time" in seen(app))
        await pilot.press("escape", "escape")
        await until(pilot, lambda: app.screen is app.checklist)
        await pilot.press("f12")
        await until(pilot, lambda: MODEL in seen(app))


async def test_the_service_is_stopped_and_started_behind_a_question(installed: Layout) -> None:
    app = Wizard(installed, "en", dashboard=True)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: MODEL in seen(app))
        await pilot.press("f9")
        await until(pilot, lambda: isinstance(app.screen, Pick))
        await pilot.press("down", "enter")
        await until(pilot, lambda: "This affects everybody" in seen(app))
        await pilot.press("escape")
        await pilot.pause(0.5)
        assert service_for(installed).state().up, "Esc leaves it"
        await pilot.press("f9")
        await until(pilot, lambda: isinstance(app.screen, Pick))
        await pilot.press("down", "enter")
        await until(pilot, lambda: "This affects everybody" in seen(app))
        await pilot.pause(0.3)
        await pilot.press("enter")
        await until(pilot, lambda: "STOPPED" in seen(app), 60)
        assert "next: atoll start" in seen(app)
        await pilot.press("f9")
        await until(pilot, lambda: isinstance(app.screen, Pick))
        await pilot.press("enter")
        await until(pilot, lambda: "This affects everybody" in seen(app))
        await pilot.pause(0.3)
        await pilot.press("enter")
        await until(pilot, lambda: "SERVING" in seen(app), 120)


async def test_a_drain_and_its_end(installed: Layout, key: str) -> None:
    app = Wizard(installed, "en", dashboard=True)
    url = f"{config.standing(installed).url}/v1/completions"
    body, headers = {"model": MODEL, "prompt": "a", "max_tokens": 2}, {"Authorization": f"Bearer {key}"}
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: MODEL in seen(app))
        await pilot.press("f9")
        await until(pilot, lambda: isinstance(app.screen, Pick))
        await pilot.press("down", "down", "enter")
        await until(pilot, lambda: "This affects everybody" in seen(app))
        assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200, "not before it is confirmed"
        await pilot.pause(0.3)
        await pilot.press("enter")
        await until(pilot, lambda: "DRAINING" in seen(app) and "next: atoll drain --off" in seen(app), 60)
        refused = httpx.post(url, json=body, headers=headers, timeout=60)
        assert refused.json()["error"]["code"] == "draining"
        assert [trouble.id for trouble in troubles(installed)] == ["draining"]
        await pilot.press("f9")
        await until(pilot, lambda: isinstance(app.screen, Pick))
        await pilot.press("down", "down", "down", "enter")
        await until(pilot, lambda: "This affects everybody" in seen(app))
        await pilot.pause(0.3)
        await pilot.press("enter")
        await until(pilot, lambda: "SERVING" in seen(app) and "The service accepts requests." in seen(app), 60)
    assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200


def test_a_drain_waits_for_what_runs_and_a_start_ends_it(installed: Layout, key: str) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.stream("POST", f"{config.standing(installed).url}/v1/completions", json=body, headers=headers,
                      timeout=60) as reply:
        received = reply.iter_lines()
        next(received)
        waited = atoll(installed, "drain", "--wait", "1", "--json")
        assert (waited.returncode, json.loads(waited.stdout)) == (40, {"draining": True, "in_flight": 1})
    ended = atoll(installed, "drain", "--wait", "60")
    assert (ended.returncode, ended.stdout.strip()) == (0, "New requests are refused; no request runs.")
    status = json.loads(atoll(installed, "status", "--json").stdout)
    assert (status["state"], status["healthy"]) == ("draining", False)
    assert start(installed, Front()).changed  # type: ignore[arg-type]
    assert json.loads(atoll(installed, "drain", "--off", "--json").stdout) == {"draining": False, "in_flight": 0}
    assert json.loads(atoll(installed, "status", "--json").stdout)["state"] == "serving"


def test_nobody_to_drain(installed: Layout, tmp_path: Path) -> None:
    assert atoll(Layout.at(tmp_path / "empty"), "drain").returncode == ExitCode.USAGE
    stop(installed)
    try:
        refused = atoll(installed, "drain")
        assert refused.returncode == ExitCode.UNHEALTHY
        assert "does not answer on its admin socket" in refused.stderr
        assert "Nothing was changed." in refused.stderr
    finally:
        start(installed, Front())  # type: ignore[arg-type]


def test_a_service_that_has_died_is_told(installed: Layout) -> None:
    with Watcher(installed, 0.1) as watcher:
        watcher.look()
        stop(installed)
        try:
            watcher._facts_at = 0.0
            seen = watcher.look()
            assert (seen.state, seen.stale) == ("stopped", True)
            assert seen.alerts[0].id == "stopped"
        finally:
            start(installed, Front())  # type: ignore[arg-type]


def test_one_look_for_scripts(installed: Layout) -> None:
    shown = json.loads(command(installed, "--json", TERM="dumb").stdout)
    assert shown["models"][0]["name"] == MODEL
    assert shown["models"][0]["up"] is True
    printed = command(installed, "--once").stdout
    assert "SERVING" in printed
    assert "KV pages in use" in printed
    refused = command(installed, TERM="dumb")
    assert refused.returncode == 2
    assert "atoll top --once" in refused.stderr


async def test_who_looks_on_may_not_act(installed: Layout) -> None:
    holder = Desk(installed)
    holder.sit_down(lambda person: None, lambda: None)
    app = Wizard(installed, "en", dashboard=True)
    try:
        async with app.run_test(size=(100, 30)) as pilot:
            await until(pilot, lambda: MODEL in seen(app) and "works here" in seen(app))
            await pilot.press("f9")
            await until(pilot, lambda: isinstance(app.screen, TakeOver))
            await pilot.press("escape")
            with pytest.raises(InstallError, match="works here") as caught:
                app.desk.control("stop")
            assert caught.value.exit_code == ExitCode.BUSY
            assert service_for(installed).state().up
    finally:
        holder.close()


@pytest.mark.parametrize("damaged", [False, True])
def test_the_minutes_before_come_from_the_sampler_else_from_the_pilot(tmp_path: Path, damaged: bool) -> None:
    layout, now = Layout.at(tmp_path / "prefix"), time.time()
    for file, rate in ((sampler.file_of(layout), 10), (series_of(layout), 3)):
        file.parent.mkdir(parents=True)
        with Store(file, most_gap=60.0) as store:
            for number in range(3):
                store.add(now - 60 + 10 * number, {"vllm:generation_tokens_total": 10.0 * rate * number})
    if damaged:
        sampler.file_of(layout).write_bytes(b"no database")
    with Watcher(layout) as watcher:
        rates = [round(rate) for _, rate in watcher.history.since(0.0)["tokens_out"]]
    assert rates == ([3, 3] if damaged else [10, 10])


def test_a_gpu_tells_what_it_draws() -> None:
    row = GpuRow(0, "H100", 2**30, 80 * 2**30, 60, 350.4, 700.0, 0, 0)
    assert "350 / 700 W" in cells.gpu_cells(row)
    assert len(cells.gpu_cells(row)) == len(cells.GPU_HEADS)
    assert "350 W" in cells.gpu_cells(replace(row, power_limit=None))


async def test_nothing_is_installed(tmp_path: Path) -> None:
    app = Wizard(Layout.at(tmp_path / "empty"), "en", dashboard=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "Nothing is installed here" in seen(app))
    assert "NOT-INSTALLED" in command(Layout.at(tmp_path / "empty"), "--once").stdout


def test_alerts_say_what_the_numbers_mean() -> None:
    full = ModelRow("chat", True, running=8, waiting=9, slots=8, kv=0.99, preemptions=3)
    hot = GpuRow(0, "H100", 1, 2, 91, 350.4, 700.0, 0, 0)
    ends = {"severity": "warning", "what": "The certificate ends in 13 days.", "next": "atoll tls renew"}
    facts = {"problems": [ends]}
    found = alerts(facts, [full], [hot], {"2xx": 90.0, "5xx": 10.0}, stale=False)
    assert [alert.id for alert in found] == ["errors", "status-0", "kv-chat", "queue-chat", "hot-0"]
    assert all(alert.next for alert in found)
    calm = ModelRow("chat", True, running=8, waiting=8, slots=8, kv=0.99)
    cool = GpuRow(0, "H100", 1, 2, 60, None, None, 0, 0)
    assert alerts({}, [calm], [cool], {"2xx": 90.0, "5xx": 1.0}, stale=False) == ()


def test_columns_that_do_not_fit_are_left_out() -> None:
    shown = columns(["MODEL", "상태"], [["chat", "준비"], ["code", "준비"], ["more", "준비"]], 9, 2).plain
    assert shown == "MODEL\nchat\ncode\n+ 1"
    assert columns(["MODEL", "상태"], [["chat", "준비"]], 11, 2).plain == "MODEL  상태\nchat   준비"
