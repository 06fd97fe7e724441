"""From logits to tokens: one call a step for all requests of the step.

The order is vLLM's, so that the same parameters mean the same thing:

    raw logits ─► log-probabilities (if asked for)
      │ logit_bias, bad_token_ids, stop tokens before min_tokens, tokens that a grammar forbids
      │ repetition, frequency, presence penalties
      ├─► temperature 0: argmax, of equal logits the lowest id
      │ temperature ─► min_p ─► top_k ─► top_p
      └─► Gumbel noise keyed by (seed, position, token) ─► argmax

A row's result depends on its own logits, parameters and known tokens alone, bit for bit: never on the batch, the row
number or the order. Logits are float32 inside. This is the CPU's sampler: NumPy works in place on the tensors' memory,
and looks for the few candidates among all logits in a seventh of torch's time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.core.grammar import TokenMasks
from engine.core.params import SamplingParams
from engine.worker.sample import rng
from engine.worker.sample.blocks import argmax, block_max
from engine.worker.sample.filters import Limits, candidates
from engine.worker.sample.logprobs import LogprobsTensors, gather_logprobs
from engine.worker.sample.params import ParamTable
from engine.worker.sample.penalties import apply_frequency_presence, apply_repetition, token_places
from engine.worker.sample.race import GumbelRace


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What one step sampled."""

    token_ids: Tensor  # int64 [B]
    logprobs: LogprobsTensors | None = None  # of the rows that asked
    # Rows of the batch without a usable distribution (NaN, +inf, or every token masked): their requests must fail.
    # Their entries of `token_ids` mean nothing; other rows are not touched by them.
    bad_rows: list[int] = field(default_factory=list)


