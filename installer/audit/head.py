"""A head of the audit log: what anchors keep outside of it."""

from dataclasses import dataclass

GENESIS = "0" * 64  # the hash before the first record


@dataclass(frozen=True, slots=True)
class Head:
    """What tells one state of the log from every other: its number of records, and the hash of the last."""

    count: int
    hash: str  # GENESIS for an empty log; of an anchor that a person wrote down, the first digits

    def __str__(self) -> str:
        return f"{self.hash}:{self.count}"
