"""The data of one step: what the scheduler planned, and what the worker returns. Immutable.

    Scheduler.schedule() -> StepPlan -> Runner.forward() -> .sample() -> .collect() -> StepResult -> Scheduler.update()
"""

from dataclasses import dataclass, field

from engine.core.params import SamplingParams
from engine.core.request import Pooling, TokenLogprobs


@dataclass(frozen=True, slots=True)
class RowInit:
    """A sequence that enters a row of the worker's request table (admission, or resumption after preemption)."""

    row: int
    token_ids: list[int]      # all known tokens: prompt, and after preemption also the output so far
    prompt_len: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]  # masked until min_tokens were generated
    slot: int = 0              # the slot of its recurrent state
    state_from: int | None = None  # the slot of the checkpoint to start from, copied before the step


@dataclass(frozen=True, slots=True)
class PageUpdate:
    """New entries of one row's block table: block_table[row, start : start + len(pages)] = pages.

    Pages out of the group's window are the null page.
    """

    row: int
    start: int
    pages: list[int]
    group: int = 0             # group of layers; each group has its own block table


@dataclass(frozen=True, slots=True)
class ScheduledSeq:
    """`num_tokens` tokens of one sequence, from position `start` on, computed in this step."""

    request_id: str
    uid: int                   # tells a request from a later one that reuses its id
    row: int
    start: int                 # = num_computed_tokens before the step
    num_tokens: int
    samples: bool              # the chunk reaches the last known token, so a new token is sampled
    prompt_logprobs: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """Tokens of a sequence that gets an embedding instead of an answer. `ends`: they include its last token."""

    pooling: Pooling
    ends: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    step_id: int
    seqs: list[ScheduledSeq]
    row_inits: list[RowInit] = field(default_factory=list)
    page_updates: list[PageUpdate] = field(default_factory=list)
    state_saves: list[tuple[int, int]] = field(default_factory=list)  # (slot, slot it is copied to after the step)
    moved_slabs: list[int] = field(default_factory=list)  # they changed owner and still hold the old data
    pooled: dict[int, PooledChunk] = field(default_factory=dict)  # by row; these sequences sample nothing

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.seqs)

    @property
    def pooled_ends(self) -> list[int]:
        """Indices in `seqs` of the sequences whose embedding is complete with this step."""
        if not self.pooled:
            return []
        return [i for i, seq in enumerate(self.seqs) if seq.row in self.pooled and self.pooled[seq.row].ends]


@dataclass(frozen=True, slots=True)
class SeqResult:
    """One scheduled sequence's answer. `token_id` is None when the chunk did not reach the end of the known tokens."""

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # for the prompt tokens after `start`, in order
    error: str | None = None                            # this sequence alone failed (NaN logits)
    embedding: bytes | None = None                      # float32 [H], if the sequence's pooled chunk `ends`


@dataclass(frozen=True, slots=True)
class StepResult:
    step_id: int
    seqs: list[SeqResult]      # parallel to StepPlan.seqs
