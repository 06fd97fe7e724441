"""From the hidden states of a step on a GPU to its tokens on the host, which waits only in `collect`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.core.batch import StepPlan, StepResult
from engine.core.grammar import TokenMasks
from engine.core.request import TokenLogprobs
from engine.models.base import CausalLM
from engine.worker.pooling import unpack
from engine.worker.results import prompt_parts, step_result
from engine.worker.sample.device import DeviceSampler, HostLogprobs

_RING = 4  # more than the steps in flight


@dataclass(frozen=True, slots=True)
class ForwardedStep:
    """A step between `forward` and `sample`. The next step's `forward` overwrites `hidden` and `columns`."""

    plan: StepPlan
    rows: np.ndarray
    positions: np.ndarray         # where the sampled tokens will stand
    hidden: torch.Tensor          # hidden states of the tokens that sample
    columns: torch.Tensor         # their sampling parameters
    sampling: np.ndarray          # which sequences sample
    whole: torch.Tensor | None    # hidden states of all tokens, if prompt log-probabilities are wanted
    pooled: torch.Tensor | None   # embeddings of the prompts that end in this step


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A step in flight: what to read once `done` has passed."""

    plan: StepPlan
    done: torch.cuda.Event
    tokens: torch.Tensor | None                       # pinned int32, one for each sampling sequence
    count: int
    logprobs: HostLogprobs | None
    prompt_logprobs: dict[int, list[HostLogprobs]]    # index in plan.seqs -> those of the prompt tokens it covers
    pooled: torch.Tensor | None                       # pinned float32, one row for each prompt that ends


class StepSampler:
    """`token_ids`: the request table, into which sampled tokens are written. `prompt_len`: of the sequence in each row.
    """

    def __init__(
        self, model: CausalLM, sampler: DeviceSampler, token_ids: torch.Tensor, prompt_len: Sequence[int]
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.token_ids = token_ids
        self.prompt_len = prompt_len
        num_rows, device = len(token_ids), token_ids.device
        self._out = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._pinned = [torch.zeros(num_rows, dtype=torch.int32, pin_memory=True) for _ in range(_RING)]
        self._events = [torch.cuda.Event() for _ in range(_RING)]
        self._turn = 0

    def sample(self, forwarded: ForwardedStep, masks: TokenMasks | None = None) -> SampledStep:
        """Sample, and start copying the results to the host."""
        self._turn = (self._turn + 1) % _RING
        pinned, done = self._pinned[self._turn], self._events[self._turn]
        count = len(forwarded.sampling)
        logprobs = None
        if count:
            plan = self.sampler.plan(forwarded.rows, forwarded.positions, masks)
            logits = self.model.logits(forwarded.hidden)
            # The kernels write directly to host memory: a copy of so few bytes would take longer.
            out = pinned[:count] if plan.logprobs is None else self._out[:count]
            logprobs = self.sampler.sample(logits, forwarded.columns, self.token_ids, out, plan)
            if logprobs is not None:
                pinned[:count].copy_(out, non_blocking=True)
                logprobs.begin_copy()
        whole = forwarded.whole
        prompts = {} if whole is None else self._prompt_logprobs(forwarded.plan, whole)
        embeddings = None
        if forwarded.pooled is not None:
            embeddings = torch.empty(forwarded.pooled.shape, dtype=torch.float32, pin_memory=True)
            embeddings.copy_(forwarded.pooled, non_blocking=True)
        done.record()
        return SampledStep(forwarded.plan, done, pinned if count else None, count, logprobs, prompts, embeddings)

    def collect(self, handle: SampledStep) -> StepResult:
        handle.done.synchronize()
        tokens = [] if handle.tokens is None else handle.tokens[: handle.count].tolist()
        logprobs: dict[int, TokenLogprobs] = {}
        if handle.logprobs is not None:
            logprobs = dict(zip(handle.logprobs.rows, handle.logprobs.unpack(), strict=True))
        embeddings = unpack(handle.plan, handle.pooled)
        return step_result(handle.plan, tokens, logprobs, handle.prompt_logprobs, embeddings)

    def _prompt_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, list[HostLogprobs]]:
        """For each sequence that asked: logprobs of the prompt tokens that follow each token of its chunk."""
        found: dict[int, list[HostLogprobs]] = {}
        for i, parts in prompt_parts(plan, self.prompt_len).items():
            found[i] = []
            for part in parts:
                logits, targets = self.model.logits(hidden[part.hidden]), self.token_ids[part.row, part.targets]
                found[i].append(self.sampler.prompt_logprobs(logits, targets, part.num_top))
                found[i][-1].begin_copy()
        return found
