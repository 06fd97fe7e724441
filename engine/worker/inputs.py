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
from engine.kernels.attention import AttentionBatch
from engine.worker.state import RequestTable


@dataclass(frozen=True, slots=True)
class StepInputs:
    token_ids: torch.Tensor       # [T] int64
    positions: torch.Tensor       # [T] int64
    slot_mapping: torch.Tensor    # [T] int64
    attention: AttentionBatch
    sample_index: torch.Tensor    # [S] int64
    sample_rows: list[int]        # [S]
    sample_positions: list[int]   # [S] where each sampled token will stand


def build_inputs(plan: StepPlan, table: RequestTable) -> StepInputs:
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
    page = table.block_table[row_of, positions // size].long()

    sampling = [i for i, s in enumerate(plan.seqs) if s.samples]
    return StepInputs(
        token_ids=table.token_ids[row_of, positions].long(),
        positions=positions,
        slot_mapping=page * size + positions % size,
        attention=AttentionBatch.build(q_starts.tolist(), starts, counts, rows, table.block_table, size),
        sample_index=torch.from_numpy(ends[sampling] - 1).to(device),
        sample_rows=[rows[i] for i in sampling],
        sample_positions=[starts[i] + counts[i] for i in sampling],
    )
