"""Which tokens may be sampled: min-p, top-k, top-p, in this order, each on what the one before has left.

The definitions, on the scaled logits of a row:
- min-p keeps tokens of at least min_p times the probability of the best one;
- top-k keeps the k best, and all that equal the k-th (as Hugging Face and vLLM do);
- top-p keeps the shortest run of best tokens whose share of the mass left reaches p, at least one token; of equal
  tokens the lower ids come first.

Whole rows are never sorted if a short list will do: the block maxima give a threshold that the k-th largest logit
cannot be under (top-k), or above which the mass of top-p most likely lies; only tokens over it are looked at. A row
whose list proves too short is sorted whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.worker.sample.blocks import BLOCK

_PROBE = 128       # block maxima above the first threshold of top-p: its list holds at least as many tokens
_SHORT = 1024      # longest list that is padded and handled together with others

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Limits:
    """The filters of R rows. `top_k` 0, `top_p` 1 and `log_min_p` -inf mean none."""

    top_k: Ints
    top_p: Floats
    log_min_p: Floats

    def __getitem__(self, rows: Ints) -> "Limits":
        return Limits(self.top_k[rows], self.top_p[rows], self.log_min_p[rows])


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens of some rows of a batch: `rows` [R], `ids` [R, C] ascending, logits `z` [R, C], `keep` [R, C]."""

    rows: Ints
    ids: Ints
    z: Floats
    keep: Bools


def survivors(z: Floats, limits: Limits, mass: Doubles | None = None) -> tuple[Bools, Bools]:
    """Apply the filters to logits `z` [R, C], ids ascending along C, padded with -inf.

    `mass` [R] is the sum of exp(z - max) over the whole row, where `z` holds only a part of it; 0 or None where `z`
    holds all that min-p and top-k leave. Returns the mask of kept tokens and, for each row, whether `z` held enough.
    """
    desc = np.ascontiguousarray(np.sort(z, axis=-1)[:, ::-1])
    columns = desc.shape[1]
    k = np.where(limits.top_k > 0, np.minimum(limits.top_k, columns), columns)
    kth = np.take_along_axis(desc, k[:, None] - 1, 1)
    least = np.maximum(kth, desc[:, :1] + limits.log_min_p[:, None])
    count = ((desc >= least) & (desc > -np.inf)).sum(-1)
    enough = np.ones(len(z), dtype=bool)
    if (limits.top_p < 1).any():
        cumulated = np.cumsum(np.exp(desc - desc[:, :1]), axis=-1, dtype=np.float64)
        left = np.take_along_axis(cumulated, count[:, None] - 1, 1)[:, 0]
        whole = left if mass is None else np.where(mass > 0, mass, left)
        goal = np.where(limits.top_p < 1, limits.top_p * whole, np.inf)
        enough = (limits.top_p >= 1) | (left >= goal)
        count = np.minimum(count, 1 + (cumulated < goal[:, None]).sum(-1))
    last = np.take_along_axis(desc, count[:, None] - 1, 1)
    keep = z > last
    tie = z == last
    room = count - keep.sum(-1)
    keep |= tie & (np.cumsum(tie, axis=-1) <= room[:, None])
    return keep, enough


def mass_of_rows(z: Tensor, top: Tensor) -> Doubles:
    """float64 [R]: sum of exp(z - top) over each row of `z` [R, V]; `top` [R, 1] is the row's maximum.

    Blocks are summed on their own first, so that the result does not depend on how many rows there are.
    """
    terms = (z - top).exp_()
    whole = z.shape[1] // BLOCK * BLOCK
    total = terms[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1).numpy().sum(-1, dtype=np.float64)
    return total + terms[:, whole:].numpy().sum(-1, dtype=np.float64)


def over_threshold(z: Floats, least: Floats) -> Iterator[tuple[Ints, Ints, Floats]]:
    """The tokens with z ≥ least[row] as (rows [R], ids [R, C] ascending, logits [R, C] padded with -inf).

    Rows with short lists come together, each long one comes alone. Every row must have at least one such token.
    """
    vocab = z.shape[1]
    places = np.flatnonzero(z >= least[:, None])
    row, token = np.divmod(places, vocab)
    count = np.bincount(row, minlength=len(z))
    first = np.cumsum(count) - count
    short = np.flatnonzero(count <= _SHORT)
    if len(short):
        columns = np.arange(count[short].max())
        take = np.minimum(first[short, None] + columns, (first + count)[short, None] - 1)
        ids = token[take]
        logits = z.reshape(-1)[places[take]]
        logits[columns >= count[short, None]] = -np.inf
        yield short, ids, logits
    for i in np.flatnonzero(count > _SHORT):
        part = slice(first[i], first[i] + count[i])
        yield np.array([i]), token[None, part], z[i, token[part]][None]


def best_blocks(maxima: Floats, k: Ints) -> Floats:
    """[R]: the k[i]-th largest of the block maxima [R, N] of each row, a lower bound of its k-th largest logit."""
    return np.take_along_axis(np.sort(maxima, axis=-1), maxima.shape[1] - k[:, None], 1)[:, 0]


def candidates(z: Tensor, maxima: Tensor, limits: Limits) -> Iterator[Candidates]:
    """The tokens of each row of scaled logits `z` [R, V] that may be sampled; `maxima` are its block maxima.

    Every row appears in exactly one of the results. No row may hold NaN, +inf or nothing but -inf.
    """
    tops, logits = maxima.numpy(), z.numpy()
    blocks = tops.shape[1]
    only_p = (limits.top_p < 1) & (limits.top_k == 0) & (limits.log_min_p == -np.inf)
    k = np.where(only_p, min(_PROBE, blocks), limits.top_k)
    least = np.full(len(logits), -np.inf, dtype=np.float32)
    few = np.flatnonzero((k > 0) & (k <= blocks))
    least[few] = best_blocks(tops[few], k[few])
    for i in np.flatnonzero(k > blocks):
        least[i] = np.partition(logits[i], -k[i])[-k[i]]
    least = np.maximum(least, tops.max(-1) + limits.log_min_p)
    mass = np.zeros(len(logits))
    if only_p.any():
        part = torch.from_numpy(np.flatnonzero(only_p))
        some = z if len(part) == len(z) else z[part]
        mass[only_p] = mass_of_rows(some, maxima[part].amax(-1, keepdim=True))
    for rows, ids, listed in over_threshold(logits, least):
        keep, enough = survivors(listed, limits[rows], mass[rows])
        if enough.all():
            yield Candidates(rows, ids, listed, keep)
            continue
        yield Candidates(rows[enough], ids[enough], listed[enough], keep[enough])
        for i in rows[~enough]:
            one, row = np.array([i]), logits[i : i + 1]
            yield Candidates(one, np.arange(row.shape[1])[None], row, survivors(row, limits[one])[0])
