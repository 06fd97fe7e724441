"""A stage as fields that a person types, and back: who and how many at once, how long, and what stops it.

What is typed is checked field by field, so that an impossible number is named with its bounds; the plan as a whole is
checked by `plan.py`, against this installation by `check.py`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from appliance.service.durations import seconds_in, short_time
from appliance.service.pilot.check import check
from appliance.service.pilot.plan import MOST_SECONDS, MOST_STAGES, USER, PilotPlan, Stage
from installer.base.errors import usage_error
from installer.base.i18n import joined, t
from installer.base.layout import Layout
from offline_bundle.text import complaint

_USER = re.compile(USER.replace(r"\z", "$"))


@dataclass(frozen=True)
class StageField:
    """One line of the form; `title` and `hint` are texts. `where`: the table of a stage that holds it, "" for itself.
    `read` makes the value of what was typed, and raises ValueError with a Text."""

    name: str
    title: str
    hint: str
    where: str
    read: Callable[[str], Any]
    show: Callable[[Any], str]


def _number(low: float, high: float, unit: str, *, scale: float = 1.0, whole: bool = False) -> Callable[[str], Any]:
    """A reader of numbers in `unit`; nothing typed is None, "no such condition"."""

    def read(text: str) -> Any:
        if not text:
            return None
        try:
            value = int(text) if whole else float(text.removesuffix(unit.strip()).replace(",", ""))
        except ValueError:
            raise ValueError(t("'{text}' is no number", text=text)) from None
        if not low <= value <= high:  # also for "nan"
            raise ValueError(t("{text} is impossible: {low:,g} to {high:,g}{unit}", text=text, low=low, high=high,
                               unit=unit))  # fmt: skip
        return value if whole else value * scale

    return read


def _duration(text: str) -> float:
    value = seconds_in(text)
    if value is None:
        raise ValueError(t("'{text}' is no time; write 90s, 30m, 8h, 5d or 2w", text=text))
    if not 1 <= value <= MOST_SECONDS:
        raise ValueError(t("{text} is impossible: a stage lasts 1 second to 366 days", text=text))
    return value


def _users(text: str) -> list[str]:
    users = [user for part in text.split(",") if (user := part.strip())]
    if not users:
        raise ValueError(t("name an API key (8 characters), group:NAME, or * for everybody"))
    for user in users:
        if not _USER.match(user):
            raise ValueError(t("'{user}' is no user; write ids of API keys (8 characters), group:NAME, or *",
                               user=user))  # fmt: skip
    return users


def _advance(text: str) -> str:
    if text not in ("auto", "manual"):
        raise ValueError(t("write auto or manual"))
    return text


def _plain(value: Any) -> str:
    return "" if value is None else f"{value:g}"


def _percent(value: Any) -> str:
    return "" if value is None else f"{value * 100:g}"


FIELDS = (
    StageField("users", t("Users"), t("key ids, group:NAME, *"), "", _users, ", ".join),
    StageField("duration", t("Duration"), t("90s, 30m, 8h, 5d, 2w"), "", _duration, short_time),
    StageField("max_in_flight_per_key", t("Requests at once"), t("of each key; empty: any"), "",
               _number(1, 10_000, "", whole=True), _plain),
    StageField("error_rate", t("Stops at errors above"), t("%; empty: never"), "stop",
               _number(0, 100, " %", scale=0.01), _percent),
    StageField("ttft", t("at first token above"), t("ms; empty: never"), "stop", _number(1, 600_000, " ms"), _plain),
    StageField("itl", t("between tokens above"), t("ms; empty: never"), "stop", _number(1, 60_000, " ms"), _plain),
    StageField("kv_usage", t("at KV cache above"), t("%; empty: never"), "stop",
               _number(0, 100, " %", scale=0.01), _percent),
    StageField("temperature", t("at GPU above"), t("°C; empty: never"), "stop", _number(30, 120, " °C"), _plain),
    StageField("down", t("at no answer for"), t("seconds; empty: never"), "stop", _number(1, 86_400, " s"), _plain),
    StageField("advance", t("Next stage"), t("auto or manual"), "", _advance, str),
)


def typed(stage: Stage) -> dict[str, str]:
    """Field -> what stands in it."""
    return {field.name: field.show(getattr(stage.stop if field.where else stage, field.name)) for field in FIELDS}


def changed(layout: Layout, plan: PilotPlan, number: int, values: Mapping[str, str]) -> list[dict[str, Any]]:
    """The stages of `plan` with what was typed for stage `number`. Raises InstallError (usage) that names the field."""
    stage = plan.stages[number].model_dump()
    for field in FIELDS:
        try:
            value = field.read(values[field.name].strip())
        except ValueError as error:
            raise usage_error(t("{field}: {why}.", field=field.title, why=error.args[0])) from None
        (stage[field.where] if field.where else stage)[field.name] = value
    stages = [each.model_dump() for each in plan.stages]
    stages[number] = stage
    return _checked(layout, plan, stages, number)


def added(plan: PilotPlan) -> list[dict[str, Any]]:
    """The stages of `plan` and one more, like its last one. Raises InstallError (usage)."""
    if len(plan.stages) >= MOST_STAGES:
        raise usage_error(t("A pilot has at most {most} stages.", most=MOST_STAGES))
    names = {stage.name for stage in plan.stages}
    name = next(name for number in range(1, MOST_STAGES + 2) if (name := f"stage-{number}") not in names)
    stages = [stage.model_dump() for stage in plan.stages]
    return [*stages, {**stages[-1], "name": name}]


def removed(plan: PilotPlan, number: int) -> list[dict[str, Any]]:
    """Raises InstallError (usage) for the only stage."""
    if len(plan.stages) == 1:
        raise usage_error(t("A pilot needs at least one stage."))
    return [stage.model_dump() for at, stage in enumerate(plan.stages) if at != number]


def _checked(layout: Layout, plan: PilotPlan, stages: Sequence[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    try:
        whole = PilotPlan.model_validate({**plan.model_dump(include=set(PilotPlan.model_fields)), "stages": stages})
    except ValidationError as error:
        raise usage_error(joined([complaint(each) for each in error.errors(include_url=False)], "; ")) from None
    check(layout, whole.model_copy(update={"stages": [whole.stages[number]]}))
    return [stage.model_dump() for stage in whole.stages]
