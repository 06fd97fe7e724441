"""Sampling on the GPU: the kernels behind `engine.worker.sample.device`.

    race        every row: temperature, Gumbel noise, the best (score, id) of each block of the vocabulary
    merge       every row: the best of its blocks -> out[b] and the request's next place in the token table
    filter      rows with min-p, top-k or top-p: thresholds by bisection, then a draw among what is left
    copy, add, count, penalise    rows with edits: on a float32 copy of their logits
    logprobs    log-probability, rank and best alternatives of a token

Parameters arrive as `columns` int32 [8, S], one entry a request (floats as their bits). Kernels take an optional
`index` int32 [N]: logits row i then belongs to request index[i] rather than i.

Nothing here depends on the order in which a GPU adds: counts are integers, and probability mass is summed as 64-bit
fixed point. So a row gives the same bits in every batch.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.runtime.launcher import interpreted, kernel, wait_for_previous

ROW, POSITION, TEMPERATURE, SEED_LO, SEED_HI, TOP_K, TOP_P, LOG_MIN_P = range(8)
NUM_COLUMNS = 8

BLOCK = 4096          # tokens a program of the kernels that split the vocabulary
STREAM_BLOCK = 8192   # tokens at a time of the kernels that walk over a whole row
_STREAM_WARPS = 16
# A float32 made from a shorter float has this many low bits that say nothing: bisection skips them.
_EMPTY_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}

_POSITION = tl.constexpr(POSITION)
_TEMPERATURE = tl.constexpr(TEMPERATURE)
_SEED_LO = tl.constexpr(SEED_LO)
_SEED_HI = tl.constexpr(SEED_HI)
_TOP_K = tl.constexpr(TOP_K)
_TOP_P = tl.constexpr(TOP_P)
_LOG_MIN_P = tl.constexpr(LOG_MIN_P)
_INF = tl.constexpr(float("inf"))
_ONE = tl.constexpr(float(1 << 40))  # fixed point: the weight of the best token; 2^18 of them still fit 63 bits
_FAR = tl.constexpr(32.0)            # e^-32 · 2^40 is 0: tokens so far below the best weigh nothing
_LN2 = tl.constexpr(0.6931471805599453)
_SEEN = tl.constexpr(1 << 30)        # bit of a token's count: the prompt holds it
_ALL = tl.constexpr(2**31 - 1)


# The noise: the functions of engine/worker/sample/rng.py, on uint32.


@triton.jit
def _mix(x, key):
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) ^ key
    x = x ^ (x >> 15)
    x = x * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def _row_keys(low, high, position):
    """The two key words of a row."""
    k0 = _mix(low ^ 0x85EBCA6B, 0)
    k0 = _mix(k0 + high, 0)
    k0 = _mix(k0 + position, 0)
    k1 = _mix(high ^ 0xC2B2AE35, 0)
    k1 = _mix(k1 + low, 0)
    k1 = _mix(k1 ^ position, 0)
    return k0, k1


@triton.jit
def _fast_log(x, FAST: tl.constexpr):
    """log(x) to some 2e-7, relative or absolute, whichever is larger: one instruction instead of twenty."""
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1) * _LN2
    else:
        return tl.log2(x) * _LN2


@triton.jit
def _gumbel(tokens, k0, k1, FAST: tl.constexpr):
    """float32 noise of `tokens`."""
    word = _mix(_mix(tokens.to(tl.uint32) * 0x9E3779B9, 0) ^ k0, k1) & 0x7FFFFFFF
    v = tl.minimum((word.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.999999940395355)
    # -log1p(-v), where the winners are by its series: 1 - v would round off what tells them apart.
    series = v * (1.0 + v * (0.5 + v * (0.3333333333333333 + v * (0.25 + v * 0.2))))
    exponential = tl.where(v < 0.0625, series, -_fast_log(1.0 - v, FAST))
    return -_fast_log(exponential, FAST)


@triton.jit
def _word(columns_ptr, stride, which, b):
    return tl.load(columns_ptr + which * stride + b)


@triton.jit
def _number(columns_ptr, stride, which, b):
    return tl.load(columns_ptr + which * stride + b).to(tl.float32, bitcast=True)


@triton.jit
def _keys_of(columns_ptr, stride, b):
    low = _word(columns_ptr, stride, _SEED_LO, b).to(tl.uint32, bitcast=True)
    high = _word(columns_ptr, stride, _SEED_HI, b).to(tl.uint32, bitcast=True)
    return _row_keys(low, high, _word(columns_ptr, stride, _POSITION, b).to(tl.uint32, bitcast=True))


@triton.jit
def _is_filtered(columns_ptr, stride, b):
    some = _word(columns_ptr, stride, _TOP_K, b) > 0
    some = some | (_number(columns_ptr, stride, _TOP_P, b) < 1.0)
    return some | (_number(columns_ptr, stride, _LOG_MIN_P, b) > -_INF)


@triton.jit
def _store_token(token_ids_ptr, out_ptr, columns_ptr, columns_stride, b, token, good, table_stride, max_len):
    """out[b] = token or -1; a good token also goes to its place in the table, if the row has one."""
    tl.store(out_ptr + b, tl.where(good, token, -1))
    row = tl.load(columns_ptr + b).to(tl.int64)
    position = _word(columns_ptr, columns_stride, _POSITION, b)
    fits = good & (position >= 0) & (position < max_len)
    tl.store(token_ids_ptr + row * table_stride + position, token, mask=fits)


@kernel
def _race_kernel(
    logits_ptr, index_ptr, columns_ptr, score_ptr, id_ptr, V, logits_stride, columns_stride, parts,
    BLOCK: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best score and its id in one block of one row; +inf where the block holds NaN or +inf.

    Rows with filters run without temperature and noise: the filter kernel needs their best logit only."""
    wait_for_previous(PDL)
    i = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    b = i
    if index_ptr is not None:
        b = tl.load(index_ptr + i).to(tl.int64)
    temperature = _number(columns_ptr, columns_stride, _TEMPERATURE, b)
    draws = (temperature > 0) & (_is_filtered(columns_ptr, columns_stride, b) == 0)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits_ptr + i * logits_stride + ids, mask=ids < V, other=-_INF).to(tl.float32)
    score = z
    if draws:
        k0, k1 = _keys_of(columns_ptr, columns_stride, b)
        score = tl.div_rn(z, temperature) + _gumbel(ids, k0, k1, FAST)
    score = tl.where(z < _INF, score, _INF)  # false for NaN too
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
    best, at = tl.max(tl.load(score_ptr + i * parts + part, mask=part < parts, other=-_INF), 0, return_indices=True)
    token = tl.load(id_ptr + i * parts + at)
    good = (best > -_INF) & (best < _INF)
    _store_token(token_ids_ptr, out_ptr, columns_ptr, columns_stride, b, token, good, table_stride, max_len)


