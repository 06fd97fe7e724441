"""Gumbel-max: the token with the largest logit + noise is a sample of softmax(logits)."""

import threading

import torch
from torch import Tensor

from engine.worker.sample import rng
from engine.worker.sample.blocks import block_ids, block_max

_CHUNK = 400_000   # elements at a time: the work space stays in the CPU's cache
_SLACK = 1e-3      # covers the rounding of the bound; a few blocks too many cost nothing


class _WorkSpace(threading.local):
    """A thread's own: two parts of a step sample at once (worker/parts.py)."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.word = torch.empty(shape, dtype=torch.int32, device=device)
        self.scratch = torch.empty(shape, dtype=torch.int32, device=device)
        self.bound = torch.empty(shape, dtype=torch.float32, device=device)


class GumbelRace:
    """Samples whole rows. Owns the token table and the work space.

    Two logarithms for every token of the vocabulary would cost more than all the rest, so a cheap upper bound of
    logit + noise picks the blocks that can hold the winner, and only these get the exact noise.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.table = rng.token_table(vocab_size, device)
        self.chunk_rows = max(1, _CHUNK // vocab_size)
        self._space = _WorkSpace((self.chunk_rows, vocab_size), device)

    def sample(self, z: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
        """int64 [R] from scaled logits `z` [R, V] and `rng.row_keys`."""
        parts = [
            self._sample_chunk(z[i : i + self.chunk_rows], k0[i : i + self.chunk_rows], k1[i : i + self.chunk_rows])
            for i in range(0, len(z), self.chunk_rows)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _sample_chunk(self, z: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
        n = len(z)
        space = self._space
        scratch = space.scratch[:n]
        word = rng.words(self.table, k0, k1, space.word[:n], scratch)
        bounds = block_max(rng.add_gumbel_bound(z, word, space.bound[:n], scratch))
        rows = torch.arange(n, device=z.device)

        def exact(row: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
            ids = block_ids(block, self.vocab_size)
            row = row[:, None]
            return ids, z[row, ids] + rng.gumbel(word[row, ids])

        _, score = exact(rows, bounds.argmax(-1))
        reached = score.amax(-1, keepdim=True)
        row, block = (bounds >= reached - (_SLACK + 1e-6 * reached.abs())).nonzero(as_tuple=True)
        ids, score = exact(row, block)
        best, place = score.max(-1)
        winner = ids.gather(1, place[:, None]).squeeze(1)
        table = torch.full_like(bounds, -torch.inf)
        table[row, block] = best
        token = torch.zeros_like(bounds, dtype=torch.int64)
        token[row, block] = winner
        return token.gather(1, table.argmax(-1, keepdim=True)).squeeze(1)

    def sample_among(self, z: Tensor, ids: Tensor, keep: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
        """int64 [R]: as `sample`, but among the tokens `ids` [R, C] (ascending) that `keep`; z [R, C] are theirs."""
        score = z + rng.gumbel(rng.words(self.table[ids], k0, k1))
        place = score.masked_fill_(~keep, -torch.inf).argmax(-1, keepdim=True)
        return ids.gather(1, place).squeeze(1)


