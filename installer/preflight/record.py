"""What one check reports, and what it may look at."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Literal

from installer.config import Endpoint
from installer.layout import Layout

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class CheckRecord:
    """One fact about this machine: what was seen, what is needed, why it matters, what to do, and the evidence.

    `strict` failures cannot be waived. Statuses are words, never colours alone.
    """

    id: str
    status: Status
    observed: str
    required: str
    why: str
    fix: str = ""
    evidence: str = ""
    strict: bool = False
    waived: str | None = None  # the operator's typed reason

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PreflightContext:
    """The plans that the machine is checked against. Sizes in bytes, `bundle_created` in Unix seconds."""

    layout: Layout
    endpoint: Endpoint
    model_bytes: int = 0                 # all files of the bundle
    weight_bytes: int = 0                # its weights
    copy_bytes: int = 0                  # what must still be written: 0 when the store has it
    host_ram_bytes: int | None = None    # what the bundle asks for
    bundle_created: float | None = None
    own_pids: frozenset[int] = field(default_factory=frozenset)  # of our running service: it gives its port away


Check = Callable[[PreflightContext], CheckRecord]


def gib(size: float) -> str:
    """A size as people read it."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