# Bisection runs over keys: integers in the order of the floats.


@triton.jit
def _key(x, EMPTY: tl.constexpr):
    """int64 key of a float32 whose low EMPTY bits are 0."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) >> EMPTY


@triton.jit
def _value(key, EMPTY: tl.constexpr):
    """The float32 of a key."""
    whole = (key << EMPTY) + tl.where(key < 0, (1 << EMPTY) - 1, 0)
    bits = whole.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(scaled, top):
    """Fixed-point weight exp(scaled - top) of scaled logits."""
    return (tl.exp(scaled - top) * _ONE).to(tl.int64)


@triton.jit
def _count_from(row_ptr, V, least, BLOCK: tl.constexpr):
    """How many logits reach `least`."""
    count = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + ids, mask=ids < V, other=-_INF).to(tl.float32)
        count += ((z >= least) & (ids < V)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _mass_from(row_ptr, V, least, least_scaled, temperature, top, BLOCK: tl.constexpr):
    """Weight of the tokens whose logit reaches `least` and whose scaled logit reaches `least_scaled`."""
    mass = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + ids, mask=ids < V, other=-_INF).to(tl.float32)
        scaled = tl.div_rn(z, temperature)
        mass += tl.where((z >= least) & (scaled >= least_scaled), _weight(scaled, top), 0)
    return tl.sum(mass, 0)


@kernel
def _filter_kernel(
    logits_ptr, index_ptr, columns_ptr, token_ids_ptr, out_ptr, V, logits_stride, columns_stride, table_stride, max_len,
    EMPTY: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Draw for one row with filters. out[b] holds the row's best token, or -1 if the row is bad.

    Dividing by the temperature keeps the order, so thresholds are found among the logits as they came."""
    i = tl.program_id(0).to(tl.int64)
    b = i
    if index_ptr is not None:
        b = tl.load(index_ptr + i).to(tl.int64)
    best_token = tl.load(out_ptr + b)
    if (best_token < 0) | (_is_filtered(columns_ptr, columns_stride, b) == 0):
        return
    row_ptr = logits_ptr + i * logits_stride
    temperature = _number(columns_ptr, columns_stride, _TEMPERATURE, b)
    top_logit = tl.load(row_ptr + best_token).to(tl.float32)
    top = tl.div_rn(top_logit, temperature)
    above = _key(top_logit, EMPTY) + 1

    # min-p: a bound on scaled logits.
    least_scaled = top + _number(columns_ptr, columns_stride, _LOG_MIN_P, b)

    # top-k: the largest value that k logits reach.
    last = tl.full([], -_INF, tl.float32)
    top_k = _word(columns_ptr, columns_stride, _TOP_K, b)
    if top_k > 0:
        low = _key(last, EMPTY)
        high = above
        while high - low > 1:
            middle = (low + high) >> 1
            count = _count_from(row_ptr, V, _value(middle, EMPTY), BLOCK)
            low = tl.where(count >= top_k, middle, low)
            high = tl.where(count >= top_k, high, middle)
            high = tl.where(count == top_k, low + 1, high)  # these are the k best: done
        last = _value(low, EMPTY)

    # top-p: the largest value whose tokens and all better ones together have the mass; of its ties as many as it takes.
    room = top_k * 0 + _ALL
    top_p = _number(columns_ptr, columns_stride, _TOP_P, b)
    if top_p < 1.0:
        whole = _mass_from(row_ptr, V, last, least_scaled, temperature, top, BLOCK)
        share = top_p.to(tl.float64) * whole.to(tl.float64)
        goal = share.to(tl.int64)
        goal += (goal.to(tl.float64) < share).to(tl.int64)
        goal = tl.maximum(goal, 1)
        low = tl.maximum(_key(top_logit - _FAR * temperature, EMPTY), _key(last, EMPTY))
        high = above
        better = whole * 0  # mass from `high` on
        while high - low > 1:
            middle = (low + high) >> 1
            least = tl.maximum(_value(middle, EMPTY), last)
            mass = _mass_from(row_ptr, V, least, least_scaled, temperature, top, BLOCK)
            low = tl.where(mass >= goal, middle, low)
            high = tl.where(mass >= goal, high, middle)
            better = tl.where(mass >= goal, better, mass)
        last = _value(low, EMPTY)
        one = tl.maximum(_weight(tl.div_rn(last, temperature), top), 1)
        room = ((goal - better + one - 1) // one).to(tl.int32)

    k0, k1 = _keys_of(columns_ptr, columns_stride, b)
    winner = best_token
    best = tl.full([], -_INF, tl.float32)
    ties = room * 0
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + ids, mask=ids < V, other=-_INF).to(tl.float32)
        scaled = tl.div_rn(z, temperature)
        tie = z == last
        nth = tl.cumsum(tie.to(tl.int32), 0) + ties
        kept = ((z > last) | (tie & (nth <= room))) & (scaled >= least_scaled)
        score = tl.where(kept, scaled + _gumbel(ids, k0, k1, FAST), -_INF)
        found, at = tl.max(score, 0, return_indices=True)
        winner = tl.where(found > best, start + at, winner)
        best = tl.maximum(best, found)
        ties += tl.sum(tie.to(tl.int32), 0)
    _store_token(token_ids_ptr, out_ptr, columns_ptr, columns_stride, b, winner, best > -_INF, table_stride, max_len)


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
            num_warps=_STREAM_WARPS,
        )  # fmt: skip


