"""EngineCore: the scheduler, a runner, and the steps in flight between them.

    depth 1 (sync)      plan 1 | run 1 | read 1 | plan 2 | run 2 | read 2
    depth 2 (overlap)   plan 1 | launch 1 | plan 2 | launch 2 | read 1 | plan 3 | launch 3 | read 2 ...

With overlap the host plans step N+1 while the device runs step N; the token that step N samples is a placeholder on the
host and already in the request table on the device.

To know which tokens step N+1 may sample, a grammar needs step N's token. It is read while the device computes:

    overlap with a grammar   plan 2 | forward 2 | read 1 | masks 2 | sample 2 | plan 3 | forward 3 | read 2 ...
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from engine.config import EngineConfig
from engine.core.batch import StepPlan, StepResult
from engine.core.grammar import Grammars, Pending, TokenMasks
from engine.core.kv.manager import KVManager
from engine.core.kv.spec import CacheMemory
from engine.core.request import EngineRequest, EngineStats, FinishReason, Refusal, StepOutput
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.errors import InvalidRequestError, log_fields

log = logging.getLogger(__name__)


class Runner(Protocol):
    """The device side. On an asynchronous device `forward` and `sample` only queue work.

    They are two calls because work may come between them: a grammar's token masks, verification of a draft, another
    rank's logits. A step is sampled before the next one's `forward`.
    """

    def forward(self, plan: StepPlan, /) -> Any:
        """Start a step: compute the hidden states of the tokens that sample."""

    def sample(self, forwarded: Any, masks: TokenMasks | None = None, /) -> Any:
        """Start the rest of the step that `forward` returned."""

    def collect(self, sampled: Any, /) -> StepResult:
        """Wait for the step that `sample` returned."""
        ...


class EngineCore:
    """One model, ready to run. Not thread-safe: one thread adds, aborts and steps.

    >>> core.add_request(EngineRequest("r1", [1, 2, 3], SamplingParams(max_tokens=8)))
    >>> while core.has_work():
    ...     for output in core.step():
    ...         print(output.request_id, output.new_token_ids, output.finish_reason)
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        memory: CacheMemory,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        depth: int = 1,
        max_itl: float = 0.0,  # seconds
        grammars: Grammars | None = None,
        description: dict[str, Any] | None = None,
    ) -> None:
        if memory.slabs_for(max_model_len, max_num_batched_tokens) > memory.num_slabs:
            raise ValueError(f"{memory} cannot hold one sequence of {max_model_len} tokens")
        self.config = config
        self.runner = runner
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.kv = KVManager(
            memory, step_tokens=max_num_batched_tokens, enable_prefix_caching=config.enable_prefix_caching
        )
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=config.enable_chunked_prefill,
            policy=config.scheduling_policy,
            max_itl=max_itl,
        )
        self.depth = depth
        # Called with the ids of requests that went back to the queue and of those that left it, before the step that
        # computes them starts.
        self.on_moved: Callable[[list[str], list[str]], None] | None = None
        self._grammars = grammars
        self._compiling: dict[str, tuple[Sequence, Pending]] = {}  # queued once the grammar is compiled
        self._in_flight: deque[tuple[StepPlan, Any, float]] = deque()  # (plan, what `sample` returned, launch time)
        self._pending: list[StepOutput] = []   # aborts since the last step
        self._order = 0
        self._description = description or {}
        self._stats = EngineStats(pages_total=self.kv.pool.capacity)

    # -- requests -------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request; raises InvalidRequestError if it can never run here."""
        self._verify(request)
        if not request.arrival_time:
            request.arrival_time = time.monotonic()
        seed = request.params.seed
        if seed is None:
            base = self.config.seed
            seed = int.from_bytes(os.urandom(8)) if base is None else base * 0x9E3779B97F4A7C15 + self._order
        seq = Sequence.from_request(
            request,
            max_model_len=self.max_model_len,
            eos_ids=self.eos_token_ids,
            seed=seed & (2**64 - 1),
            order=self._order,
        )
        self._order += 1
        if request.params.grammar is None or self._grammars is None:
            self.scheduler.add(seq)
        else:
            self._compiling[seq.request_id] = seq, self._grammars.begin(request.params.grammar)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests now. Unknown ids are ignored: the request may have ended while the abort was on its way."""
        for request_id in request_ids:
            seq = self.scheduler.seqs.get(request_id)
            if seq is not None:
                self.scheduler.finish(seq, FinishReason.ABORT)
                self._pending.append(StepOutput(request_id, finish_reason=FinishReason.ABORT, times=seq.times))
            elif (compiling := self._compiling.pop(request_id, None)) is not None:  # others may wait for the grammar
                self._pending.append(
                    StepOutput(request_id, finish_reason=FinishReason.ABORT, times=compiling[0].times))

    def has_work(self) -> bool:
        return bool(self.scheduler.seqs or self._in_flight or self._pending or self._compiling)

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Launch the next step, read the oldest one; returns new tokens and ended requests."""
        outputs, self._pending = self._pending, []
        if self._compiling:
            outputs += self._queue_compiled()
        plan = self.scheduler.schedule()
        if plan is not None:
            if plan.row_inits or self.scheduler.preempted:
                self._tell_moved(plan)
            try:
                self._launch(plan, outputs)
            except Exception as error:
                while self._in_flight:  # steps launched earlier are not affected: finish them first
                    outputs += self._collect_oldest()
                return outputs + self._fail([plan], error)
        if self._in_flight and (plan is None or len(self._in_flight) >= self.depth):
            outputs += self._collect_oldest()
        return outputs

    def stats(self) -> EngineStats:
        stats, pool = self._stats, self.kv.pool
        stats.num_running = len(self.scheduler.running)
        stats.num_waiting = len(self.scheduler.waiting) + len(self._compiling)
        stats.kv_usage = self.kv.usage
        stats.pages_in_use = round(stats.kv_usage * pool.capacity)
        if self.kv.slots is not None:
            stats.slots_total, stats.slots_in_use = self.kv.slots.capacity, self.kv.slots.num_in_use
        stats.prefix_queries = self.kv.prefix_queries
        stats.prefix_hits = self.kv.prefix_hits
        stats.num_preemptions = self.scheduler.num_preemptions
        stats.prompt_tokens = self.scheduler.num_prompt_tokens
        stats.generation_tokens = self.scheduler.num_generated_tokens
        return stats

    def info(self) -> dict[str, Any]:
        """What the gateway needs to know: names, limits, sizes."""
        return {
            "model_names": self.config.served_model_name or [str(self.config.model)],
            "max_model_len": self.max_model_len,
            "vocab_size": self.vocab_size,
            "eos_token_ids": sorted(self.eos_token_ids),
            "num_pages": self.kv.pool.capacity,
            "page_size": self.kv.page_size,
            "max_num_seqs": self.max_num_seqs,
            "scheduling_policy": self.config.scheduling_policy,
            "grammars": self._grammars is not None,
            **self._description,
        }

    def reset_prefix_cache(self) -> None:
        self.kv.reset_prefix_cache()

    def check(self) -> None:
        """Raise AssertionError if an invariant of pages, rows or queues is broken (used by tests, and when idle)."""
        self.scheduler.check()
        if not self.has_work():
            assert not any(pool.num_in_use for pool in self.kv.arena.pools), "an idle engine holds pages"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _verify(self, request: EngineRequest) -> None:
        prompt = request.prompt_token_ids
        if request.request_id in self.scheduler.seqs or request.request_id in self._compiling:
            raise InvalidRequestError(f"A request with id {request.request_id!r} is already running.", "request_id")
        if not prompt:
            raise InvalidRequestError("The prompt is empty: at least one token is needed.", "prompt")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise InvalidRequestError(
                f"Token ids must lie between 0 and {self.vocab_size - 1}, the model's vocabulary.", "prompt"
            )
        if request.pooling is not None and len(prompt) > self.max_model_len:
            raise InvalidRequestError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, the input holds "
                f"{len(prompt)} tokens (context_length_exceeded).",
                "input",
                "context_length_exceeded",
            )
        if request.pooling is None and len(prompt) + 1 > self.max_model_len:
            raise InvalidRequestError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, the prompt holds "
                f"{len(prompt)} tokens and at least one is needed for the answer (context_length_exceeded).",
                "prompt",
                "context_length_exceeded",
            )
        params = request.params
        if params.grammar is not None and self._grammars is None:
            raise InvalidRequestError("This engine has no tokenizer, so answers cannot follow a grammar.", "grammar")
        out_of_range = [t for t in (*params.logit_bias, *params.stop_token_ids, *params.bad_token_ids)
                        if not 0 <= t < self.vocab_size]
        if out_of_range:
            raise InvalidRequestError(
                f"Token id {out_of_range[0]} is not in the vocabulary of {self.vocab_size} tokens.",
                "logit_bias" if out_of_range[0] in params.logit_bias else "stop_token_ids",
            )

    def _tell_moved(self, plan: StepPlan) -> None:
        rows = {init.row for init in plan.row_inits}
        back, self.scheduler.preempted = self.scheduler.preempted, []
        if self.on_moved is not None:
            self.on_moved(back, [seq.request_id for seq in plan.seqs if seq.row in rows])

    def _queue_compiled(self) -> list[StepOutput]:
        """Queue the sequences whose grammars are ready, in order of their arrival."""
        outputs = []
        for request_id, (seq, pending) in list(self._compiling.items()):
            try:
                seq.matcher = pending.poll()
            except InvalidRequestError as error:
                outputs.append(StepOutput(
                    request_id, finish_reason=FinishReason.ERROR, times=seq.times,
                    refusal=Refusal(str(error.message), error.param, error.code)))
            else:
                if seq.matcher is None:
                    continue
                self.scheduler.add(seq)
                outputs.append(StepOutput(request_id))
            del self._compiling[request_id]
        return outputs

    def _launch(self, plan: StepPlan, outputs: list[StepOutput]) -> None:
        launched = time.monotonic()
        forwarded = self.runner.forward(plan)
        under = self.scheduler.with_grammar(plan)
        if not under:
            self._in_flight.append((plan, self.runner.sample(forwarded), launched))
            return
        self._in_flight.append((plan, None, launched))  # if an earlier step fails, this one fails with it
        while len(self._in_flight) > 1:
            outputs += self._collect_oldest()
        if self._in_flight:
            self._in_flight.clear()
            masks = self._masks(plan, outputs)
            self._in_flight.append((plan, self.runner.sample(forwarded, masks), launched))

    def _masks(self, plan: StepPlan, outputs: list[StepOutput]) -> TokenMasks | None:
        """The tokens that the grammars of the step's sequences allow; all their tokens so far are known. A sequence
        whose grammar takes too much work ends here."""
        under = self.scheduler.with_grammar(plan)
        if not under or self._grammars is None:
            return None
        masks = self._grammars.masks([place for place, _, _ in under], [matcher for _, _, matcher in under])
        for _, seq, matcher in under:
            if matcher.error:
                outputs.append(self.scheduler.refuse(
                    seq, f"The answer's grammar takes too much work at this point: {matcher.error}"))
        return masks

    def _collect_oldest(self) -> list[StepOutput]:
        plan, handle, launched = self._in_flight.popleft()
        try:
            result = self.runner.collect(handle)
        except Exception as error:
            behind = [p for p, _, _ in self._in_flight]  # they read what the failed step should have written
            self._in_flight.clear()
            return self._fail([plan, *behind], error)
        self._stats.steps += 1
        now = time.monotonic()
        self.scheduler.pace.observe(plan, now - max(launched, self._stats.last_step_time))
        self._stats.last_step_time = now
        return self.scheduler.update(plan, result)

    def _fail(self, plans: list[StepPlan], error: Exception) -> list[StepOutput]:
        """End the requests of the failed step and of the steps launched after it; all others continue."""
        log.exception("step %d failed", plans[0].step_id, exc_info=error, extra=log_fields(error))
        self._stats.step_failures += 1
        return self.scheduler.fail(plans, f"{type(error).__name__}: {error}"[:500])
