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

from engine.core import answer
from engine.core.batch import ScheduledSeq, StepPlan, StepResult
from engine.core.draft import StepDraft
from engine.core.grammar import Matcher
from engine.core.kv.manager import KVManager
from engine.core.kv.prefix_search import Prefix
from engine.core.pace import PromptPace
from engine.core.request import FinishReason, Refusal, StepOutput
from engine.core.rows import RequestRows
from engine.core.sequence import NO_ROW, Sequence, Status
from engine.core.waiting import Blocked, WaitingQueue

# Steps in which a sequence may lack pages before others are preempted for it. Waiting longer costs more tokens a step
# than it saves in recomputation (measurements: docs/performance/scheduling.md).
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
        self.rows = RequestRows(max_num_seqs)
        self._next_step = 0
        self._flights: dict[int, list[Sequence]] = {}  # step -> its sequences, in the order of the plan
        self._stalled: dict[Sequence, int] = {}        # sequence -> steps for which it has lacked pages
        self._blocked: Blocked | None = None           # the first waiting sequence, once it did not fit
        self.preempted: list[str] = []                 # request ids that the loop has not reported yet
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
        draft = StepDraft(self._next_step, self.max_num_batched_tokens, self.kv)
        served = self._serve_overdue(draft, patience) if self._stalled else set()
        decodes, prompts = self._by_kind(served)
        self._serve_decodes(draft, decodes, prompts[0].num_computed_tokens if prompts else 0)
        self._serve_prompts(draft, prompts)
        self._stalled = draft.stalled
        if self.waiting and not draft.stalled and not draft.preempted:
            self._admit_waiting(draft, promised=sum(map(self.kv.missing_pages, prompts)))
        if not draft.items:
            return None
        plan = draft.plan()
        self._flights[plan.step_id] = draft.seqs
        self._next_step += 1
        return plan

    def _by_kind(self, served: set[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences with one token to compute, and those with more; without those that were `served`."""
        decodes, prompts = [], []
        for seq in [seq for seq in self.running if seq not in served] if served else self.running:
            count = seq.num_tokens_to_compute
            if count == 1:
                decodes.append(seq)
            elif count:
                prompts.append(seq)
        return decodes, prompts

    def _serve_decodes(self, draft: StepDraft, decodes: list[Sequence], context: int) -> None:
        """Serve each one token, and leave prompts, the first with so much context, as many as the pace allows."""
        before = len(draft.items)
        for seq in decodes[: draft.budget]:
            has_room = seq.num_computed_tokens < len(seq.tables[0]) * self._page_size  # in most steps
            if has_room or self._has_pages(draft, seq, 1):
                draft.add(seq, 1, ends=True)
        draft.budget = self.pace.tokens(len(draft.items) - before, draft.budget, context)

    def _serve_prompts(self, draft: StepDraft, prompts: list[Sequence]) -> None:
        for seq in prompts:
            if not draft.budget:
                break
            num_tokens = seq.next_chunk(draft.budget)
            if self._has_pages(draft, seq, num_tokens):
                draft.add(seq, num_tokens, ends=num_tokens == seq.num_tokens_to_compute)

    def _has_pages(self, draft: StepDraft, seq: Sequence, num_tokens: int) -> bool:
        """Whether `seq` has pages for its next `num_tokens`, or gets them now; otherwise it has stalled."""
        room = len(seq.tables[0]) * self._page_size
        if seq.num_computed_tokens + num_tokens <= room:
            return True
        if not draft.keep_pages and self.kv.grow(seq, num_tokens):
            return True
        draft.stalled[seq] = self._stalled.get(seq, 0) + 1
        return False

    def _admit_waiting(self, draft: StepDraft, promised: int) -> None:
        """Admit sequences while budget, rows and pages last. `promised`: pages that running prompts still need."""
        while draft.budget and self.rows.free and (seq := self.waiting.peek()):
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
                    self._admit(draft, seq, hit)
                    promised += self.kv.missing_pages(seq)
                    continue
                if not self.running and not self.kv.num_deferred and self.kv.reset_prefix_cache():
                    continue
                lacking = self.kv.surely_lacking(seq, hit, promised=promised, reserve=bool(self.running))
            self._blocked = Blocked(seq, len(seq.token_ids), num_tokens, lacking, promised, self.kv.arena.num_released)
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
        return blocked.still_lacks_pages(self.kv, promised)

    def _admit(self, draft: StepDraft, seq: Sequence, hit: Prefix) -> None:
        """Give it a row and the pages of its prefix, and serve its first chunk."""
        self.waiting.pop()
        self.kv.admit(seq, hit, draft.step_id)
        seq.status = Status.RUNNING
        seq.row = self.rows.take()
        self.running.append(seq)
        if not seq.times.scheduled:
            seq.times.scheduled = time.monotonic()
            seq.num_cached_tokens = seq.num_computed_tokens
        draft.start_row(seq, hit.checkpoint)
        num_tokens = seq.next_chunk(draft.budget)
        grown = self.kv.grow(seq, num_tokens)
        assert grown, "there is room for it"
        draft.add(seq, num_tokens, ends=num_tokens == seq.num_tokens_to_compute)

    # -- when pages are short -------------------------------------------------------------------------------------

    def _serve_overdue(self, draft: StepDraft, patience: int) -> set[Sequence]:
        """Serve the sequences that have lacked pages for too long, preempting later ones for them, last first. The
        first that must still wait (for pages in flight) remains stalled, and pages are kept for it. Returns them all.
        """
        overdue = [seq for seq in self.running if self._stalled.get(seq, -1) >= patience]
        for seq in overdue:
            if seq.status is not Status.RUNNING or not draft.budget:
                continue
            others = len(self.running) - 1  # leave a token for each that may decode
            num_tokens = seq.next_chunk(max(1, draft.budget - others))
            while not self.kv.grow(seq, num_tokens):
                if self.kv.num_deferred:  # pages will be free when the steps in flight complete
                    draft.stalled[seq] = self._stalled[seq]
                    draft.keep_pages = True
                    return set(overdue)
                victim = self.running[-1]
                self._preempt(victim)
                draft.preempted = True
                if victim is seq:
                    if not self.running:  # a sequence alone always fits: cached pages of other kinds are in its way
                        self.kv.reset_prefix_cache()
                    break
            else:
                draft.add(seq, num_tokens, ends=num_tokens == seq.num_tokens_to_compute)
        return set(overdue)

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

    # -- its result -----------------------------------------------------------------------------------------------

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
        for seq, item, one in zip(self._flights.pop(plan.step_id), plan.seqs, result.seqs, strict=True):
            if one.error is not None:
                outputs += self._fail_one(seq, item, one.error)
                continue
            if seq.status is Status.FINISHED:  # it ended while the step was in flight
                continue
            output = answer.take(seq, item, one)
            if output is None:
                continue
            outputs.append(output)
            self.num_generated_tokens += item.samples
            if len(seq.token_ids) <= seq.prompt_len + 1:  # the first of its answer, or its embedding
                self.num_prompt_tokens += seq.prompt_len
            if output.finish_reason:
                self.finish(seq, output.finish_reason)
        return outputs

    def _complete(self, step_id: int) -> None:
        self.rows.complete(step_id)
        self.kv.on_step_complete(self.rows.completed_step)

    def _release(self, seq: Sequence) -> None:
        self.kv.release(seq)
        self._stalled.pop(seq, None)
        self.rows.give_back(seq.row, seq.last_step)
        seq.row = NO_ROW

    # -- what failed ----------------------------------------------------------------------------------------------

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
                    outputs.append(answer.failed(seq, error))
            self.kv.arena.moved += plan.moved_slabs  # the failed step may not have cleared them
        return outputs

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
        return [answer.failed(seq, error)]

    # -- what holds between steps ---------------------------------------------------------------------------------

    def waste(self) -> tuple[int, int]:
        return self.kv.waste(self.running)

    def check(self) -> None:
        """Invariants that hold between any two calls; tests call it after every step."""
        self.kv.check(self.running)
        self.rows.check([seq.row for seq in self.running])
        assert len(self.running) + len(self.waiting) == len(self.seqs), "a sequence is lost"
        assert len(list(self.waiting)) == len(self.waiting), "the waiting queue lost count"
        assert all(step > self.rows.completed_step for step in self._flights), "a step that was read is still in flight"
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
        """Check that a sequence which was skipped without a prefix search would not have been admitted after one."""
        seq, draft = self.waiting.peek(), StepDraft(self._next_step, 0, self.kv)
        promised = sum(map(self.kv.missing_pages, self.running))
        if seq is None or not self._still_blocked(seq, draft, promised):
            return
        hit = self.kv.find_prefix(seq)
        assert self.kv.lacking(seq, hit, promised=promised, reserve=bool(self.running)), "a waiting sequence fits"
