"""Runs steps: plan in, sampled tokens out. Owns the model, the KV cache, the request table and the sampler."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.core.batch import StepPlan, StepResult
from engine.core.grammar import TokenMasks
from engine.core.kv.pages import NULL_PAGE
from engine.core.kv.spec import CacheSpec
from engine.core.request import TokenLogprobs
from engine.kernels.attention.reference import AttentionBatch
from engine.kernels.runtime.cpu_threads import gemms_on, num_threads
from engine.layers.context import ForwardContext, forward_context
from engine.layers.linear import Linear
from engine.layers.repeatable import repeatable
from engine.models.base import CausalLM
from engine.worker.cache import Cache
from engine.worker.inputs import StepInputs, build_inputs
from engine.worker.parts import LEAST_OVERLAP, SideBySide, cut, fewest_tokens, supports
from engine.worker.pause import Pause
from engine.worker.pooling import Pooler, needs_all_states, unpack
from engine.worker.results import prompt_parts, step_result
from engine.worker.sample.logprobs import LogprobsTensors, prompt_logprobs
from engine.worker.sample.sampler import Sampler, SampleResult
from engine.worker.state import RequestTable
from engine.worker.team import Team

_SMALL_STEP_TOKENS = 256   # up to this, waking CPU threads costs more than they save (kernels/runtime/cpu_threads.py)


@dataclass(frozen=True, slots=True)
class ForwardedPart:
    """A step, or one of the two parts in which it ran."""

    plan: StepPlan
    inputs: StepInputs
    sampling: torch.Tensor       # hidden states of the tokens that sample
    whole: torch.Tensor | None = None   # those of all tokens, if prompt log-probabilities are wanted
    pooled: torch.Tensor | None = None  # embeddings of the prompts that end in this step


@dataclass(frozen=True, slots=True)
class ForwardedStep:
    """A step between `forward` and `sample`."""

    plan: StepPlan
    parts: list[ForwardedPart]   # in the order of the plan's sequences
    by_team: bool = False        # on all CPU threads (team.py)


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A sampled step whose results are still on the device."""

    plan: StepPlan
    sampled: list[SampleResult]  # of its parts that sample, in the order of the plan's sequences
    prompt_logprobs: dict[int, list[LogprobsTensors]]  # index in plan.seqs -> those of the prompt tokens it covers
    pooled: torch.Tensor | None


