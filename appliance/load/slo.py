"""A service level objective: the time that each request may take, in milliseconds."""

import re
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from installer.base.errors import usage_error
from installer.base.i18n import t

if TYPE_CHECKING:
    from appliance.load.outcome import Outcome

_PAIR = re.compile(r"(?P<name>[a-z0-9]+)[:=](?P<value>\d+(?:\.\d+)?)(?P<unit>ms|s)?")


class Slo(BaseModel):
    """Limits of one request; None sets no limit. `itl` is the 95th percentile of the request's own gaps between tokens,
    `tpot` their mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft: float | None = Field(default=None, gt=0)
    tpot: float | None = Field(default=None, gt=0)
    itl: float | None = Field(default=None, gt=0)
    e2el: float | None = Field(default=None, gt=0)

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.ttft, self.tpot, self.itl, self.e2el))

    def met_by(self, outcome: "Outcome") -> bool:
        """A failed request meets no target."""
        if not outcome.ok:
            return False
        limits = ((self.ttft, outcome.ttft), (self.tpot, outcome.tpot), (self.itl, outcome.itl_p95),
                  (self.e2el, outcome.e2e))  # fmt: skip
        return all(limit is None or seconds * 1000 <= limit for limit, seconds in limits)

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


def parse_slo(words: list[str]) -> Slo:
    """Of `ttft:500 tpot:50` (vLLM's, milliseconds) or `ttft=500ms,itl=40ms,e2el=10s`. Raises InstallError (usage)."""
    limits: dict[str, float] = {}
    for pair in (part for word in words for part in word.replace(",", " ").split()):
        found = _PAIR.fullmatch(pair.strip().lower())
        if found is None or found["name"] not in Slo.model_fields or float(found["value"]) <= 0:
            raise usage_error(
                t("'{pair}' is not a target.", pair=pair),
                t("Write ttft, tpot, itl or e2el with a limit, such as ttft:500 (milliseconds) or ttft=0.5s."),
            )
        limits[found["name"]] = float(found["value"]) * (1000 if found["unit"] == "s" else 1)
    return Slo(**limits)
