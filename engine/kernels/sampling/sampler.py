"""Sampling on the GPU: the kernels behind `engine.worker.sample.device`.

    race        every row: temperature, Gumbel noise, the best (score, id) of each block of the vocabulary
    merge       every row: the best of its blocks -> out[b] and the request's next place in the token table
    filter      rows with min-p, top-k or top-p: thresholds by bisection, then a draw among the remaining tokens
    edits.py    rows with bias, bans or penalties: on a float32 copy of their logits
    logprobs.py log-probability, rank and best alternatives of a token

Parameters arrive as `columns` (columns.py). Kernels take an optional `index` int32 [N]: logits row i then belongs to
request index[i] rather than i.

No result depends on the order in which a GPU adds: counts are integers, and probability mass is summed as 64-bit fixed
point. So a row gives the same bits in every batch.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.runtime.launcher import interpreted, kernel, wait_for_previous
from engine.kernels.sampling.columns import (
    BLOCK,
    INF,
    LOG_MIN_P,
    POSITION,
    STREAM_BLOCK,
    STREAM_WARPS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    key_of,
    number_of,
    value_of,
    weight_of,
    word_of,
)
from engine.kernels.sampling.noise import gumbel, noise_keys_of

# A float32 that was widened from a shorter float ends in this many zero bits: bisection skips them.
_EMPTY_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}

_POSITION = tl.constexpr(POSITION)
_TEMPERATURE = tl.constexpr(TEMPERATURE)
_TOP_K = tl.constexpr(TOP_K)
_TOP_P = tl.constexpr(TOP_P)
_LOG_MIN_P = tl.constexpr(LOG_MIN_P)
_FAR = tl.constexpr(32.0)            # e^-32 · 2^40 rounds to 0: tokens so far below the best have no weight
_ALL = tl.constexpr(2**31 - 1)


@triton.jit
def _is_filtered(columns_ptr, stride, b):
    some = word_of(columns_ptr, stride, _TOP_K, b) > 0
    some = some | (number_of(columns_ptr, stride, _TOP_P, b) < 1.0)
    return some | (number_of(columns_ptr, stride, _LOG_MIN_P, b) > -INF)


@triton.jit
def _store_token(token_ids_ptr, out_ptr, columns_ptr, columns_stride, b, token, good, table_stride, max_len):
    """out[b] = the token, or -1 if it is not `good`; a good token is also stored in the token table, if the request has
    a row there."""
    tl.store(out_ptr + b, tl.where(good, token, -1))
    row = tl.load(columns_ptr + b).to(tl.int64)
    position = word_of(columns_ptr, columns_stride, _POSITION, b)
    fits = good & (position >= 0) & (position < max_len)
    tl.store(token_ids_ptr + row * table_stride + position, token, mask=fits)


@kernel
def _race_kernel(
    logits_ptr, index_ptr, columns_ptr, score_ptr, id_ptr, V, logits_stride, columns_stride, parts,
    BLOCK: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best score and its id in one block of one row; the score is +inf if the block holds NaN or +inf.

    Rows with filters run without temperature and noise, because the filter kernel only needs their best logit."""
    wait_for_previous(PDL)
    i = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    b = i
    if index_ptr is not None:
        b = tl.load(index_ptr + i).to(tl.int64)
    temperature = number_of(columns_ptr, columns_stride, _TEMPERATURE, b)
    draws = (temperature > 0) & (_is_filtered(columns_ptr, columns_stride, b) == 0)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits_ptr + i * logits_stride + ids, mask=ids < V, other=-INF).to(tl.float32)
    score = z
    if draws:
        k0, k1 = noise_keys_of(columns_ptr, columns_stride, b)
        score = tl.div_rn(z, temperature) + gumbel(ids, k0, k1, FAST)
    score = tl.where(z < INF, score, INF)  # false for NaN too
    best, at = tl.max(score, 0, return_indices=True)
    tl.store(score_ptr + i * parts + part, best)
    tl.store(id_ptr + i * parts + part, part * BLOCK + at)


@kernel
def _merge_kernel(
    score_ptr, id_ptr, index_ptr, columns_ptr, token_ids_ptr, out_ptr, columns_stride, parts, table_stride, max_len,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    i = tl.program_id(0).to(tl.int64)
    b = i
    if index_ptr is not None:
        b = tl.load(index_ptr + i).to(tl.int64)
    part = tl.arange(0, PARTS)
    best, at = tl.max(tl.load(score_ptr + i * parts + part, mask=part < parts, other=-INF), 0, return_indices=True)
    token = tl.load(id_ptr + i * parts + at)
    good = (best > -INF) & (best < INF)
    _store_token(token_ids_ptr, out_ptr, columns_ptr, columns_stride, b, token, good, table_stride, max_len)


@triton.jit
def _count_from(row_ptr, V, least, BLOCK: tl.constexpr):
    """How many logits reach `least`."""
    count = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + ids, mask=ids < V, other=-INF).to(tl.float32)
        count += ((z >= least) & (ids < V)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _mass_from(row_ptr, V, least, least_scaled, temperature, top, BLOCK: tl.constexpr):
    """The total weight of the tokens whose logit reaches `least` and whose scaled logit reaches `least_scaled`."""
    mass = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + ids, mask=ids < V, other=-INF).to(tl.float32)
        scaled = tl.div_rn(z, temperature)
        mass += tl.where((z >= least) & (scaled >= least_scaled), weight_of(scaled, top), 0)
    return tl.sum(mass, 0)


