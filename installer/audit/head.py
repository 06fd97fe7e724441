"""A head of the audit log: what anchors store outside of it."""

from dataclasses import dataclass

GENESIS = "0" * 64  # the hash before the first record


@dataclass(frozen=True, slots=True)
class Head:
    """Identifies one state of the log: its number of records, and the hash of the last one."""

    count: int
    hash: str  # GENESIS for an empty log; the first digits if a person wrote it down

    def __str__(self) -> str:
        return f"{self.hash}:{self.count}"
