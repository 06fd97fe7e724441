"""What a verification checks, and against which targets: the table [verify] of the answers, and flags."""

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from appliance.load.slo import Slo
from installer.base.errors import InstallError, usage_error
from installer.base.i18n import joined, t

Group = Literal["health", "conformance", "quality", "performance", "stability", "security"]
GROUPS: tuple[Group, ...] = get_args(Group)
_PAIR = re.compile(r"(?P<name>[a-z0-9_]+)[:=](?P<value>\d+(?:\.\d+)?)(?P<unit>ms|s|%)?")
_TIMES = ("ttft", "tpot", "itl", "e2el")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Targets(_Strict):
    """Milliseconds of each request, the share of requests that must meet them, and targets for the whole.

    Of a quantised model beside its 16-bit weights: how much its perplexity may rise, and the share of positions at
    which both must think the same token most likely.
    """

    ttft: float | None = Field(default=None, gt=0)
    tpot: float | None = Field(default=None, gt=0)
    itl: float | None = Field(default=None, gt=0)
    e2el: float | None = Field(default=None, gt=0)
    share: float = Field(default=0.95, gt=0, le=1)
    output_throughput: float | None = Field(default=None, gt=0)
    request_throughput: float | None = Field(default=None, gt=0)
    users: int | None = Field(default=None, ge=1, le=10_000)
    error_rate: float = Field(default=0.01, ge=0, le=1)
    perplexity_rise: float = Field(default=0.1, ge=0, le=100)
    top1_agreement: float = Field(default=0.85, ge=0, le=1)

    @property
    def slo(self) -> Slo:
        return Slo(ttft=self.ttft, tpot=self.tpot, itl=self.itl, e2el=self.e2el)


class VerifyAnswers(_Strict):
    """`requests` or `seconds` bound the load of `performance`; without both, the profile does. `rate` of the open loop,
    in requests per second; by default 70 % of what the closed loop reached. `quality_reference`: a file that
    `atoll bench quality --save` wrote of the model's 16-bit weights."""

    groups: list[Group] = list(GROUPS)
    profile: Annotated[str, StringConstraints(min_length=1, max_length=4096)] = "chat"
    requests: int | None = Field(default=None, ge=1, le=1_000_000)
    seconds: float | None = Field(default=None, gt=0, le=86_400)
    rate: float | None = Field(default=None, gt=0, le=100_000)
    soak_seconds: float = Field(default=120.0, ge=0, le=30 * 86_400)
    quality_reference: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = None
    targets: Targets = Targets()


def with_targets(targets: Targets, words: list[str]) -> Targets:
    """`targets`, changed by words such as `ttft=500ms users=8 share=99%`. Raises InstallError (usage)."""
    values: dict[str, Any] = targets.model_dump()
    for pair in (part for word in words for part in word.replace(",", " ").split()):
        found = _PAIR.fullmatch(pair.lower())
        if found is None or found["name"] not in Targets.model_fields:
            raise _wrong(pair)
        unit, number = found["unit"], float(found["value"])
        if unit in ("ms", "s") and found["name"] not in _TIMES:
            raise _wrong(pair)
        number *= {"s": 1000.0, "%": 0.01}.get(unit or "", 1.0)
        values[found["name"]] = int(number) if found["name"] == "users" else number
    try:
        return Targets.model_validate(values)
    except ValueError:
        raise _wrong(" ".join(words)) from None


def _wrong(pair: str) -> InstallError:
    return usage_error(t("'{pair}' is not a target.", pair=pair),
                       t("Targets are {names}; write ttft=500ms, users=8 or share=99%.",
                         names=joined(list(Targets.model_fields))))  # fmt: skip
