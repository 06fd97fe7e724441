"""Logit bias, bans, penalties and grammars on the GPU, applied to a float32 copy of the affected rows."""

import torch
import triton
import triton.language as tl

from engine.kernels.runtime.launcher import kernel
from engine.kernels.sampling.columns import BLOCK, POSITION, number_of, word_of

_POSITION = tl.constexpr(POSITION)
_SEEN = tl.constexpr(1 << 30)        # bit in a token's count: the prompt contains it


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
    # A token may be both biased and banned: the sum with -inf is -inf in any order.
    tl.atomic_add(z_ptr + row.to(tl.int64) * V + token, value, mask=inside)


@triton.jit
def _has_penalty(penalties_ptr, stride, i):
    some = number_of(penalties_ptr, stride, 1, i) != 1.0
    return some | (number_of(penalties_ptr, stride, 2, i) != 0.0) | (number_of(penalties_ptr, stride, 3, i) != 0.0)


@kernel
def _count_kernel(
    count_ptr, index_ptr, penalties_ptr, columns_ptr, token_ids_ptr, V, penalties_stride, columns_stride, table_stride,
    max_len, BLOCK: tl.constexpr,
):  # fmt: skip
    """count[i, t]: how often the output contains token t; bit 30 is set if the prompt contains it."""
    i = tl.program_id(0).to(tl.int64)
    b = tl.load(index_ptr + i)
    known = tl.minimum(word_of(columns_ptr, columns_stride, _POSITION, b), max_len)
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
    repetition = number_of(penalties_ptr, penalties_stride, 1, i)
    frequency = number_of(penalties_ptr, penalties_stride, 2, i)
    presence = number_of(penalties_ptr, penalties_stride, 3, i)
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


@kernel
def _mask_kernel(z_ptr, mask_of_ptr, masks_ptr, V, masks_stride, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    mask = tl.load(mask_of_ptr + i).to(tl.int64)
    if mask < 0:
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < V
    word = tl.load(masks_ptr + mask * masks_stride + (ids >> 5), mask=inside, other=-1)
    banned = inside & (((word >> (ids & 31)) & 1) == 0)
    # Add instead of overwriting, so that NaN and +inf stay visible: a row that holds them is bad, whatever its grammar
    # allows.
    z = tl.load(z_ptr + i * V + ids, mask=banned, other=0.0)
    tl.store(z_ptr + i * V + ids, z + float("-inf"), mask=banned)


def copy_rows(logits: torch.Tensor, index: torch.Tensor, z: torch.Tensor) -> None:
    """z [N, V] float32 = logits[index]."""
    rows, vocab = z.shape
    block = min(BLOCK, triton.next_power_of_2(vocab))
    _copy_kernel((rows, triton.cdiv(vocab, block)), logits, index, z, vocab, logits.stride(0), BLOCK=block)


def add_values(z: torch.Tensor, entries: torch.Tensor, first_row: int, chunk: int) -> None:
    """z[row - first_row, token] += value for all `entries` int32 [3, M] (row, token, bits of the value) whose row is
    one of the `chunk` rows from `first_row` on, which z holds. Entries of row -1 are padding."""
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


def mask_tokens(z: torch.Tensor, mask_of: torch.Tensor, masks: torch.Tensor) -> None:
    """z[i, t] += -inf for each token t whose bit in masks[mask_of[i]] is 0. z [N, V] float32; masks int32 [M, W], bit b
    of word w is token 32 w + b; mask_of int32 [>= N], -1 for a row that has no mask."""
    rows, vocab = z.shape
    block = min(BLOCK, triton.next_power_of_2(vocab))
    _mask_kernel((rows, triton.cdiv(vocab, block)), z, mask_of, masks, vocab, masks.stride(0), BLOCK=block)
