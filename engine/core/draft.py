"""The step that the scheduler is planning: it fills a draft, sequence by sequence, and makes a StepPlan of it."""

from dataclasses import dataclass, field

from engine.core.batch import PageUpdate, PooledChunk, RowInit, ScheduledSeq
from engine.core.sequence import Sequence


@dataclass(slots=True)
class StepDraft:
    """`budget`: tokens that are left."""

    budget: int
    items: list[ScheduledSeq] = field(default_factory=list)
    seqs: list[Sequence] = field(default_factory=list)   # parallel to `items`
    row_inits: list[RowInit] = field(default_factory=list)
    page_updates: list[PageUpdate] = field(default_factory=list)
    pooled: dict[int, PooledChunk] = field(default_factory=dict)
    mixed: bool = False      # some have more than one token
    preempted: bool = False  # somebody was

    def put_singles_first(self) -> None:
        """Sequences with one token first, then chunks: kernels and graphs of mixed steps require this order."""
        order = sorted(range(len(self.items)), key=lambda i: self.items[i].num_tokens > 1)
        self.items = [self.items[i] for i in order]
        self.seqs = [self.seqs[i] for i in order]