@kernel
def _filter_kernel(
    logits_ptr, index_ptr, columns_ptr, token_ids_ptr, out_ptr, V, logits_stride, columns_stride, table_stride, max_len,
    EMPTY: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Draw for one row with filters. out[b] holds the row's best token, or -1 if the row is bad.

    Dividing by the temperature keeps the order, so thresholds are searched among the unscaled logits."""
    i = tl.program_id(0).to(tl.int64)
    b = i
    if index_ptr is not None:
        b = tl.load(index_ptr + i).to(tl.int64)
    best_token = tl.load(out_ptr + b)
    if (best_token < 0) | (_is_filtered(columns_ptr, columns_stride, b) == 0):
        return
    row_ptr = logits_ptr + i * logits_stride
    temperature = number_of(columns_ptr, columns_stride, _TEMPERATURE, b)
    top_logit = tl.load(row_ptr + best_token).to(tl.float32)
    top = tl.div_rn(top_logit, temperature)
    above = key_of(top_logit, EMPTY) + 1

    # min-p: a bound on scaled logits.
    least_scaled = top + number_of(columns_ptr, columns_stride, _LOG_MIN_P, b)

    # top-k: the largest threshold that at least k logits reach.
    last = tl.full([], -INF, tl.float32)
    top_k = word_of(columns_ptr, columns_stride, _TOP_K, b)
    if top_k > 0:
        low = key_of(last, EMPTY)
        high = above
        while high - low > 1:
            middle = (low + high) >> 1
            count = _count_from(row_ptr, V, value_of(middle, EMPTY), BLOCK)
            low = tl.where(count >= top_k, middle, low)
            high = tl.where(count >= top_k, high, middle)
            high = tl.where(count == top_k, low + 1, high)  # exactly the k best: done
        last = value_of(low, EMPTY)

    # top-p: the largest threshold that tokens with the wanted mass reach; of equal logits at it, as many as needed.
    room = top_k * 0 + _ALL
    top_p = number_of(columns_ptr, columns_stride, _TOP_P, b)
    if top_p < 1.0:
        whole = _mass_from(row_ptr, V, last, least_scaled, temperature, top, BLOCK)
        share = top_p.to(tl.float64) * whole.to(tl.float64)
        goal = share.to(tl.int64)
        goal += (goal.to(tl.float64) < share).to(tl.int64)
        goal = tl.maximum(goal, 1)
        low = tl.maximum(key_of(top_logit - _FAR * temperature, EMPTY), key_of(last, EMPTY))
        high = above
        better = whole * 0  # mass of the tokens that reach `high`
        while high - low > 1:
            middle = (low + high) >> 1
            least = tl.maximum(value_of(middle, EMPTY), last)
            mass = _mass_from(row_ptr, V, least, least_scaled, temperature, top, BLOCK)
            low = tl.where(mass >= goal, middle, low)
            high = tl.where(mass >= goal, high, middle)
            better = tl.where(mass >= goal, better, mass)
        last = value_of(low, EMPTY)
        one = tl.maximum(weight_of(tl.div_rn(last, temperature), top), 1)
        room = ((goal - better + one - 1) // one).to(tl.int32)

    k0, k1 = noise_keys_of(columns_ptr, columns_stride, b)
    winner = best_token
    best = tl.full([], -INF, tl.float32)
    ties = room * 0
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + ids, mask=ids < V, other=-INF).to(tl.float32)
        scaled = tl.div_rn(z, temperature)
        tie = z == last
        nth = tl.cumsum(tie.to(tl.int32), 0) + ties
        kept = ((z > last) | (tie & (nth <= room))) & (scaled >= least_scaled)
        score = tl.where(kept, scaled + gumbel(ids, k0, k1, FAST), -INF)
        found, at = tl.max(score, 0, return_indices=True)
        winner = tl.where(found > best, start + at, winner)
        best = tl.maximum(best, found)
        ties += tl.sum(tie.to(tl.int32), 0)
    _store_token(token_ids_ptr, out_ptr, columns_ptr, columns_stride, b, winner, best > -INF, table_stride, max_len)


def sample_rows(
    logits: torch.Tensor, index: torch.Tensor | None, columns: torch.Tensor, token_ids: torch.Tensor, out: torch.Tensor,
    scores: torch.Tensor, ids: torch.Tensor, *, filtered: bool, block: int = BLOCK,
) -> None:  # fmt: skip
    """Sample logits [N, V] of the requests `index` (None: request i is row i) into `out`, and into `token_ids`.

    `scores` float32 and `ids` int32 are scratch of at least N · ceil(V / block) elements. Two launches, and a third if
    some of the rows are `filtered`."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, block)
    table = (token_ids.stride(0), token_ids.shape[1])
    _race_kernel(
        (rows, parts), logits, index, columns, scores, ids, vocab, logits.stride(0), columns.stride(0), parts,
        BLOCK=block, FAST=not interpreted(), num_warps=8 if block >= 2048 else 4,
    )  # fmt: skip
    _merge_kernel(
        (rows,), scores, ids, index, columns, token_ids, out, columns.stride(0), parts, *table,
        PARTS=triton.next_power_of_2(parts), num_warps=1,
    )  # fmt: skip
    if filtered:
        _filter_kernel(
            (rows,), logits, index, columns, token_ids, out, vocab, logits.stride(0), columns.stride(0), *table,
            EMPTY=_EMPTY_BITS[logits.dtype], BLOCK=min(2 * block, STREAM_BLOCK), FAST=not interpreted(),
            num_warps=STREAM_WARPS,
        )  # fmt: skip
