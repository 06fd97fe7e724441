"""The scheduler. Its one rule: each request has computed tokens that chase its known tokens, and a step divides a token
budget among the requests.

    1. running sequences with one token to compute (decode) get it in every step, if they have pages
    2. running sequences with more (prompts, recomputation after preemption) share the rest of the budget
    3. waiting sequences are admitted while budget, rows and pages last

So a prompt never delays a running stream by more than one step of `max_num_batched_tokens` tokens (of fewer, if a
latency target is set: `pace`).

A sequence that lacks pages does not stop the others. After `_PATIENCE` such steps it goes first, and the sequence that
would be served last is preempted for it: that one gives up its pages and recomputes later (usually from the prefix
cache). Only later sequences are preempted, and the first one never is, so it always finishes.

Nothing here touches the device.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from engine.core.batch import PooledChunk, RowInit, ScheduledSeq, SeqResult, StepPlan, StepResult
from engine.core.draft import StepDraft
from engine.core.grammar import Matcher
from engine.core.kv.manager import KVManager
from engine.core.kv.prefix_search import Prefix
from engine.core.pace import PromptPace
from engine.core.request import FinishReason, Refusal, StepOutput
from engine.core.sequence import NO_ROW, Sequence, Status
from engine.core.waiting import WaitingQueue

# Steps in which a sequence may lack pages before others are preempted for it. Waiting longer costs more tokens a step
# than it saves in recomputation (measurements: docs/performance.md, "Scheduling").
_PATIENCE = 1


class Scheduler:
    """Owns every live sequence, the rows of the request table and, through `kv`, the pages and state slots."""

    def __init__(
        self,
        kv: KVManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool = True,
        policy: str = "fcfs",
        max_itl: float = 0.0,
    ) -> None:
        self.kv = kv
        self._page_size = kv.page_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.policy = policy
        self.pace = PromptPace(max_itl if enable_chunked_prefill else 0.0)  # no limit for prompts that cannot be split
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue(policy)
        self.seqs: dict[str, Sequence] = {}
        self._free_rows = list(range(max_num_seqs, 0, -1))  # row 0 is the padding row
        self._deferred_rows: list[tuple[int, int]] = []     # (step, row): free once the step has completed
        self._next_step = 0
        self._completed_step = -1
        self._flights: dict[int, list[Sequence]] = {}       # step -> its sequences, in the order of the plan
        self._stalled: dict[Sequence, int] = {}             # sequence -> steps for which it has lacked pages
        self._blocked: _Blocked | None = None               # the first waiting sequence, once it did not fit
        self.preempted: list[str] = []                      # request ids that the loop has not reported yet
        self.num_with_grammar = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = 0       # prompt tokens of sequences that have produced their first token
        self.num_generated_tokens = 0

    # -- requests -------------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        self.seqs[seq.request_id] = seq
        self.num_with_grammar += seq.matcher is not None
        self.waiting.push(seq)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence at any time; its row and pages are freed after flight."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._release(seq)
        elif seq.status is Status.WAITING:
            self.waiting.forget_one()
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        seq.times.finished = time.monotonic()
        del self.seqs[seq.request_id]
        self.num_with_grammar -= seq.matcher is not None

    # -- a step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed now."""
        if self.policy == "priority":
            self.running.sort(key=lambda seq: seq.order)
        plan = self._plan(_PATIENCE)
        if plan is None and self._stalled and not self.kv.num_deferred:
            plan = self._plan(0)  # no sequence can continue: waiting would not help
        return plan

    def _plan(self, patience: int) -> StepPlan | None:
        draft = StepDraft(self.max_num_batched_tokens)
        stalled: dict[Sequence, int] = {}
        served = self._serve_overdue(draft, stalled, patience) if self._stalled else None
        keep_pages = bool(stalled)  # released pages go to the first overdue sequence

        chunks = []
        singles = []
        for seq in self.running:
            count = seq.num_tokens_to_compute
            if count == 1:
                singles.append(seq)
            elif count > 1:
                chunks.append(seq)
        if served is not None:
            singles, chunks = ([s for s in seqs if s not in served] for seqs in (singles, chunks))
        page_size = self._page_size
        before = len(draft.items)
        for seq in singles[: draft.budget]:
            room = len(seq.tables[0]) * page_size  # most steps of most sequences need no more
            if seq.num_computed_tokens >= room and (keep_pages or not self.kv.grow(seq, 1)):
                stalled[seq] = self._stalled.get(seq, 0) + 1
                continue
            self._commit(draft, seq, 1, True)
        draft.budget = self.pace.tokens(len(draft.items) - before, draft.budget)
        for seq in chunks:
            if not draft.budget:
                break
            num_tokens = self._chunk(seq, draft.budget)
            room = len(seq.tables[0]) * page_size
            if seq.num_computed_tokens + num_tokens > room and (keep_pages or not self.kv.grow(seq, num_tokens)):
                stalled[seq] = self._stalled.get(seq, 0) + 1
                continue
            self._commit(draft, seq, num_tokens, num_tokens == seq.num_tokens_to_compute)
        self._stalled = stalled
        if self.waiting and not stalled and not draft.preempted:
            self._admit_waiting(draft, sum(map(self.kv.missing_pages, chunks)))

        if not draft.items:
            return None
        if draft.mixed:
            draft.put_singles_first()
        saves, moved = self.kv.take_state_saves(), self.kv.take_moved_slabs()
        plan = StepPlan(
            self._next_step, draft.items, draft.row_inits, draft.page_updates, saves, moved, draft.pooled
        )
        self._flights[self._next_step] = draft.seqs
        self._next_step += 1
        return plan

    def with_grammar(self, plan: StepPlan) -> list[tuple[int, Sequence, Matcher]]:
        """The live sequences of a step in flight that sample under a grammar, with their indices among all that sample.
        """
        if not self.num_with_grammar:
            return []
        sampling = (s for s, item in zip(self._flights[plan.step_id], plan.seqs, strict=True) if item.samples)
        return [(place, seq, seq.matcher) for place, seq in enumerate(sampling)
                if seq.matcher is not None and seq.status is not Status.FINISHED]

    def update(self, plan: StepPlan, result: StepResult) -> list[StepOutput]:
        """Apply the result of a step: append tokens, end sequences, free what was in flight."""
        self._complete(plan.step_id)
        outputs = []
        for seq, item, answer in zip(self._flights.pop(plan.step_id), plan.seqs, result.seqs, strict=True):
            if answer.error is not None:
                outputs += self._fail_one(seq, item, answer.error)
            elif seq.status is not Status.FINISHED:  # it may have ended while the step was in flight
                output = self._take(seq, item, answer)
                if output:
                    outputs.append(output)
        return outputs

    def refuse(self, seq: Sequence, why: str) -> StepOutput:
        """End a sequence because of an error of its own."""
        self.finish(seq, FinishReason.ERROR)
        return StepOutput(
            seq.request_id, finish_reason=FinishReason.ERROR, refusal=Refusal(why, "grammar"), times=seq.times)

    def fail(self, plans: Iterable[StepPlan], error: str) -> list[StepOutput]:
        """A step raised: end the sequences of this step and of the steps launched after it, and no others.

        Pages enter the prefix cache when a step is planned, so some of them were never computed. All pages of these
        sequences leave the cache, even if a sequence has ended since. Any sequence that found such a page was admitted
        by one of these steps, so it ends here, too.
        """
        outputs = []
        for plan in plans:
            self._complete(plan.step_id)
            for seq in self._flights.pop(plan.step_id):
                self.kv.forget(seq)
                if seq.status is not Status.FINISHED:
                    self.finish(seq, FinishReason.ERROR)
                    outputs.append(_last_output(seq, error))
            self.kv.arena.moved += plan.moved_slabs  # the failed step may not have cleared them
        return outputs

    def waste(self) -> tuple[int, int]:
        return self.kv.waste(self.running)

    def check(self) -> None:
        """Invariants that hold between any two calls; tests call it after every step."""
        self.kv.check(self.running)
        rows = [s.row for s in self.running] + self._free_rows + [row for _, row in self._deferred_rows]
        assert sorted(rows) == list(range(1, len(rows) + 1)), "a row is lost or owned twice"
        assert len(self.running) + len(self.waiting) == len(self.seqs), "a sequence is lost"
        assert len(list(self.waiting)) == len(self.waiting), "the waiting queue lost count"
        assert all(step > self._completed_step for step in self._flights), "a step that was read is still in flight"
        assert self._stalled.keys() <= set(self.running), "a stalled sequence is not running"
        self._check_blocked()
        for seq in self.running:
            assert seq.status is Status.RUNNING
            assert 0 <= seq.num_computed_tokens <= len(seq.token_ids) + seq.num_placeholders
            assert seq.num_pages_sent <= len(seq.pages)
        for seq in self.waiting:
            assert seq.row == NO_ROW
            assert not seq.pages

    def _check_blocked(self) -> None:
        """Check that a sequence which was skipped without a prefix search would not have been admitted after one.

        (Not checked with several kinds of pages: the pages that a lost hit frees can be worth more than the hit.)
        """
        seq = self.waiting.peek()
        promised = sum(map(self.kv.missing_pages, self.running))
        if seq is None or len(self.kv.arena.pools) > 1 or not self._still_blocked(seq, StepDraft(0), promised):
            return
        hit = self.kv.find_prefix(seq)
        assert self.kv.lacking(seq, hit, promised=promised, reserve=bool(self.running)), "a waiting sequence fits"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _serve_overdue(self, draft: StepDraft, stalled: dict[Sequence, int], patience: int) -> set[Sequence]:
        """Serve the sequences that have lacked pages for too long, preempting later ones for them, last first. The
        first that must still wait (for pages in flight) goes into `stalled`."""
        overdue = [seq for seq in self.running if self._stalled.get(seq, -1) >= patience]
        for seq in overdue:
            if seq.status is not Status.RUNNING or not draft.budget:
                continue
            others = len(self.running) - 1  # leave a token for each that may decode
            num_tokens = self._chunk(seq, max(1, draft.budget - others))
            while not self.kv.grow(seq, num_tokens):
                if self.kv.num_deferred:  # pages will be free when the steps in flight complete
                    stalled[seq] = self._stalled[seq]
                    return set(overdue)
                victim = self.running[-1]
                self._preempt(victim)
                draft.preempted = True
                if victim is seq:
                    if not self.running:  # a sequence alone always fits: cached pages of other kinds are in its way
                        self.kv.reset_prefix_cache()
                    break
            else:
                self._commit(draft, seq, num_tokens, num_tokens == seq.num_tokens_to_compute)
        return set(overdue)

    def _chunk(self, seq: Sequence, budget: int) -> int:
        """How many tokens of `seq` a step may compute: up to the next checkpoint of its state."""
        num_tokens = min(seq.num_tokens_to_compute, budget)
        if num_tokens > 1 and seq.checkpoints:
            num_tokens = min(num_tokens, seq.checkpoints[0] - seq.num_computed_tokens)
        return num_tokens

    def _admit_waiting(self, draft: StepDraft, promised: int) -> None:
        """Admit sequences while budget, rows and pages last. `promised`: pages that running prompts still need."""
        while draft.budget and self._free_rows and (seq := self.waiting.peek()):
            if seq.num_placeholders:
                break  # it was preempted with a token still on the device: wait for the step in flight
            if self._still_blocked(seq, draft, promised):
                break
            hit = self.kv.find_prefix(seq)
            num_tokens = len(seq.token_ids) - hit.num_tokens
            lacking = 0
            if num_tokens <= draft.budget or self.enable_chunked_prefill or not draft.items:
                # The whole prompt must fit, not only this chunk: half-admitted prompts would preempt each other.
                lacking = self.kv.lacking(seq, hit, promised=promised, reserve=bool(self.running))
                if not lacking:
                    self._admit(seq, hit, draft.row_inits)
                    num_tokens = self._chunk(seq, draft.budget)
                    grown = self.kv.grow(seq, num_tokens)
                    assert grown, "there is room for it"
                    self._commit(draft, seq, num_tokens, num_tokens == seq.num_tokens_to_compute)
                    promised += self.kv.missing_pages(seq)
                    continue
                if not self.running and not self.kv.num_deferred and self.kv.reset_prefix_cache():
                    continue
            self._blocked = _Blocked(seq, len(seq.token_ids), num_tokens, lacking, promised, self.kv.arena.num_released)
            self.kv.watch(seq, hit)
            break

    def _still_blocked(self, seq: Sequence, draft: StepDraft, promised: int) -> bool:
        """Whether `seq` certainly cannot be admitted now, even without searching for its prefix."""
        blocked = self._blocked
        if blocked is None or blocked.seq is not seq or blocked.length != len(seq.token_ids):
            return False
        if self.kv.arena.named_watched or not self.running:
            return False
        if draft.items and not self.enable_chunked_prefill and blocked.num_tokens > draft.budget:
            return True
        gained = self.kv.arena.num_released - blocked.num_released + max(0, blocked.promised - promised)
        return gained < blocked.lacking

    def _admit(self, seq: Sequence, hit: Prefix, row_inits: list[RowInit]) -> None:
        self.waiting.pop()
        self.kv.admit(seq, hit, self._next_step)
        seq.status = Status.RUNNING
        seq.row = self._free_rows.pop()
        self.running.append(seq)
        if not seq.times.scheduled:
            seq.times.scheduled = time.monotonic()
            seq.num_cached_tokens = seq.num_computed_tokens
        row_inits.append(
            RowInit(
                row=seq.row,
                token_ids=list(seq.token_ids),
                prompt_len=seq.prompt_len,
                params=seq.params,
                seed=seq.seed,
                # A grammar decides when the answer may end; together with min_tokens, no token might be left.
                stop_ids=tuple(seq.stop_ids | seq.eos_ids) if seq.params.min_tokens and seq.matcher is None else (),
                slot=seq.slot,
                state_from=hit.checkpoint,
            )
        )

    def _commit(self, draft: StepDraft, seq: Sequence, num_tokens: int, ends: bool) -> None:
        """Add `num_tokens` of `seq` to the step. `ends`: they reach the last known token, so a token is sampled."""
        start = seq.num_computed_tokens
        params = seq.params
        samples = ends
        if seq.pooling is not None:
            draft.pooled[seq.row] = PooledChunk(seq.pooling, ends)
            samples = False
        seq.num_computed_tokens = end = start + num_tokens
        seq.num_placeholders += ends
        seq.last_step = self._next_step
        if len(seq.tables[0]) > seq.num_pages_sent:
            self.kv.describe_changes(seq, draft.page_updates)
        if end // self._page_size > seq.num_registered_pages:
            self.kv.register_full_pages(seq)
        if not ends and seq.checkpoints and end == seq.checkpoints[0]:
            self.kv.save_state(seq)
        prompt_logprobs = params.prompt_logprobs
        if prompt_logprobs is not None and (start >= seq.prompt_len or seq.num_output_tokens):
            prompt_logprobs = None
        draft.budget -= num_tokens
        draft.mixed |= num_tokens > 1
        draft.seqs.append(seq)
        draft.items.append(
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

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release(seq)
        seq.status = Status.WAITING
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        seq.times.preemptions += 1
        self.num_preemptions += 1
        self.preempted.append(seq.request_id)
        self.waiting.put_back(seq)

    def _release(self, seq: Sequence) -> None:
        self.kv.release(seq)
        self._stalled.pop(seq, None)
        if seq.last_step > self._completed_step:
            self._deferred_rows.append((seq.last_step, seq.row))
        else:
            self._free_rows.append(seq.row)
        seq.row = NO_ROW

    def _complete(self, step_id: int) -> None:
        self._completed_step = max(self._completed_step, step_id)
        self.kv.on_step_complete(self._completed_step)
        if self._deferred_rows:
            self._free_rows += [row for step, row in self._deferred_rows if step <= step_id]
            self._deferred_rows = [(step, row) for step, row in self._deferred_rows if step > step_id]

    def _fail_one(self, seq: Sequence, item: ScheduledSeq, error: str) -> list[StepOutput]:
        """Only this sequence failed (NaN logits): end it, and drop the pages that it computed in this step from the
        prefix cache."""
        filled = slice(item.start // self._page_size, (item.start + item.num_tokens) // self._page_size)
        sharing = self.kv.holders(seq.page_hashes[filled], self.running)
        self.kv.forget(seq)
        for other in sharing:
            if other is not seq:
                self._preempt(other)  # it recomputes them itself
        if seq.status is Status.FINISHED:
            return []
        self.finish(seq, FinishReason.ERROR)
        return [_last_output(seq, error)]

    def _take(self, seq: Sequence, item: ScheduledSeq, answer: SeqResult) -> StepOutput | None:
        if answer.prompt_logprobs is not None:
            # Index by position: a preempted sequence computes its prompt again, perhaps before an earlier result has
            # been read.
            known = seq.prompt_logprobs = seq.prompt_logprobs or [None]
            assert item.start < len(known), "prompt logprobs have a gap"
            known += answer.prompt_logprobs[len(known) - 1 - item.start :]
        if not item.samples:
            return None if answer.embedding is None else self._take_embedding(seq, answer.embedding)
        assert answer.token_id is not None
        seq.num_placeholders -= 1
        seq.token_ids.append(answer.token_id)
        self.num_generated_tokens += 1
        output = StepOutput(seq.request_id, [answer.token_id])
        if seq.matcher is not None:
            seq.matcher.accept(answer.token_id)
            output.complete = seq.matcher.finished and not seq.ends_at(answer.token_id)
        if answer.logprobs is not None:
            output.logprobs = [answer.logprobs]
        if seq.num_output_tokens == 1:
            self.num_prompt_tokens += seq.prompt_len
            seq.times.first_token = time.monotonic()
            output.num_cached_tokens = seq.num_cached_tokens
            if seq.params.prompt_logprobs is not None:
                output.prompt_logprobs = list(seq.prompt_logprobs)
        reason = seq.finish_reason_for(answer.token_id)
        if reason:
            self.finish(seq, reason)
            output.finish_reason = reason
            output.times = seq.times
            if reason is FinishReason.STOP and answer.token_id in seq.stop_ids and answer.token_id not in seq.eos_ids:
                output.stop_reason = answer.token_id
        return output

    def _take_embedding(self, seq: Sequence, embedding: bytes) -> StepOutput:
        self.num_prompt_tokens += seq.prompt_len
        seq.times.first_token = time.monotonic()
        seq.num_placeholders = 0
        self.finish(seq, FinishReason.STOP)
        return StepOutput(seq.request_id, finish_reason=FinishReason.STOP, num_cached_tokens=seq.num_cached_tokens,
                          times=seq.times, embedding=embedding)


@dataclass(frozen=True, slots=True)
class _Blocked:
    """Why the first waiting sequence was not admitted. It holds no pages, so admitting it takes a new search."""

    seq: Sequence
    length: int        # known tokens
    num_tokens: int    # how many of these are not cached
    lacking: int       # at least this many pages must become available first (0: pages are not the reason)
    promised: int
    num_released: int  # the arena's counter at that time


def _last_output(seq: Sequence, error: str) -> StepOutput:
    return StepOutput(seq.request_id, finish_reason=FinishReason.ERROR, error=error, times=seq.times)