# Edits.


@kernel
def _copy_kernel(logits_ptr, index_ptr, z_ptr, V, logits_stride, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    b = tl.load(index_ptr + i).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < V
    z = tl.load(logits_ptr + b * logits_stride + ids, mask=inside)
    tl.store(z_ptr + i * V + ids, z.to(tl.float32), mask=inside)


@kernel
def _add_kernel(z_ptr, entries_ptr, count, first_row, chunk, V, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < count
    row = tl.load(entries_ptr + n, mask=inside, other=-1) - first_row
    inside = (row >= 0) & (row < chunk)
    token = tl.load(entries_ptr + count + n, mask=inside, other=0)
    value = tl.load(entries_ptr + 2 * count + n, mask=inside, other=0).to(tl.float32, bitcast=True)
    # A token may be both biased and banned; x + y - inf is the same in every order.
    tl.atomic_add(z_ptr + row.to(tl.int64) * V + token, value, mask=inside)


@triton.jit
def _has_penalty(penalties_ptr, stride, i):
    some = _number(penalties_ptr, stride, 1, i) != 1.0
    return some | (_number(penalties_ptr, stride, 2, i) != 0.0) | (_number(penalties_ptr, stride, 3, i) != 0.0)


@kernel
def _count_kernel(
    count_ptr, index_ptr, penalties_ptr, columns_ptr, token_ids_ptr, V, penalties_stride, columns_stride, table_stride,
    max_len, BLOCK: tl.constexpr,
):  # fmt: skip
    """count[i, t]: how often the output holds t, and bit 30 if the prompt does."""
    i = tl.program_id(0).to(tl.int64)
    b = tl.load(index_ptr + i)
    known = tl.minimum(_word(columns_ptr, columns_stride, _POSITION, b), max_len)
    if (_has_penalty(penalties_ptr, penalties_stride, i) == 0) | (tl.program_id(1) * BLOCK >= known):
        return
    prompt_len = tl.load(penalties_ptr + i)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(columns_ptr + b).to(tl.int64)
    token = tl.load(token_ids_ptr + row * table_stride + place, mask=place < known, other=-1)
    inside = (token >= 0) & (token < V)
    at = count_ptr + i * V + token
    tl.atomic_or(at, tl.full([BLOCK], _SEEN, tl.int32), mask=inside & (place < prompt_len))
    tl.atomic_add(at, tl.full([BLOCK], 1, tl.int32), mask=inside & (place >= prompt_len))


@kernel
def _penalise_kernel(z_ptr, count_ptr, penalties_ptr, V, penalties_stride, BLOCK: tl.constexpr):
    """The arithmetic of engine/worker/sample/penalties.py."""
    i = tl.program_id(0).to(tl.int64)
    if _has_penalty(penalties_ptr, penalties_stride, i) == 0:
        return
    repetition = _number(penalties_ptr, penalties_stride, 1, i)
    frequency = _number(penalties_ptr, penalties_stride, 2, i)
    presence = _number(penalties_ptr, penalties_stride, 3, i)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < V
    count = tl.load(count_ptr + i * V + ids, mask=inside, other=0)
    seen = count != 0
    z = tl.load(z_ptr + i * V + ids, mask=seen, other=0.0)
    z = tl.where(z < 0, z * repetition, tl.div_rn(z, repetition))
    output = count & (_SEEN - 1)
    z -= frequency * output.to(tl.float32)
    z -= tl.where(output > 0, presence, 0.0)
    tl.store(z_ptr + i * V + ids, z, mask=seen)


def copy_rows(logits: torch.Tensor, index: torch.Tensor, z: torch.Tensor) -> None:
    """z [N, V] float32 = logits[index]."""
    rows, vocab = z.shape
    block = min(BLOCK, triton.next_power_of_2(vocab))
    _copy_kernel((rows, triton.cdiv(vocab, block)), logits, index, z, vocab, logits.stride(0), BLOCK=block)


def add_values(z: torch.Tensor, entries: torch.Tensor, first_row: int, chunk: int) -> None:
    """z[row - first_row, token] += value for those of `entries` int32 [3, M] (row, token, bits of the value) whose row
    is one of the `chunk` from `first_row` on; z holds these rows. Entries of row -1 are padding."""
    count = entries.shape[1]
    if count:
        grid = (triton.cdiv(count, 256),)
        _add_kernel(grid, z, entries, count, first_row, chunk, z.shape[1], BLOCK=256)


def penalise(
    z: torch.Tensor, count: torch.Tensor, index: torch.Tensor, penalties: torch.Tensor, columns: torch.Tensor,
    token_ids: torch.Tensor, longest: int,
) -> None:  # fmt: skip
    """Apply penalties to z [N, V] float32. `penalties` int32 [4, ≥ N]: prompt length, bits of repetition, frequency and
    presence. `count` int32 [N, V] is scratch; `longest` bounds the number of known tokens of these rows."""
    rows, vocab = z.shape
    count.zero_()
    _count_kernel(
        (rows, max(1, triton.cdiv(longest, 1024))), count, index, penalties, columns, token_ids, vocab,
        penalties.stride(0), columns.stride(0), token_ids.stride(0), token_ids.shape[1], BLOCK=1024,
    )  # fmt: skip
    block = min(BLOCK, triton.next_power_of_2(vocab))
    _penalise_kernel(
        (rows, triton.cdiv(vocab, block)), z, count, penalties, vocab, penalties.stride(0), BLOCK=block)


# Log-probabilities.


@kernel
def _logprobs_kernel(
    logits_ptr, index_ptr, tokens_ptr, out_ptr, V, logits_stride, out_stride, BLOCK: tl.constexpr
):
    """One row: token, bits of its log-probability, rank, K ids, bits of their log-probabilities."""
    K = (out_stride - 3) // 2
    i = tl.program_id(0).to(tl.int64)
    b = i
    if index_ptr is not None:
        b = tl.load(index_ptr + i).to(tl.int64)
    row_ptr = logits_ptr + b * logits_stride
    out_ptr += i * out_stride
    token = tl.load(tokens_ptr + b).to(tl.int32)
    tl.store(out_ptr, token)

    best = tl.full([BLOCK], -_INF, tl.float32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + ids, mask=ids < V, other=-_INF).to(tl.float32)
        best = tl.maximum(best, tl.where(z < _INF, z, _INF))
    top = tl.max(best, 0)
    good = (top > -_INF) & (top < _INF) & (token >= 0)
    shift = tl.where(good, top, 0.0)

    chosen = tl.load(row_ptr + tl.where(token >= 0, token, 0)).to(tl.float32)
    mass = tl.zeros([BLOCK], dtype=tl.int64)
    better = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + ids, mask=ids < V, other=-_INF).to(tl.float32)
        mass += _weight(tl.where(z <= shift, z, -_INF), shift)
        better += (z > chosen).to(tl.int32)
    total = tl.maximum(tl.sum(mass, 0), 1)
    base = shift + tl.log(total.to(tl.float32) / _ONE)
    base = tl.where(good, base, float("nan"))
    tl.store(out_ptr + 1, (chosen - base).to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2, tl.where(good, 1 + tl.sum(better, 0), 0))

    # Best first, of equal ones the lower id: the largest of (key, -id) below the one before.
    previous = tl.full([], 2**63 - 1, tl.int64)
    for k in range(K):
        found = tl.full([BLOCK], -(2**63), tl.int64)
        for start in range(0, V, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            z = tl.load(row_ptr + ids, mask=ids < V, other=-_INF).to(tl.float32)
            z = tl.where(z == 0, 0.0, z)  # -0 equals 0
            pair = (_key(z, 0) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
            found = tl.maximum(found, tl.where((pair < previous) & (ids < V), pair, -(2**63)))
        previous = tl.max(found, 0)
        tl.store(out_ptr + 3 + k, 0x7FFFFFFF - (previous & 0x7FFFFFFF).to(tl.int32))
        value = _value(previous >> 32, 0)
        tl.store(out_ptr + 3 + K + k, (value - base).to(tl.int32, bitcast=True))


def logprobs(logits: torch.Tensor, index: torch.Tensor | None, tokens: torch.Tensor, out: torch.Tensor) -> None:
    """out int32 [N, 3 + 2k]: token, log-probability (bits), rank, k best ids, their log-probabilities (bits).

    For rows `index` [N] of logits [B, V] and `tokens` [B], None for all. A row that holds NaN or +inf, or only -inf, or
    whose token is -1, gets NaN and rank 0."""
    vocab = logits.shape[1]
    block = min(STREAM_BLOCK, max(1024, triton.next_power_of_2(vocab)))
    _logprobs_kernel(
        (len(out),), logits, index, tokens, out, vocab, logits.stride(0), out.shape[1], BLOCK=block,
        num_warps=_STREAM_WARPS,
    )  # fmt: skip
