"""A pilot's plan: stages with their users, duration, stop conditions and goals. It is the table [pilot] of the answers,
or a separate file."""

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from appliance.service.durations import seconds_in
from installer.base.errors import InstallError, usage_error
from installer.base.i18n import joined, plain, reason, t
from installer.decide.answers import problems

MOST_STAGES, MOST_SECONDS, MOST_FILE = 20, 366 * 86_400.0, 1 << 20

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}\z")]
USER = r"^(\*|[0-9a-f]{8}|group:[^\x00-\x1f]{1,64})\z"
User = Annotated[str, StringConstraints(pattern=USER)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=1e9)]


def seconds_of(value: Any) -> Any:
    """"8h" -> 28800.0. Returns anything else as it is, for pydantic to judge."""
    seconds = seconds_in(value) if isinstance(value, str) else None
    return value if seconds is None else seconds


Duration = Annotated[float, BeforeValidator(seconds_of), Field(ge=1, le=MOST_SECONDS)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Stop(_Strict):
    """When a stage is ended at once: any of these, over the last `window` seconds. Latencies in milliseconds at the
    95th percentile, temperature in °C, `down` in seconds. Rates and latencies count from `requests` requests on."""

    window: Duration = 60.0
    requests: int = Field(default=20, ge=1, le=1_000_000)
    error_rate: Share | None = 0.05
    ttft: Positive | None = None
    itl: Positive | None = None
    kv_usage: Share | None = None
    temperature: Positive | None = None
    down: Duration | None = 30.0


class Goal(_Strict):
    """What a stage must reach by its end. `share` of requests must keep `ttft` and `e2el`, milliseconds."""

    ttft: Positive | None = None
    e2el: Positive | None = None
    share: float = Field(default=0.95, gt=0, le=1)
    error_rate: Share = 0.01
    requests: int = Field(default=1, ge=0, le=1_000_000_000)
    throughput: Positive | None = None


class Stage(_Strict):
    """`users`: ids of API keys, `group:NAME`, or `*` for all. `way_back`: who may use the service when it is stopped:
    the users of the stage before it, or nobody. `advance`: whether the next stage begins by itself."""

    name: Name
    users: list[User] = Field(min_length=1, max_length=10_000)
    duration: Duration
    max_in_flight_per_key: int | None = Field(None, ge=1, le=10_000_000)
    stop: Stop = Stop()
    goal: Goal = Goal()
    way_back: Literal["previous", "nobody"] = "previous"
    advance: Literal["auto", "manual"] = "auto"


class PilotPlan(_Strict):
    """`interval`: seconds between two samples. `cost`: assumptions of `atoll cost`, by name."""

    stages: list[Stage] = Field(default_factory=list, max_length=MOST_STAGES)
    interval: float = Field(10.0, ge=0.2, le=15)
    contact: str = Field("", max_length=200)
    cost: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> "PilotPlan":
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(t("two stages have the same name"))
        for stage in self.stages:
            if stage.stop.window < 2 * self.interval:
                raise ValueError(t("stage {name}: a window of {window:g} s holds fewer than two samples",
                                   name=stage.name, window=stage.stop.window))  # fmt: skip
            for metric in ("ttft", "error_rate"):
                stop, goal = getattr(stage.stop, metric), getattr(stage.goal, metric)
                if metric == "error_rate" and stop is not None and stop < goal:
                    raise ValueError(t("stage {name}: it would be stopped at an error rate of {stop:g}, which its goal "
                                       "of {goal:g} allows", name=stage.name, stop=stop, goal=goal))  # fmt: skip
        return self


def read_plan(path: Path) -> PilotPlan:
    """Read a separate plan, TOML or JSON, with or without a [pilot] table around it. Raises InstallError (usage)."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_FILE + 1)
        if len(data) > MOST_FILE:
            raise ValueError(t("it is larger than 1 MiB"))
        values = json.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
        if isinstance(values, dict) and isinstance(values.get("pilot"), dict):
            values = values["pilot"]
        plan = PilotPlan.model_validate(values)
    except ValidationError as error:
        raise unusable(path, problems(error, PilotPlan)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise unusable(path, [reason(error) if isinstance(error, OSError) else plain(error)]) from None
    if not plan.stages:
        raise unusable(path, [t("it has no stage")])
    return plan


def unusable(where: Any, found: list[str]) -> InstallError:
    return usage_error(t("The pilot's plan {path} cannot be used: {names}.", path=where, names=joined(found, "; ")),
                       t("Look at a good one: atoll pilot plan --example"))  # fmt: skip


EXAMPLE = """\
# A pilot in three stages. Durations: 90s, 30m, 8h, 5d, 2w. Latencies: milliseconds.
# Users: ids of API keys (atoll apikey list), "group:NAME", or "*" for all.
contact = "Kim, platform team"

[[stages]]
name = "one-user"
users = ["0a1b2c3d"]
duration = "1d"
stop = { error_rate = 0.05, ttft = 3000, kv_usage = 0.98, temperature = 88, down = "60s" }
goal = { ttft = 1000, share = 0.95, error_rate = 0.01, requests = 50 }

[[stages]]
name = "team"
users = ["group:search"]
duration = "5d"
advance = "manual"
goal = { ttft = 1000, requests = 500 }

[[stages]]
name = "everybody"
users = ["*"]
duration = "2w"
goal = { ttft = 1000, requests = 5000 }

[cost]
gpu_price = 30000
power_price = 0.12
"""
