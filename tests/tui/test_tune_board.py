"""The knobs, on a GPU that is not here: the planner needs none. By keyboard alone, in both languages and sizes."""

from pathlib import Path
from typing import Any

import pytest
from screens import seen, until, widths

from appliance.service.presets.answers import PresetAnswers
from appliance.service.presets.catalogue import find_card, find_model
from appliance.service.tuning.board import Board, board_of
from engine.config import EngineConfig
from installer.base.errors import InstallError
from installer.base.layout import Layout
from tui.app import Wizard
from tui.parts.knob import Knob
from tui.parts.memory_bar import MemoryBar
from tui.steps.tune import TuneBody


def board() -> Board:
    model, card = find_model("qwen3.6-27b"), find_card("h100")
    config = EngineConfig(model.directory, quantization="fp8", max_num_seqs=64, max_model_len=32_768)
    return board_of("chat", model.title, model.directory, card, config, PresetAnswers())


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wizard:
    """The steps before this one count as done."""
    monkeypatch.setattr(TuneBody, "missing", lambda self: None)
    wizard = Wizard(Layout.at(tmp_path / "prefix"), "en")
    wizard.desk.boards = lambda: [board()]
    return wizard


async def at_the_knobs(app: Wizard, pilot: Any) -> TuneBody:
    await until(pilot, lambda: app.standing is not None and app.machine is not None)
    app.set_focus(None)
    await pilot.press("4")
    await until(pilot, lambda: isinstance(app.focused, Knob))
    assert isinstance(app.body, TuneBody)
    return app.body


def test_the_parts_of_a_plan_fill_the_gpu() -> None:
    found = board()
    seen = found.seen(found.knobs)
    assert seen.planned is not None
    assert {part.kind for part in seen.parts} == {"weights", "kv_cache", "states", "graphs", "spare", "others"}
    assert abs(sum(part.bytes for part in seen.parts) - seen.total) < 1 << 20


def test_what_does_not_fit_says_what_would() -> None:
    from dataclasses import replace

    found = board()
    seen = found.seen(replace(found.knobs, context=262_144, gpu_memory_utilization=0.42))
    assert seen.planned is None
    assert "Does not fit" in seen.fits
    assert seen.helps
    with pytest.raises(InstallError, match="Does not fit"):
        found.settings(seen.knobs)


@pytest.mark.parametrize(("change", "said"), [
    ({"context": 0}, "Context length: a whole number from 1 to 262,144"),
    ({"context": 262_145}, "Context length"), ({"sequences": 0}, "Users at once"),
    ({"sequences": 100_001}, "Users at once"), ({"gpu_memory_utilization": 1.5}, "GPU memory share"),
    ({"kv_cache_dtype": "int3"}, "KV precision"),
])  # fmt: skip
def test_an_impossible_number_is_named_as_the_form_names_it(change: dict[str, Any], said: str) -> None:
    from dataclasses import replace

    found = board()
    with pytest.raises(InstallError, match=said):
        found.seen(replace(found.knobs, **change))


async def test_a_bar_that_was_never_drawn_knows_its_height(app: Wizard) -> None:
    async with app.run_test(size=(120, 40)) as pilot:
        drawn = (await at_the_knobs(app, pilot)).query_one(MemoryBar)
        await until(pilot, lambda: drawn.size.height > 1)
        width, height = drawn.size
        fresh = MemoryBar()
        fresh.parts, fresh.total = drawn.parts, drawn.total
        assert fresh.size.width == 0
        assert fresh.get_content_height(app.size, app.size, width) == height


@pytest.mark.parametrize("language", ["en", "ko"])
@pytest.mark.parametrize(("size", "plain"), [((80, 24), True), ((80, 24), False), ((120, 40), False)])
async def test_the_bar_moves_as_a_knob_is_turned(
    app: Wizard, language: str, size: tuple[int, int], plain: bool
) -> None:
    app.set_reactive(Wizard.language, language)
    app.plain = plain
    async with app.run_test(size=size) as pilot:
        body = await at_the_knobs(app, pilot)
        before = body.query_one(MemoryBar).parts
        assert widths(app) == {size[0]}
        await pilot.press("right")
        await pilot.pause()
        assert body.query_one("#knob-context", Knob).value == "65536"
        after = body.query_one(MemoryBar).parts
        assert after != before
        assert widths(app) == {size[0]}
        await pilot.press("r")
        await pilot.pause()
        assert body.query_one(MemoryBar).parts == before
        await pilot.press("ㄱ", "up", "ㅔ")  # the keys work with the Korean keyboard on
        assert body.query_one("#knob-context", Knob).value == str(body.board.of_preset().context)
        if plain:
            assert seen(app).isascii() == (language == "en")


async def test_digits_write_a_number_and_enter_waits_until_it_fits(app: Wizard) -> None:
    async with app.run_test(size=(80, 24)) as pilot:
        body = await at_the_knobs(app, pilot)
        context = body.query_one("#knob-context", Knob)
        await pilot.press("9", "9", "9", "9", "9", "9")
        assert context.value == "999999"
        await until(pilot, lambda: "Context length: a whole number from 1 to 262,144." in seen(app))
        assert "These settings do not fit" in seen(app)
        assert "Enter Use" not in seen(app)
        await pilot.press("enter")
        assert app.following is None
        await pilot.press("backspace", "backspace", "ㅎ", "하")  # half a syllable changes nothing
        assert context.value == "9999"
        await until(pilot, lambda: "Fits: " in seen(app) and "Enter Use these settings" in seen(app))
        await pilot.press(*["backspace"] * 4)
        assert context.value == ""
        await until(pilot, lambda: "Context length: a whole number" in seen(app))


async def test_chosen_settings_are_what_the_step_is_told(app: Wizard) -> None:
    ran = []
    app.run_step = ran.append  # the job itself: test_tune_settings.py
    async with app.run_test(size=(80, 24)) as pilot:
        await at_the_knobs(app, pilot)
        await pilot.press("down", "left", "enter")
        await until(pilot, lambda: ran == ["tune"])
    settings = app.desk.answers.tune.settings
    assert settings["max-num-seqs"] == 32
    assert settings["max-model-len"] == 32_768
    assert settings["gpu-memory-utilization"] == 0.9
    assert settings["kv-cache-dtype"] == "auto"
