"""The request of a tuning, and its bounds."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from appliance.service.durations import seconds_in
from installer.base.errors import usage_error
from installer.base.i18n import t
from installer.base.timeouts import START_TIMEOUT

LEAST_BUDGET, MOST_BUDGET = 30.0, 24 * 3600.0   # seconds
DEFAULT_BUDGET = 600.0
LEAST_LOAD, MOST_LOAD = 5.0, 120.0              # seconds of load in one trial, unless given
MOST_TRIALS = 40

PROFILES = {"long-documents": "documents", "one-user": "single"}   # other names of built-in profiles

Word = Annotated[str, StringConstraints(min_length=1, max_length=500)]


class TuneRequest(BaseModel):
    """`target`: limits of `appliance.load.slo`, in milliseconds; none: as much as possible. `profile`: a built-in name
    or a file. `load_seconds` None: a share of the budget."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: dict[str, float] = Field(default_factory=dict)
    budget: float = Field(DEFAULT_BUDGET, ge=LEAST_BUDGET, le=MOST_BUDGET)
    profile: Word = "chat"
    model: Word | None = None
    preset: Word | None = None
    only: tuple[Word, ...] = ()
    load_seconds: float | None = Field(None, ge=1, le=3600)
    start_timeout: float = Field(START_TIMEOUT, ge=1, le=86_400)
    fresh: bool = False             # do not continue an interrupted tuning
    by: Word | None = None

    @property
    def seconds_of_load(self) -> float:
        return self.load_seconds or min(max(self.budget / 20, LEAST_LOAD), MOST_LOAD)

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def seconds_of(text: str, flag: str = "--budget") -> float:
    """Seconds of 90s, 10m, 1.5h or a plain number. Raises InstallError (usage)."""
    seconds = seconds_in(text)
    if seconds is None or not LEAST_BUDGET <= seconds <= MOST_BUDGET:
        raise usage_error(t("{flag} {value} cannot be used.", flag=flag, value=text[:40]),
                          t("Give a time from 30s to 24h, such as 10m."))  # fmt: skip
    return seconds
