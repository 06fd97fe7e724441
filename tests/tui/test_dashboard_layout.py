"""What stands where on the dashboard, in small and large terminals; its numbers are in test_dashboard.py."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import still
from screens import rows, seen, until, widths
from still import SEEN

from appliance.series import Store, sampler
from appliance.service.dashboard import cells, history
from appliance.service.dashboard.snapshot import ActiveRow, GpuRow, KeyRow, ModelRow
from installer.base.layout import Layout
from tui.app import Wizard


async def dashboard(app: Wizard, pilot: Any, *shown: str) -> None:
    await until(pilot, lambda: app.standing is not None and app.machine is not None)
    app.set_focus(None)
    await pilot.press("f12")
    await until(pilot, lambda: all(each in seen(app) for each in shown))


@pytest.mark.parametrize("plain", [False, True])
async def test_gpus_stand_below_the_chart_and_beside_it_where_there_is_room(
    tmp_path: Path, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = still.still(tmp_path, "en", plain, monkeypatch)
    async with app.run_test(size=(80, 24)) as pilot:
        await dashboard(app, pilot, "SERVING", "The certificate ends", "GPU 0  H100", "66 ", "700 / 700 W", "no errors")
        assert "KV cache" not in seen(app)
        await pilot.resize_terminal(120, 40)
        await until(pilot, lambda: "KV cache" in seen(app) and "requests waiting" in seen(app))
        (line,) = [row for row in rows(app) if "H100 80GB HBM3" in row]
        assert "2,000 |" in line, "in one line with the chart"
        assert "no errors" in line
        lines = sum("POST /v1/chat/completions" in row for row in rows(app))
        assert lines == len(still.LOG), "the log takes what room is left"
        await pilot.resize_terminal(70, 20)
        await until(pilot, lambda: "too small" in seen(app))
        assert "SERVING" not in seen(app)
        assert widths(app) == {70}
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: "SERVING" in seen(app) and "too small" not in seen(app))


async def test_many_gpus_leave_room_for_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(replace(SEEN.gpus[0], index=number) for number in range(8))
    monkeypatch.setattr(still, "SEEN", replace(SEEN, gpus=gpus))
    app = still.still(tmp_path, "en", False, monkeypatch)
    async with app.run_test(size=(80, 24)) as pilot:
        await dashboard(app, pilot, "GPU 1  H100", "+ 6", "POST /v1/chat/co")
        await pilot.resize_terminal(100, 34)
        await until(pilot, lambda: "GPU 7  H100" in seen(app) and "POST /v1/chat/completions" in seen(app))


def test_what_the_driver_counted_is_a_word() -> None:
    gpu = GpuRow(0, "NVIDIA L4", None, None, None, None, None, 0, 0)
    assert cells.gpu_cells(gpu)[-1] == "no errors"
    assert cells.gpu_cells(replace(gpu, ecc_corrected=3))[-1] == "3 corrected"
    assert cells.gpu_cells(replace(gpu, ecc_corrected=3, ecc_uncorrected=2))[-1] == "2 uncorrected"
    assert cells.gpu_cells(replace(gpu, ecc_uncorrected=None))[-1] == "-", "this GPU counts none"


def test_details_tell_pages_slots_and_which_keys_are_at_work() -> None:
    model = ModelRow("chat", True, ttft_p50=180, ttft_p95=640, pages=100, pages_in_use=7, slots_in_use=3,
                     state_slots=64)  # fmt: skip
    told = "\n".join(cells.model_details(model))
    assert "7 of 100 KV pages in use" in told
    assert "3 of 64 state slots in use" in told
    assert "p50 180 ms, p95 640 ms" in told
    assert "state slots" not in "\n".join(cells.model_details(replace(model, state_slots=None)))
    rows_of = [ActiveRow(str(n), str(n), "chat", "hr-portal", "running", 1.0, 5, 5) for n in range(2)]
    keys = (KeyRow("a0", "hr-portal", "active"), KeyRow("b1", "ide", "revoked"))
    said = cells.key_lines(replace(SEEN, active=tuple(rows_of), keys=keys))
    assert said == ["API key a0  hr-portal  active  active requests: 2", "API key b1  ide  revoked  active requests: 0"]


def test_the_chart_goes_on_where_the_series_on_the_disk_ends(tmp_path: Path) -> None:
    layout, now = Layout.at(tmp_path / "prefix"), time.time()
    file = sampler.file_of(layout)
    file.parent.mkdir(parents=True)
    with Store(file, most_gap=60.0) as store:
        for number in range(4):
            buckets = {f'vllm:time_to_first_token_seconds_bucket{{le="{bound}"}}': 10.0 * number
                       for bound in ("0.25", "0.5", "+Inf")}  # fmt: skip
            store.add(now - 60 + 10 * number, {
                "vllm:generation_tokens_total": 100.0 * number, "vllm:num_requests_waiting": float(number),
                "vllm:kv_cache_usage_perc": 0.2 * number, **buckets})  # fmt: skip
    seen_so_far = history.History()
    seen_so_far.read(layout, now)
    before = seen_so_far.since(now - history.SECONDS)
    assert [round(value) for _, value in before["tokens_out"]] == [10, 10, 10]
    assert [value for _, value in before["waiting"]] == [0, 1, 2, 3]
    assert [round(value, 1) for _, value in before["kv"]] == [0.2, 0.4, 0.6]
    assert [round(value, 1) for _, value in before["ttft_p95"]] == [237.5] * 3
    seen_so_far.add(now, [ModelRow("chat", True, tokens_out=7, waiting=2, ttft_p95=90.0, kv=0.5),
                          ModelRow("code", True, tokens_out=5, waiting=1, ttft_p95=30.0, kv=0.1)])  # fmt: skip
    after = seen_so_far.since(now - 1)
    assert {name: points[-1][1] for name, points in after.items() if points} == {
        "tokens_out": 12, "waiting": 3, "ttft_p95": 90.0, "kv": 0.5}
    assert after["itl_p95"] == (), "without traffic there is nothing to draw"
