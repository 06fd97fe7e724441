"""A pilot as a person sees it: every stage with its limits and figures, the costs, and what can be done now."""

import contextlib
from dataclasses import dataclass, field

from appliance.series import Series, SeriesError
from appliance.service.findings import Finding
from appliance.service.pilot import records
from appliance.service.pilot.kpi import Kpi, judged, measure
from appliance.service.pilot.plan import Goal, PilotPlan, Stage, Stop
from appliance.service.pilot.records import PilotState, StageState
from appliance.service.pilot.report import FIGURES, STATUS, recommends
from appliance.service.planning import cost
from installer.access import api_keys
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.base.lock import holder
from installer.base.messages import decode


@dataclass(frozen=True)
class StageSeen:
    """One stage. `figures` and `goals` are (title, value) and findings; all titles are texts."""

    name: str
    status: str
    status_text: str
    users: tuple[str, ...]
    seconds: float
    duration: float
    limits: tuple[str, ...]
    needs: tuple[str, ...]
    why: tuple[str, ...]
    figures: tuple[tuple[str, str], ...]
    goals: tuple[Finding, ...]
    waits: bool                        # its time is over; a person decides about the next one


@dataclass(frozen=True)
class PilotBoard:
    """`watched`: somebody's job watches it now. `current` is the stage that runs or is next."""

    stages: tuple[StageSeen, ...]
    open: bool
    watched: bool
    outcome: str | None
    current: int | None
    recommended: bool
    signed: dict[str, str] | None
    costs: tuple[tuple[str, str], ...] = field(default=())


def board(layout: Layout, planned: PilotPlan) -> PilotBoard:
    """The pilot that is running; else `planned`, or the last pilot if that is the plan. Raises InstallError."""
    state = records.read(layout) if layout.state.is_dir() else PilotState()
    if state.plan is None or (not state.open and planned.stages and planned.stages != state.plan.stages):
        state = PilotState(planned, [StageState(stage.name) for stage in planned.stages])
    assert state.plan is not None
    begun = bool(state.planned_at)
    costs = _hourly(state.plan)
    seen = tuple(_stage(layout, stage, each, sum(costs.values()))
                 for stage, each in zip(state.plan.stages, state.stages, strict=True))  # fmt: skip
    return PilotBoard(
        seen, begun and state.open, begun and holder(records.lock_of(layout)) is not None, state.outcome,
        state.current, begun and recommends(state), state.signed, tuple(_cost_rows(costs, state)),
    )  # fmt: skip


def ready_plans(layout: Layout) -> dict[str, tuple[str, list[dict[str, object]]]]:
    """Name -> what it is for (a Text), and its stages, made of the API keys that there are."""
    keys = [str(entry["id"]) for entry in api_keys.usable(layout.api_keys)]
    all_users = {"name": "everybody", "users": ["*"]}
    plans: dict[str, tuple[str, list[dict[str, object]]]] = {
        "rehearsal": (t("A rehearsal: everybody for ten minutes"), [{**all_users, "duration": 600.0}]),
        "day": (t("One day with everybody"), [{**all_users, "duration": 86_400.0}]),
    }  # fmt: skip
    if keys:
        first = {"name": "one-user", "users": keys[:1], "duration": 86_400.0, "advance": "manual"}
        plans["stages"] = (t("One key for a day, then everybody for two weeks"),
                           [first, {**all_users, "duration": 1_209_600.0}])  # fmt: skip
    return plans


def _hourly(plan: PilotPlan) -> dict[str, float]:
    values = cost.assumed(plan.cost)
    return {**cost.per_hour(values, values["gpus_per_engine"]), "operators": cost.staff_per_hour(values)}


_COST_TITLES = {"gpus": t("GPUs"), "servers": t("Servers"), "power": t("Electricity"), "hosting": t("Hosting"),
                "operators": t("Operators")}  # fmt: skip


def _cost_rows(costs: dict[str, float], state: PilotState) -> list[tuple[str, str]]:
    rows = [(_COST_TITLES[name], t("{money} an hour", money=f"{value:,.2f}")) for name, value in costs.items()]
    return [*rows, (t("In all"), t("{money} an hour", money=f"{sum(costs.values()):,.2f}"))]


def _stage(layout: Layout, stage: Stage, state: StageState, per_hour: float) -> StageSeen:
    kpi = Kpi(**state.kpi) if state.kpi else None
    if state.status == "running" and state.start is not None:
        with contextlib.suppress(SeriesError), Series(records.series_of(layout)) as series:
            window = series.window(state.start, series.last_at or state.start)
            kpi = measure(window, stage.goal, per_hour=per_hour)
    figures = tuple((title, form.format(value)) for name, title, form in FIGURES
                    if kpi is not None and (value := getattr(kpi, name)) is not None)  # fmt: skip
    seconds = kpi.seconds if kpi else 0.0
    return StageSeen(
        stage.name, state.status, STATUS[state.status], tuple(stage.users), seconds, stage.duration,
        tuple(limits_of(stage.stop)), tuple(goals_of(stage.goal)), tuple(decode(why) for why in state.why), figures,
        tuple(judged(kpi, stage.goal)) if kpi else (),
        state.status == "running" and stage.advance == "manual" and seconds >= stage.duration,
    )  # fmt: skip


def limits_of(stop: Stop) -> list[str]:
    """What stops a stage, one text each."""
    found: list[str] = []
    if stop.error_rate is not None:
        found.append(t("errors above {limit}", limit=f"{stop.error_rate:.1%}"))
    if stop.ttft is not None:
        found.append(t("first token above {limit} ms", limit=f"{stop.ttft:g}"))
    if stop.itl is not None:
        found.append(t("between tokens above {limit} ms", limit=f"{stop.itl:g}"))
    if stop.kv_usage is not None:
        found.append(t("KV cache above {limit}", limit=f"{stop.kv_usage:.0%}"))
    if stop.temperature is not None:
        found.append(t("GPU above {limit} °C", limit=f"{stop.temperature:g}"))
    if stop.down is not None:
        found.append(t("no answer for {seconds} s", seconds=f"{stop.down:g}"))
    return found


def goals_of(goal: Goal) -> list[str]:
    """What a stage must reach, one text each."""
    found: list[str] = [t("{count} or more requests", count=f"{goal.requests:,}"),
             t("errors at most {limit}", limit=f"{goal.error_rate:.1%}")]  # fmt: skip
    if goal.ttft is not None:
        found.append(t("first token within {limit} ms for {share}", limit=f"{goal.ttft:g}", share=f"{goal.share:.0%}"))
    return found
