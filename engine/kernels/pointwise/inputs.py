"""Applies on the device what the host sends each step: changes to the request table; then fills the inputs of each
token.

    runs      [R, 4]  (table, first word there, first word here, number of words): copied into the table
    row       [T]     the table row of each token
    position  [T]     its position in the sequence

    token_ids[t]  = tokens[row, position]
    slots[g, t]   = block_tables[g, row, position / P] * P + position % P       for each group g of layers
    seq_lens[t]   = position + 1
    states[t]     = state_slots[row]                                            where recurrent layers have some

These kernels have no PDL constant: they are complete before the model's first kernel starts, and its kernels may read
positions and slots before they wait (attention.heads).
"""

import torch
import triton
import triton.language as tl

from engine.kernels.runtime.launcher import kernel

TOKENS, PAGES, STATES = 0, 1, 2  # which table a run goes to


@kernel
def _apply_runs_kernel(packed_ptr, runs_at, tokens_ptr, pages_ptr, states_ptr, BLOCK: tl.constexpr):
    run = packed_ptr + runs_at + tl.program_id(0) * 4
    table = tl.load(run)
    target = tl.load(run + 1)
    source = tl.load(run + 2)
    count = tl.load(run + 3)
    i = tl.arange(0, BLOCK)
    for at in range(0, count, BLOCK):
        mask = at + i < count
        words = tl.load(packed_ptr + source + at + i, mask=mask, other=0)
        if table == 0:
            tl.store(tokens_ptr + target + at + i, words, mask=mask)
        elif table == 2:
            tl.store(states_ptr + target + at + i, words, mask=mask)
        else:
            tl.store(pages_ptr + target + at + i, words, mask=mask)


@kernel
def _gather_kernel(
    row_ptr, position_ptr, tokens_ptr, pages_ptr, state_slots_ptr, ids_ptr, positions_ptr, slots_ptr, seq_lens_ptr,
    states_ptr, T, tokens_stride, pages_stride, group_stride, slots_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = t < T
    row = tl.load(row_ptr + t, mask=mask, other=0).to(tl.int64)
    position = tl.load(position_ptr + t, mask=mask, other=0)
    token = tl.load(tokens_ptr + row * tokens_stride + position, mask=mask, other=0)
    group = tl.program_id(1).to(tl.int64)
    at_page = group * group_stride + row * pages_stride + position // PAGE
    page = tl.load(pages_ptr + at_page, mask=mask, other=0).to(tl.int64)
    tl.store(slots_ptr + group * slots_stride + t, page * PAGE + position % PAGE, mask=mask)
    mask = mask & (group == 0)  # the other outputs do not depend on the group
    tl.store(ids_ptr + t, token.to(tl.int64), mask=mask)
    tl.store(positions_ptr + t, position.to(tl.int64), mask=mask)
    tl.store(seq_lens_ptr + t, position + 1, mask=mask)
    if states_ptr is not None:
        tl.store(states_ptr + t, tl.load(state_slots_ptr + row, mask=mask, other=0).to(tl.int64), mask=mask)


def apply_runs(
    packed: torch.Tensor,
    runs_at: int,
    count: int,
    tokens: torch.Tensor,
    pages: torch.Tensor,
    states: torch.Tensor | None = None,
) -> None:
    """Copy `count` runs, listed at word `runs_at` of `packed`, into the request table: its `tokens`, `pages` and
    `states`, each seen as one flat array of words."""
    if count:
        states = tokens if states is None else states
        _apply_runs_kernel((count,), packed, runs_at, tokens, pages, states, BLOCK=256, num_warps=4)


def gather_inputs(
    row: torch.Tensor,
    position: torch.Tensor,
    tokens: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    state_slots: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
) -> None:
    """Fill int64 `token_ids`, `positions`, `slots` and int32 `seq_lens` of T tokens and, if given, int64 `states` from
    the table's `state_slots`.

    pages [G, rows, width] and slots [G, T]; without the dimension G if all layers are one group.
    """
    count = row.shape[0]
    if pages.dim() == 2:
        pages, slots = pages.unsqueeze(0), slots.unsqueeze(0)
    if states is None:
        state_slots = None
    _gather_kernel(
        (triton.cdiv(count, 128), pages.shape[0]), row, position, tokens, pages, state_slots, token_ids, positions,
        slots, seq_lens, states, count, tokens.stride(0), pages.stride(1), pages.stride(0), slots.stride(0),
        PAGE=page_size, BLOCK=128, num_warps=4,
    )  # fmt: skip