class Sampler:
    """Samples a token for each row of a step. Row 0 is for padding: greedy, never reported as bad."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(f"this sampler works on the CPU, not on {device}")
        self.vocab_size = vocab_size
        self.params = ParamTable(num_rows, vocab_size)
        self.race = GumbelRace(vocab_size, device)

    def add(self, row: int, params: SamplingParams, seed: int, prompt_len: int, stop_ids: Sequence[int]) -> None:
        """Write a request's parameters into its state `row`.

        `seed` is any 64-bit number; `stop_ids` are the tokens that may not be sampled before `min_tokens` (end and stop
        tokens). Raises InvalidRequestError if the parameters name a token outside the vocabulary.
        """
        self.params.set(row, params, seed, prompt_len, stop_ids)

    def remove(self, row: int) -> None:
        """Free `row`."""
        self.params.clear(row)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, rows: Sequence[int], positions: Sequence[int], token_ids: Tensor,
        masks: TokenMasks | None = None,
    ) -> SampleResult:
        """Sample one token for each row of `logits` [B, V] (float32, bf16 or fp16; may be overwritten).

        `rows` [B] are the state rows, `positions` [B] the indices at which the sampled tokens will stand: so many
        tokens of `token_ids` int32 [num_rows, max_len] are known in that row, prompt then output.
        """
        row = np.asarray(rows, dtype=np.int64)
        position = np.asarray(positions, dtype=np.int64)
        z = logits.to(torch.float32).contiguous()
        maxima = block_max(z)
        bad = ~maxima.amax(-1).isfinite().numpy()
        asked = np.flatnonzero((self.params.num_logprobs[row] >= 0) & ~bad)
        raw = z[torch.from_numpy(asked)] if len(asked) else None

        if bad.any():
            _blank(z, maxima, bad)
        if self._edit(z, row, position, token_ids, masks):
            maxima = block_max(z)
            worse = ~maxima.amax(-1).isfinite().numpy()
            if worse.any():
                _blank(z, maxima, worse)
                bad |= worse

        temperature = self.params.temperature[row]
        drawn = np.flatnonzero(temperature > 0)
        if len(drawn) < len(row):
            chosen = argmax(z, maxima)
            if len(drawn):
                part = torch.from_numpy(drawn)
                chosen[part] = self._draw(z[part], row[drawn], position[drawn])
        else:
            chosen = self._draw(z, row, position)

        logprobs = None
        if raw is not None:
            which = torch.from_numpy(asked)
            wanted = torch.from_numpy(self.params.num_logprobs[row[asked]])
            logprobs = gather_logprobs(raw, chosen[which], wanted, which)
        return SampleResult(chosen, logprobs, np.flatnonzero(bad & (row != 0)).tolist())

    def _edit(
        self, z: Tensor, row: np.ndarray, position: np.ndarray, token_ids: Tensor, masks: TokenMasks | None = None
    ) -> bool:
        """Apply bias, bans, penalties and masks in place; True if there were any."""
        p, vocab = self.params, self.vocab_size
        flat = z.view(-1).numpy()
        changed = False
        early = position - p.prompt_len[row] < p.min_tokens[row]
        for i in np.flatnonzero(p.edited[row] & (row != 0)):
            if bias := p.bias.get(row[i]):
                flat[i * vocab + bias[0]] += bias[1]
            if (banned := p.banned.get(row[i])) is not None:
                flat[i * vocab + banned] = -np.inf
            changed = True
        if early.any():
            held = np.flatnonzero(early)
            flat[np.concatenate([i * vocab + p.stops[row[i]] for i in held])] = -np.inf
            changed = True

        known = token_ids.numpy()
        repetition = np.flatnonzero(p.repetition[row] != 1)
        if len(repetition):
            some = row[repetition]
            where, owner = token_places(known, some, repetition, np.zeros_like(some), position[repetition], vocab)
            apply_repetition(flat, where, p.repetition[some[owner]])
            changed = True
        counted = np.flatnonzero((p.frequency[row] != 0) | (p.presence[row] != 0))
        if len(counted):
            some = row[counted]
            where, _ = token_places(known, some, counted, p.prompt_len[some], position[counted], vocab)
            apply_frequency_presence(flat, vocab, where, p.frequency[row], p.presence[row])
            changed = True
        if masks is not None:
            for i, words in zip(masks.places, masks.words, strict=True):
                allowed = np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab)
                flat[i * vocab : (i + 1) * vocab][allowed == 0] = -np.inf
            changed = True
        return changed

    def _draw(self, z: Tensor, row: np.ndarray, position: np.ndarray) -> Tensor:
        """int64 [R]: sample from logits `z` [R, V], which it overwrites, for rows with a temperature."""
        p = self.params
        z /= torch.from_numpy(p.temperature[row])[:, None]
        k0, k1 = rng.row_keys(torch.from_numpy(p.seed[row]), torch.from_numpy(position))
        limits = Limits(p.top_k[row], p.top_p[row], p.log_min_p[row])
        filtered = (limits.top_k > 0) | (limits.top_p < 1) | (limits.log_min_p > -np.inf)
        if not filtered.any():
            return self.race.sample(z, k0, k1)
        chosen = torch.empty(len(row), dtype=torch.int64)
        if not filtered.all():
            part = torch.from_numpy(np.flatnonzero(~filtered))
            chosen[part] = self.race.sample(z[part], k0[part], k1[part])
        some = np.flatnonzero(filtered)
        part = torch.from_numpy(some)
        if len(some) < len(row):
            z = z[part]
        for found in candidates(z, block_max(z), limits[some]):
            among = part[torch.from_numpy(found.rows)]
            ids, keep = torch.from_numpy(found.ids), torch.from_numpy(found.keep)
            chosen[among] = self.race.sample_among(torch.from_numpy(found.z), ids, keep, k0[among], k1[among])
        return chosen


def _blank(z: Tensor, maxima: Tensor, bad: np.ndarray) -> None:
    """Give rows without a usable distribution harmless logits, so that they cannot disturb the code after."""
    rows = torch.from_numpy(np.flatnonzero(bad))
    z[rows] = 0
    maxima[rows] = 0
