"""A stage as a person types it: it comes back as it stands, and what is impossible is named with its bounds."""

from pathlib import Path

import pytest

from appliance.service.pilot import edit
from appliance.service.pilot.plan import MOST_STAGES, PilotPlan
from installer.access import api_keys
from installer.base.errors import ExitCode, InstallError
from installer.base.layout import Layout

PLAN = PilotPlan.model_validate({"stages": [
    {"name": "one", "users": ["*"], "duration": "1d", "advance": "manual",
     "stop": {"ttft": 3000, "kv_usage": 0.98, "window": "2m"}, "goal": {"ttft": 900}},
    {"name": "all", "users": ["*"], "duration": "90m"}]})  # fmt: skip


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout.at(tmp_path)
    layout.credentials.mkdir(parents=True)
    layout.config.write_text("[serve.limits]\nmax-in-flight-per-key = 4\n")
    return layout


def test_what_stands_there_comes_back_as_it_was(layout: Layout) -> None:
    assert edit.typed(PLAN.stages[0]) == {
        "users": "*", "duration": "1d", "max_in_flight_per_key": "", "error_rate": "5", "ttft": "3000", "itl": "",
        "kv_usage": "98", "temperature": "", "down": "30", "advance": "manual"}
    assert edit.typed(PLAN.stages[1])["duration"] == "90m"
    for number, stage in enumerate(PLAN.stages):
        assert PilotPlan.model_validate({"stages": edit.changed(layout, PLAN, number, edit.typed(stage))}) == PLAN


def test_a_changed_stage_keeps_what_has_no_field(layout: Layout) -> None:
    key = api_keys.add(layout.api_keys, "first", group="team").id
    typed = {**edit.typed(PLAN.stages[0]), "users": f"{key}, group:team", "duration": "8h", "error_rate": "2.5",
             "max_in_flight_per_key": "4", "ttft": "", "temperature": "85", "down": "", "advance": "auto"}  # fmt: skip
    first, second = PilotPlan.model_validate({"stages": edit.changed(layout, PLAN, 0, typed)}).stages
    assert second == PLAN.stages[1]
    assert (first.users, first.duration, first.max_in_flight_per_key) == ([key, "group:team"], 28_800, 4)
    assert (first.stop.error_rate, first.stop.ttft, first.stop.temperature, first.stop.down) == (0.025, None, 85, None)
    assert (first.advance, first.stop.window, first.goal.ttft) == ("auto", 120, 900)


@pytest.mark.parametrize(("field", "text", "said"), [
    ("users", "", "Users: name an API key"),
    ("users", "everybody", "'everybody' is no user"),
    ("users", "0a1b2c3d", "no usable API key for 0a1b2c3d"),
    ("duration", "", "'' is no time"),
    ("duration", "ㅂ일", "write 90s, 30m, 8h, 5d or 2w"),
    ("duration", "0s", "a stage lasts 1 second to 366 days"),
    ("duration", "99999w", "366 days"),
    ("max_in_flight_per_key", "2.5", "'2.5' is no number"),
    ("max_in_flight_per_key", "0", "1 to 10,000"),
    ("max_in_flight_per_key", "9", "9 requests at a time are planned for each key, 4 are allowed"),
    ("error_rate", "150", "Stops at errors above: 150 is impossible: 0 to 100 %"),
    ("error_rate", "0.5", "its goal of 0.01 allows"),
    ("ttft", "-3", "1 to 600,000 ms"),
    ("itl", "nan", "nan is impossible"),
    ("kv_usage", "x", "'x' is no number"),
    ("temperature", "900", "30 to 120 °C"),
    ("down", "inf", "1 to 86,400 s"),
    ("advance", "maybe", "write auto or manual"),
])  # fmt: skip
def test_what_is_impossible_is_named(layout: Layout, field: str, text: str, said: str) -> None:
    with pytest.raises(InstallError) as failure:
        edit.changed(layout, PLAN, 0, {**edit.typed(PLAN.stages[0]), field: text})
    assert said in failure.value.message
    assert failure.value.exit_code == ExitCode.USAGE


def test_stages_are_added_and_removed() -> None:
    more = PilotPlan.model_validate({"stages": edit.added(PLAN)})
    assert [stage.name for stage in more.stages] == ["one", "all", "stage-1"]
    assert more.stages[2].duration == more.stages[1].duration
    fewer = PilotPlan.model_validate({"stages": edit.removed(more, 0)})
    assert [stage.name for stage in fewer.stages] == ["all", "stage-1"]
    only = PilotPlan.model_validate({"stages": edit.removed(fewer, 1)})
    with pytest.raises(InstallError, match="at least one stage"):
        edit.removed(only, 0)
    while len(more.stages) < MOST_STAGES:
        more = PilotPlan.model_validate({"stages": edit.added(more)})
    with pytest.raises(InstallError, match="at most 20 stages"):
        edit.added(more)
