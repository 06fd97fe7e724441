"""The plan: everything that an install is going to do, shown before anything is written."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Kind = Literal["directory", "file", "symlink", "model", "process", "port", "user", "group", "unit"]
Deed = Literal["create", "replace", "keep", "start", "restart", "remove"]


@dataclass(frozen=True, slots=True)
class PlanItem:
    """One item. `bytes` is what it adds to the disk."""

    kind: Kind
    what: str
    deed: Deed
    bytes: int = 0
    note: str = ""


@dataclass(slots=True)
class Plan:
    """The items in the order in which they are done, and the release they lead to."""

    release: str
    previous: str | None
    items: list[PlanItem] = field(default_factory=list)

    def add(self, kind: Kind, what: Path | str, deed: Deed, bytes: int = 0, note: str = "") -> None:
        self.items.append(PlanItem(kind, str(what), deed, bytes, note))

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    def created(self) -> list[str]:
        """Paths that do not exist yet."""
        kinds = ("directory", "file", "symlink", "model")
        return [item.what for item in self.items if item.deed == "create" and item.kind in kinds]

    def to_json(self) -> dict[str, object]:
        return {
            "release": self.release,
            "previous": self.previous,
            "bytes": self.bytes,
            "items": [asdict(item) for item in self.items],
        }
