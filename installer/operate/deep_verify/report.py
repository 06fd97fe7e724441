"""What a deep check found, and its record in state/verify.json, which `atoll status` shows."""

import calendar
import json
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from installer.base import fs
from installer.base.errors import ExitCode
from installer.base.layout import Layout
from installer.base.messages import with_ids, without_ids

_FORMAT = "%Y-%m-%dT%H:%M:%SZ"

Kind = Literal["release", "code", "model"]


@dataclass(slots=True)
class Target:
    """One thing that was checked. `exit_code` is 0 if it is as it was signed."""

    kind: Kind
    name: str
    digest: str = ""
    exit_code: int = 0
    error: str = ""
    hint: str = ""
    bytes: int = 0
    seconds: float = 0.0
    at: str = ""
    note: str = ""          # what could not be checked
    kept: bool = False      # an interrupted check found it good; it was not read again


@dataclass(slots=True)
class Report:
    """A whole check. `outcome` is good, bad, or interrupted (only what was finished is listed)."""

    started: str
    outcome: Literal["good", "bad", "interrupted"] = "interrupted"
    exit_code: int = int(ExitCode.INTERRUPTED)
    finished: str = ""
    seconds: float = 0.0
    bytes: int = 0
    targets: list[Target] = field(default_factory=list)
    recorded: bool = True

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": 1, **asdict(self)}

    def to_record(self) -> dict[str, Any]:
        """The same for the state file: each text keeps its message id."""
        texts = [with_ids({field.name: getattr(target, field.name) for field in fields(target)})
                 for target in self.targets]  # fmt: skip
        return self.to_json() | {"targets": texts}


def last(layout: Layout) -> dict[str, Any] | None:
    """The recorded result of the last check; None if there was none, or if it cannot be read."""
    try:
        found = json.loads(fs.read_regular(layout.verify_state, 1 << 20)[0])
        if not isinstance(found, dict) or not isinstance(found.get("targets"), list):
            return None
        return found | {"targets": [without_ids(target) for target in found["targets"] if isinstance(target, dict)]}
    except (OSError, ValueError):
        return None


def now() -> str:
    return time.strftime(_FORMAT, time.gmtime())


def age_seconds(at: str) -> float:
    """How long ago it was. Raises ValueError if `at` is not such a time."""
    return time.time() - calendar.timegm(time.strptime(at, _FORMAT))
