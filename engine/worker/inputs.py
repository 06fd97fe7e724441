"""StepPlan -> the tensors of one forward pass.

    sequences      s0 (3 tokens)   s1 (1)   s2 (2)
    token_ids      a  b  c         d        e  f          [T]
    positions      4  5  6         17       0  1          [T]
    sample_index         2         3           5          [S]  tokens whose logits are needed for sampling
"""

from dataclasses import dataclass

import numpy as np
import torch

from engine.core.batch import StepPlan
from engine.kernels.attention.reference import AttentionBatch
from engine.layers.context import StateBatch
from engine.worker.state import RequestTable


@dataclass(frozen=True, slots=True)
class StepInputs:
    token_ids: torch.Tensor       # [T] int64
    positions: torch.Tensor       # [T] int64
    groups: list[tuple[torch.Tensor, AttentionBatch]]  # for each group of layers: slot_mapping [T] int64, attention
    state: StateBatch | None
    sample_index: torch.Tensor    # [S] int64
    sample_rows: list[int]        # [S]
    sample_positions: list[int]   # [S] the position of each sampled token
    last_index: torch.Tensor      # [S + P] int64: tokens that sample, then the last tokens of embedded prompts
    last_rows: list[int]          # [S + P]


def build_inputs(plan: StepPlan, table: RequestTable, *, has_state: bool = False) -> StepInputs:
    starts = [s.start for s in plan.seqs]
    counts = [s.num_tokens for s in plan.seqs]
    rows = [s.row for s in plan.seqs]
    ends = np.cumsum(counts)
    q_starts = ends - counts

    position = np.arange(ends[-1]) + np.repeat(np.asarray(starts) - q_starts, counts)
    row = np.repeat(rows, counts)
    device = table.token_ids.device
    positions = torch.from_numpy(position).to(device)
    row_of = torch.from_numpy(row).to(device)
    size = table.page_size
    page_index, offset = positions // size, positions % size
    segments = q_starts.tolist(), starts, counts, rows
    groups = [
        (block_table[row_of, page_index].long() * size + offset, AttentionBatch.build(*segments, block_table, size))
        for block_table in table.block_tables
    ]
    state = None
    if has_state:
        columns = torch.tensor([[table.slots[row] for row in rows], q_starts.tolist(), counts], device=device)
        state = StateBatch(columns[0], torch.tensor(starts, device=device) == 0, columns[1], columns[2])

    sampling = [i for i, s in enumerate(plan.seqs) if s.samples]
    last = sampling + plan.pooled_ends
    last_index = torch.from_numpy(ends[last] - 1).to(device)
    return StepInputs(
        token_ids=table.token_ids[row_of, positions].long(),
        positions=positions,
        groups=groups,
        state=state,
        sample_index=last_index[: len(sampling)],
        sample_rows=[rows[i] for i in sampling],
        sample_positions=[starts[i] + counts[i] for i in sampling],
        last_index=last_index,
        last_rows=[rows[i] for i in last],
    )
