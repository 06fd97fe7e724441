"""Log-probabilities of the model's own distribution: before bias, penalties, temperature and filters.

(vLLM's default, ``raw_logprobs``.)
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.core.request import TokenLogprobs
from engine.worker.sample.blocks import block_max
from engine.worker.sample.filters import best_blocks, mass_of_rows, over_threshold

_CHUNK = 4_000_000  # logits at a time: bounds the temporary memory of long prompts


@dataclass(frozen=True, slots=True)
class LogprobsTensors:
    """Log-probabilities of N rows of a batch."""

    rows: Tensor         # int64 [N]: which rows of the logits these are
    token_ids: Tensor    # int64 [N]: the tokens that were chosen or given
    logprobs: Tensor     # float32 [N]
    ranks: Tensor        # int64 [N]: 1 + how many tokens are strictly more likely
    num_top: Tensor      # int64 [N]: how many alternatives the row asked for, at most K
    top_ids: Tensor      # int64 [N, K], best first, of equal ones the lower id
    top_logprobs: Tensor  # float32 [N, K]

    def unpack(self) -> list[TokenLogprobs]:
        """One entry a row, in the order of `rows`."""
        columns = zip(
            self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), self.num_top.tolist(),
            self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True,
        )  # fmt: skip
        return [
            TokenLogprobs(token, logprob, rank, list(zip(ids[:n], values[:n], strict=True)))
            for token, logprob, rank, n, ids, values in columns
        ]


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: Tensor, rows: Tensor | None = None) -> LogprobsTensors:
    """Log-probabilities of `token_ids` [N] under `logits` [N, V] with the best `num_top` [N] alternatives.

    Rows that hold NaN or +inf, or nothing but -inf, get NaN, rank 0 and no meaningful alternatives.
    """
    n, vocab = logits.shape
    k = min(int(num_top.max()) if n else 0, vocab)
    step = max(1, _CHUNK // vocab)
    parts = [_chunk(logits[i : i + step].float().contiguous(), token_ids[i : i + step], k) for i in range(0, n, step)]
    if not parts:
        parts = [(torch.empty(0), token_ids, torch.empty(0, k, dtype=torch.int64), torch.empty(0, k))]
    logprobs, ranks, top_ids, top_logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    rows = torch.arange(n) if rows is None else rows
    return LogprobsTensors(rows, token_ids, logprobs, ranks, num_top.clamp(max=vocab), top_ids, top_logprobs)


def prompt_logprobs(logits: Tensor, target_ids: Tensor, k: int) -> LogprobsTensors:
    """As `gather_logprobs`, k alternatives each, for a prompt: row i of `logits` [T, V] predicts `target_ids[i]`."""
    return gather_logprobs(logits, target_ids.to(torch.int64), torch.full((len(target_ids),), k))


def _chunk(z: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    maxima = block_max(z)
    top = maxima.amax(-1, keepdim=True)
    bad = ~top.isfinite()
    if bad.any():
        z = z.masked_fill(bad, 0)
        maxima, top = maxima.masked_fill(bad, 0), top.masked_fill(bad, 0)
    # log-softmax with a sum that does not depend on the number of rows
    log_mass = torch.from_numpy(np.log(mass_of_rows(z, top)))[:, None]
    base = (top.double() + log_mass).float().masked_fill_(bad, torch.nan)
    chosen = z.gather(1, token_ids[:, None])
    ranks = (z > chosen).sum(-1).add_(1).masked_fill_(bad[:, 0], 0)
    top_ids = torch.empty(len(z), k, dtype=torch.int64)
    top_values = torch.empty(len(z), k)
    if k:
        logits, tops = z.numpy(), maxima.numpy()
        blocks = tops.shape[1]
        least = best_blocks(tops, np.full(len(z), k)) if k <= blocks else np.partition(logits, -k, axis=-1)[:, -k]
        for rows, ids, listed in over_threshold(logits, least):
            order = np.argsort(-listed, axis=-1, kind="stable")[:, :k]
            top_ids[rows] = torch.from_numpy(np.take_along_axis(ids, order, 1))
            top_values[rows] = torch.from_numpy(np.take_along_axis(listed, order, 1))
    return (chosen - base).squeeze(1), ranks, top_ids, top_values - base
