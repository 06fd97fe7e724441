"""What a trouble is, and the facts that troubles are derived from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from installer.base.i18n import t, told
from installer.preflight.record import CheckRecord

NOTHING = t("Nothing. This only looked.")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do: a sentence, and the line to type where there is one."""

    text: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Texts are `Text`s. `stops`: clients get no answers, or the next step cannot work. `progress`: from 0 to 1, for
    what only needs time."""

    id: str
    title: str
    happened: str
    cause: str = ""
    unchanged: str = NOTHING
    actions: tuple[Action, ...] = ()
    evidence: tuple[str, ...] = ()
    stops: bool = True
    progress: float | None = None

    def to_json(self, language: str = "en") -> dict[str, Any]:
        return {
            "id": self.id, "stops": self.stops, "progress": self.progress,
            **{name: told(getattr(self, name), language) for name in ("title", "happened", "cause", "unchanged")},
            "actions": [{"text": told(each.text, language), "command": told(each.command, language)}
                        for each in self.actions],
            "evidence": [told(each, language) for each in self.evidence],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that is not ours and holds memory of a GPU."""

    gpu: str
    text: str
    used: int
    stop: str


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that troubles are derived from. `status` is None where nothing is installed; `gpu` holds the preflight
    records about the GPU that did not pass; `media` the places that the answers name and that are not there. `error_id`
    is that of the error that ended the work, `port` the endpoint's."""

    where: str                                   # " --prefix DIR", or empty on a server
    log: Path | None = None
    status: dict[str, Any] | None = None
    gpu: tuple[CheckRecord, ...] = ()
    holders: tuple[Holder, ...] = ()
    media: tuple[Path, ...] = ()
    log_tail: tuple[str, ...] = ()
    error_id: str = ""
    port: int | None = None
