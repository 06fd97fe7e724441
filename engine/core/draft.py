"""The step that the scheduler is planning: it fills a draft, sequence by sequence, and turns it into a StepPlan."""

from dataclasses import dataclass, field

from engine.core.batch import PageUpdate, PooledChunk, RowInit, ScheduledSeq, StepPlan
from engine.core.kv.manager import KVManager
from engine.core.sequence import Sequence


@dataclass(slots=True)
class StepDraft:
    """`budget`: the tokens that are left to assign."""

    step_id: int
    budget: int
    kv: KVManager
    items: list[ScheduledSeq] = field(default_factory=list)
    seqs: list[Sequence] = field(default_factory=list)   # parallel to `items`
    row_inits: list[RowInit] = field(default_factory=list)
    page_updates: list[PageUpdate] = field(default_factory=list)
    pooled: dict[int, PooledChunk] = field(default_factory=dict)
    stalled: dict[Sequence, int] = field(default_factory=dict)  # sequences without pages -> for how many steps
    mixed: bool = False      # some sequences have more than one token
    preempted: bool = False  # some sequence was preempted
    keep_pages: bool = False  # pages that become free are for an overdue sequence

    def start_row(self, seq: Sequence, state_from: int | None) -> None:
        """Have the worker fill the row of a sequence that was just admitted. `state_from`: the checkpoint that its
        recurrent state begins with."""
        self.row_inits.append(
            RowInit(
                row=seq.row,
                token_ids=list(seq.token_ids),
                prompt_len=seq.prompt_len,
                params=seq.params,
                seed=seq.seed,
                # A grammar decides when the answer may end; together with min_tokens, no token might be left.
                stop_ids=tuple(seq.stop_ids | seq.eos_ids) if seq.params.min_tokens and seq.matcher is None else (),
                slot=seq.slot,
                state_from=state_from,
            )
        )

    def add(self, seq: Sequence, num_tokens: int, *, ends: bool) -> None:
        """Add `num_tokens` of `seq`, which has pages for them. `ends`: they reach the last known token, so a token is
        sampled."""
        start = seq.num_computed_tokens
        params = seq.params
        samples = ends
        if seq.pooling is not None:
            self.pooled[seq.row] = PooledChunk(seq.pooling, ends)
            samples = False
        seq.num_computed_tokens = end = start + num_tokens
        seq.num_placeholders += ends
        seq.last_step = self.step_id
        if len(seq.tables[0]) > seq.num_pages_sent:
            self.kv.describe_changes(seq, self.page_updates)
        if end // self.kv.page_size > seq.num_registered_pages:
            self.kv.register_full_pages(seq)
        if not ends and seq.checkpoints and end == seq.checkpoints[0]:
            self.kv.save_state(seq)
        prompt_logprobs = params.prompt_logprobs
        if prompt_logprobs is not None and (start >= seq.prompt_len or seq.num_output_tokens):
            prompt_logprobs = None
        self.budget -= num_tokens
        self.mixed |= num_tokens > 1
        self.seqs.append(seq)
        self.items.append(
            ScheduledSeq(
                request_id=seq.request_id,
                uid=seq.arrival_order,
                row=seq.row,
                start=start,
                num_tokens=num_tokens,
                samples=samples,
                prompt_logprobs=prompt_logprobs,
                logprobs=params.logprobs if samples else None,
            )
        )

    def plan(self) -> StepPlan:
        if self.mixed:
            self._put_singles_first()
        saves, moved = self.kv.take_state_saves(), self.kv.take_moved_slabs()
        return StepPlan(self.step_id, self.items, self.row_inits, self.page_updates, saves, moved, self.pooled)

    def _put_singles_first(self) -> None:
        """Sort sequences with one token before chunks: kernels and graphs of mixed steps require this order."""
        order = sorted(range(len(self.items)), key=lambda i: self.items[i].num_tokens > 1)
        self.items = [self.items[i] for i in order]
        self.seqs = [self.seqs[i] for i in order]
