"""The step that the scheduler is planning: it fills a draft, sequence by sequence, and turns it into a StepPlan."""

from dataclasses import dataclass, field

from engine.core.batch import PageUpdate, PooledChunk, RowInit, ScheduledSeq
from engine.core.sequence import Sequence


@dataclass(slots=True)
class StepDraft:
    """`budget`: the tokens that are left to assign."""

    budget: int
    items: list[ScheduledSeq] = field(default_factory=list)
    seqs: list[Sequence] = field(default_factory=list)   # parallel to `items`
    row_inits: list[RowInit] = field(default_factory=list)
    page_updates: list[PageUpdate] = field(default_factory=list)
    pooled: dict[int, PooledChunk] = field(default_factory=dict)
    mixed: bool = False      # some sequences have more than one token
    preempted: bool = False  # some sequence was preempted

    def put_singles_first(self) -> None:
        """Sort sequences with one token before chunks: kernels and graphs of mixed steps require this order."""
        order = sorted(range(len(self.items)), key=lambda i: self.items[i].num_tokens > 1)
        self.items = [self.items[i] for i in order]
        self.seqs = [self.seqs[i] for i in order]
