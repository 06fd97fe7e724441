"""The one rule: every request has computed tokens chasing known tokens; a step gives some of them a budget.

Running sequences come first, in order; then waiting ones are admitted while budget, rows and pages last. When pages run
out, the sequence that would be served last is preempted: it gives up its pages and later recomputes (usually from the
prefix cache). Nothing here touches the device.
"""

import time
from collections.abc import Iterable

from engine.core.batch import PageUpdate, RowInit, ScheduledSeq, SeqResult, StepPlan, StepResult
from engine.core.kv.manager import KVManager
from engine.core.kv.prefix_search import Prefix
from engine.core.policy import WaitingQueue, order_of
from engine.core.request import FinishReason, StepOutput
from engine.core.sequence import NO_ROW, Sequence, Status


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
    ) -> None:
        self.kv = kv
        self._page_size = kv.page_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.policy = policy
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue(policy)
        self.seqs: dict[str, Sequence] = {}
        self._free_rows = list(range(max_num_seqs, 0, -1))  # row 0 is the trash row
        self._deferred_rows: list[tuple[int, int]] = []     # (step, row): free once the step has completed
        self._next_step = 0
        self._completed_step = -1
        self.num_preemptions = 0
        self.num_prompt_tokens = 0       # of sequences that have produced their first token
        self.num_generated_tokens = 0

    # -- requests -------------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        self.seqs[seq.request_id] = seq
        self.waiting.push(seq)

    def finish(self, seq: Sequence, reason: FinishReason, *, forget: bool = False) -> None:
        """End a sequence at any time; what it owns is freed after flight. `forget`: do not trust its pages."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._let_go(seq, forget=forget)
        elif seq.status is Status.WAITING:
            self.waiting.forget_one()
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        seq.times.finished = time.monotonic()
        del self.seqs[seq.request_id]

    # -- a step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed now."""
        budget = self.max_num_batched_tokens
        scheduled: list[ScheduledSeq] = []
        row_inits: list[RowInit] = []
        page_updates: list[PageUpdate] = []
        preempted = False

        if self.policy == "priority":
            self.running.sort(key=lambda s: order_of(s, self.policy))
        i = 0
        while i < len(self.running) and budget > 0:
            seq = self.running[i]
            num_tokens = min(seq.num_tokens_to_compute, budget)
            if num_tokens > 0:
                if num_tokens > 1 and seq.checkpoints:
                    num_tokens = min(num_tokens, seq.checkpoints[0] - seq.num_computed_tokens)
                room = len(seq.tables[0]) * self._page_size  # most steps of most sequences need no more
                lacks_pages = seq.num_computed_tokens + num_tokens > room and not self.kv.grow(seq, num_tokens)
                while lacks_pages and not self.kv.num_deferred:
                    victim = self.running[-1]
                    self._preempt(victim)
                    preempted = True
                    if victim is seq:
                        if not self.running:  # alone, any sequence fits: cached pages of other kinds are in its way
                            self.kv.reset_prefix_cache()
                        break
                    lacks_pages = not self.kv.grow(seq, num_tokens)
                if lacks_pages:  # preempted itself, or pages are on their way back from flight: wait for them
                    preempted = True
                    break
                scheduled.append(self._commit(seq, num_tokens, page_updates))
                budget -= num_tokens
            i += 1

        while budget > 0 and not preempted and self._free_rows and (seq := self.waiting.peek()):
            if seq.num_placeholders:
                break  # preempted with a token still on the device; its value arrives with the step in flight
            hit = self.kv.find_prefix(seq)
            num_tokens = len(seq.token_ids) - hit.num_tokens
            if num_tokens > budget and not self.enable_chunked_prefill and scheduled:
                break
            # The whole prompt must fit, not only this chunk: half-admitted prompts would preempt each other.
            if not self.kv.can_admit(seq, hit, reserve=bool(self.running)):
                if not self.running and not self.kv.num_deferred and self.kv.reset_prefix_cache():
                    continue
                break
            self._admit(seq, hit, row_inits)
            num_tokens = min(num_tokens, budget)
            if seq.checkpoints:
                num_tokens = min(num_tokens, seq.checkpoints[0] - seq.num_computed_tokens)
            grown = self.kv.grow(seq, num_tokens)
            assert grown, "can_admit promised these pages"
            scheduled.append(self._commit(seq, num_tokens, page_updates))
            budget -= num_tokens

        if not scheduled:
            return None
        saves, moved = self.kv.take_state_saves(), self.kv.take_moved_extents()
        plan = StepPlan(self._next_step, scheduled, row_inits, page_updates, saves, moved)
        self._next_step += 1
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[StepOutput]:
        """Take in what a step computed: append tokens, end sequences, free what was in flight."""
        self._complete(plan.step_id)
        outputs = []
        for item, answer in zip(plan.seqs, result.seqs, strict=True):
            seq = self.seqs.get(item.request_id)
            if seq is None or seq.arrival_order != item.uid:
                continue  # ended while the step was in flight
            output = self._take(seq, item, answer)
            if output:
                outputs.append(output)
        return outputs

    def fail(self, plans: Iterable[StepPlan], error: str) -> list[StepOutput]:
        """A step raised: end every sequence it (and the steps launched behind it) touched, and nobody else."""
        outputs = []
        for plan in plans:
            self._complete(plan.step_id)
            for item in plan.seqs:
                seq = self.seqs.get(item.request_id)
                if seq is not None:
                    self.finish(seq, FinishReason.ERROR, forget=True)
                    outputs.append(_last_output(seq, error))
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
        for seq in self.running:
            assert seq.status is Status.RUNNING
            assert 0 <= seq.num_computed_tokens <= len(seq.token_ids) + seq.num_placeholders
            assert seq.num_pages_sent <= len(seq.pages)
        for seq in self.waiting:
            assert seq.row == NO_ROW
            assert not seq.pages

    # -- inside ---------------------------------------------------------------------------------------------------

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
                stop_ids=tuple(seq.stop_ids | seq.eos_ids) if seq.params.min_tokens else (),
                slot=seq.slot,
                state_from=hit.checkpoint,
            )
        )

    def _commit(self, seq: Sequence, num_tokens: int, page_updates: list[PageUpdate]) -> ScheduledSeq:
        """Count `num_tokens` as computed by the step being planned."""
        start = seq.num_computed_tokens
        samples = num_tokens == seq.num_tokens_to_compute
        seq.num_computed_tokens += num_tokens
        seq.num_placeholders += samples
        seq.last_step = self._next_step
        if len(seq.tables[0]) > seq.num_pages_sent:
            self.kv.describe_changes(seq, page_updates)
        if seq.num_computed_tokens // self._page_size > seq.num_registered_pages:
            self.kv.register_full_pages(seq)
        if not samples and seq.checkpoints and seq.num_computed_tokens == seq.checkpoints[0]:
            self.kv.save_state(seq)
        in_prompt = start < seq.prompt_len and seq.num_output_tokens == 0
        return ScheduledSeq(
            request_id=seq.request_id,
            uid=seq.arrival_order,
            row=seq.row,
            start=start,
            num_tokens=num_tokens,
            samples=samples,
            prompt_logprobs=seq.params.prompt_logprobs if in_prompt else None,
            logprobs=seq.params.logprobs if samples else None,
        )

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._let_go(seq)
        seq.status = Status.WAITING
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        seq.prompt_logprobs.clear()
        self.num_preemptions += 1
        self.waiting.push(seq)

    def _let_go(self, seq: Sequence, *, forget: bool = False) -> None:
        self.kv.release(seq, forget=forget)
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

    def _take(self, seq: Sequence, item: ScheduledSeq, answer: SeqResult) -> StepOutput | None:
        if answer.error is not None:
            self.finish(seq, FinishReason.ERROR, forget=True)
            return _last_output(seq, answer.error)
        if answer.prompt_logprobs is not None:
            if item.start == 0:
                seq.prompt_logprobs = [None]
            seq.prompt_logprobs += answer.prompt_logprobs
        if not item.samples:
            return None
        assert answer.token_id is not None
        seq.num_placeholders -= 1
        seq.token_ids.append(answer.token_id)
        self.num_generated_tokens += 1
        output = StepOutput(seq.request_id, [answer.token_id])
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


def _last_output(seq: Sequence, error: str) -> StepOutput:
    return StepOutput(seq.request_id, finish_reason=FinishReason.ERROR, error=error, times=seq.times)