class Runner:
    """One device, one model, in plain torch. `forward` and `sample` queue work, `collect` waits for the results."""

    def __init__(
        self, model: CausalLM, spec: CacheSpec, *, num_rows: int, max_model_len: int, device: torch.device,
        repeats: bool = False,
    ) -> None:  # fmt: skip
        """`repeats`: every request must give the same result again, as if it had a seed."""
        self.model = model
        self.device = device
        self.vocab_size = model.config.vocab_size
        self.table = RequestTable(num_rows, max_model_len, spec.page_size, device, len(spec.groups))
        self.sampler = Sampler(num_rows, self.vocab_size, device)
        self.pooler = Pooler()
        self.prompt_len = [0] * num_rows
        self.seeded = [False] * num_rows
        self.repeats = repeats
        self.has_state = bool(spec.slot_bytes)
        self.packed = any(isinstance(m, Linear) and m.packed_bytes for m in model.modules())
        self.side_by_side = SideBySide() if supports(model, spec) else None
        self.fewest_tokens = fewest_tokens(model)
        self.pause = Pause(LEAST_OVERLAP)
        self.team = Team()

    def bind_cache(self, cache: Cache) -> None:
        """Give the layers their memory."""
        self.cache = cache
        cache.bind(self.model.cache_modules())

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> ForwardedStep:
        for slab in plan.moved_slabs:
            self.cache.clear_slab(slab)  # the old bytes, read as numbers of another type, might be NaN
        for init in plan.row_inits:
            self.table.admit(init)
            self.sampler.add(init.row, init.params, init.seed, init.prompt_len, init.stop_ids)
            self.prompt_len[init.row] = init.prompt_len
            self.seeded[init.row] = init.params.seed is not None
            if init.state_from is not None:
                self.cache.copy_state(init.state_from, init.slot)
        for update in plan.page_updates:
            if update.pages[0] == NULL_PAGE:
                old = self.table.block_tables[update.group][update.row, update.start :][: len(update.pages)]
                self._scrub(update.group, old)
            self.table.add_pages(update)
        if self._for_team(plan):
            with self.team.observed():
                return ForwardedStep(plan, [self._forward(plan, by_team=True)], by_team=True)
        parts = self._parts_of(plan)
        if len(parts) == 1:
            return ForwardedStep(plan, [self._forward(plan)])
        assert self.side_by_side is not None
        forwarded, timing = self.side_by_side.run(self._forward, parts)
        self.pause.observe(timing)
        return ForwardedStep(plan, forwarded)

    def _for_team(self, plan: StepPlan) -> bool:
        """A step that must repeat stays off the team: with more threads the last bits of a sum may differ."""
        return not self._repeats(plan) and torch.get_num_threads() > 1 and self.team.allows_step()

    def _parts_of(self, plan: StepPlan) -> list[StepPlan]:
        if self.side_by_side is None or torch.get_num_threads() == 1:
            return [plan]
        parts = cut(plan, self.table, self.fewest_tokens)
        return parts if len(parts) > 1 and self.pause.allows() else [plan]

    def _forward(self, plan: StepPlan, *, by_team: bool = False) -> ForwardedPart:
        with self._computing(plan, by_team=by_team):
            inputs = build_inputs(plan, self.table, has_state=self.has_state)
            whole = any(seq.prompt_logprobs is not None for seq in plan.seqs) or needs_all_states(plan)
            hidden = self._hidden_states(inputs) if whole else self._last_hidden_states(plan, inputs)
            for source, target in plan.state_saves:
                self.cache.copy_state(source, target)
            last = hidden.index_select(0, inputs.last_index) if whole else hidden
            sampling, pooled = last, None
            if plan.pooled:
                count = len(inputs.sample_rows)
                sampling = last[:count]
                pooled = self.pooler.pool(plan, last[count : len(inputs.last_rows)], hidden if whole else None)
            return ForwardedPart(plan, inputs, sampling, hidden if whole else None, pooled)

    @torch.inference_mode()
    def sample(self, forwarded: ForwardedStep, masks: TokenMasks | None = None) -> SampledStep:
        plan, parts = forwarded.plan, forwarded.parts
        if len(parts) == 1:
            (part,) = parts
            with self._computing(plan, by_team=forwarded.by_team):
                sampled = [self._sample(part.inputs, part.sampling, masks)]
                prompts = {} if part.whole is None else self._prompt_logprobs(plan, part.whole)
            pooled = part.pooled
        else:
            assert self.side_by_side is not None
            pairs = list(zip(parts, _masks_of(masks, parts), strict=True))
            sampled, _ = self.side_by_side.run(self._sample_part, pairs)
            prompts, pooled = {}, None
        for part, result in zip(parts, sampled, strict=True):
            if result is not None:
                self.table.append(part.inputs.sample_rows, part.inputs.sample_positions, result.token_ids)
        return SampledStep(plan, [result for result in sampled if result is not None], prompts, pooled)

    def _sample_part(self, part: tuple[ForwardedPart, TokenMasks | None]) -> SampleResult | None:
        forwarded, masks = part
        with self._computing(forwarded.plan):
            return self._sample(forwarded.inputs, forwarded.sampling, masks)

    @torch.inference_mode()
    def collect(self, handle: SampledStep) -> StepResult:
        tokens: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        for sampled in handle.sampled:
            first = len(tokens)
            tokens += sampled.token_ids.tolist()
            for bad in sampled.bad_rows:
                tokens[first + bad] = -1
            if (found := sampled.logprobs) is not None:
                rows = (first + row for row in found.rows.tolist())
                logprobs |= zip(rows, found.unpack(), strict=True)
        embeddings = unpack(handle.plan, handle.pooled)
        sampling = (s.row for s in handle.plan.seqs if s.samples)
        failed = [row for row, token in zip(sampling, tokens, strict=True) if token < 0]
        failed += [handle.plan.seqs[place].row for place, vector in embeddings.items() if vector is None]
        for row in failed:
            for group, table in enumerate(self.table.block_tables):
                self._scrub(group, table[row])
        return step_result(handle.plan, tokens, logprobs, handle.prompt_logprobs, embeddings)

    @contextmanager
    def _computing(self, plan: StepPlan, *, by_team: bool = False) -> Iterator[None]:
        repeats = self._repeats(plan)
        if by_team:
            gemms, threads = "team", torch.get_num_threads()
        elif self.team.exists and not repeats:  # other processes want the cores
            gemms, threads = "alone", 1
        else:
            small = self.packed and plan.num_tokens <= _SMALL_STEP_TOKENS
            gemms, threads = None, 1 if small else torch.get_num_threads()
        with num_threads(threads), gemms_on(gemms), repeatable(repeats):
            yield

    def _repeats(self, plan: StepPlan) -> bool:
        return self.repeats or any(self.seeded[seq.row] for seq in plan.seqs)

    def _hidden_states(
        self,
        inputs: StepInputs,
        last: torch.Tensor | None = None,
        last_only: Callable[[], ForwardContext] | None = None,
    ) -> torch.Tensor:
        """Hidden states of all tokens, or only of `last`."""
        first, *more = inputs.groups
        with forward_context(ForwardContext(inputs.positions, *first, more, inputs.state, last, last_only)):
            return self.model(inputs.token_ids)

    def _last_hidden_states(self, plan: StepPlan, inputs: StepInputs) -> torch.Tensor:
        """Hidden states of the tokens that sample, then of those that make an embedding. If none does, those of the
        first sequence's last token: something must go through the last layer."""
        index, rows = inputs.last_index, inputs.last_rows
        count, tokens = len(rows), len(inputs.token_ids)
        if count == tokens:
            hidden = self._hidden_states(inputs)
            return hidden.index_select(0, index) if plan.pooled else hidden
        if not count:
            index, rows = torch.tensor([plan.seqs[0].num_tokens - 1]), [plan.seqs[0].row]

        def last_only() -> ForwardContext:
            """Each of them is the newest token of its sequence."""
            positions = inputs.positions[index]
            segments = list(range(len(rows))), positions.tolist(), [1] * len(rows), rows
            first, *more = (
                (slots[index], AttentionBatch.build(*segments, table, self.table.page_size))
                for (slots, _), table in zip(inputs.groups, self.table.block_tables, strict=True)
            )
            return ForwardContext(positions, *first, more)

        return self._hidden_states(inputs, index, last_only)

    def _scrub(self, group: int, pages: torch.Tensor) -> None:
        """Replace NaN and infinity in the pages of a sequence that may have failed, before the pages are reused: zero
        times NaN is NaN, so even masked slots would corrupt their next owner. Finite values are not changed, so shared
        prefixes stay valid.
        """
        pages = pages.unique().long()
        for layer in self.cache.spec.groups[group].layers:
            for cache in self.cache.kv[layer]:
                cache[pages] = torch.nan_to_num(cache[pages], 0.0, 0.0, 0.0)

    def _sample(
        self, inputs: StepInputs, hidden: torch.Tensor, masks: TokenMasks | None
    ) -> SampleResult | None:
        """`hidden`: hidden states of the tokens that sample."""
        if not inputs.sample_rows:
            return None
        logits = self.model.logits(hidden)
        return self.sampler.sample(logits, inputs.sample_rows, inputs.sample_positions, self.table.token_ids, masks)

    def _prompt_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, list[LogprobsTensors]]:
        """For each sequence that asked: logprobs of the prompt tokens that follow each token of its chunk."""
        return {
            i: [
                prompt_logprobs(
                    self.model.logits(hidden[part.hidden]), self.table.token_ids[part.row, part.targets], part.num_top
                )
                for part in parts
            ]
            for i, parts in prompt_parts(plan, self.prompt_len).items()
        }


def _masks_of(masks: TokenMasks | None, parts: Sequence[ForwardedPart]) -> list[TokenMasks | None]:
    """Each part's masks, with places among those that sample in it."""
    if masks is None:
        return [None] * len(parts)
    found: list[TokenMasks | None] = []
    first = 0
    for part in parts:
        count = len(part.inputs.sample_rows)
        mine = [i for i, place in enumerate(masks.places) if first <= place < first + count]
        found.append(TokenMasks([masks.places[i] - first for i in mine], masks.words[mine]) if mine else None)
        first += count
    return found
