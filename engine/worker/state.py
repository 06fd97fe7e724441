"""The request table: one stable row for each running sequence, on the device.

    row 0                     for padding, which reads and writes it
    token_ids[row, i]         token i of the sequence; the sampler writes the newest one itself
    block_tables[g][row, i]   page of its tokens P i .. P i + P - 1, P = page_size, in the layers of group g; the null
                              page for unset entries and for those out of the group's window
    slots[row]                slot of its recurrent state

The host sends only changes: a row's tokens at admission, new pages as they are given out.
"""

import torch

from engine.core.batch import PageUpdate, RowInit
from engine.core.kv.spec import pages_for


class RequestTable:
    def __init__(
        self, num_rows: int, max_model_len: int, page_size: int, device: torch.device, num_groups: int = 1
    ) -> None:
        self.page_size = page_size
        self.token_ids = torch.zeros(num_rows, max_model_len, dtype=torch.int32, device=device)
        width = pages_for(max_model_len, page_size)
        self.block_tables = [torch.zeros(num_rows, width, dtype=torch.int32, device=device) for _ in range(num_groups)]
        self.slots = [0] * num_rows

    def admit(self, init: RowInit) -> None:
        for table in self.block_tables:
            table[init.row] = 0  # no page of the row's last owner may be read, not even masked
        self.slots[init.row] = init.slot
        self.token_ids[init.row, : len(init.token_ids)] = torch.tensor(init.token_ids, dtype=torch.int32)

    def add_pages(self, update: PageUpdate) -> None:
        end = update.start + len(update.pages)
        self.block_tables[update.group][update.row, update.start : end] = torch.tensor(update.pages, dtype=torch.int32)

    def append(self, rows: list[int], positions: list[int], token_ids: torch.Tensor) -> None:
        """Write sampled tokens at their positions, except for a sequence that is full: it ends with this token."""
        limit = self.token_ids.shape[1]
        fits = [i for i, position in enumerate(positions) if position < limit]
        if len(fits) < len(positions):
            rows, positions, token_ids = [rows[i] for i in fits], [positions[i] for i in fits], token_ids[fits]
        if rows:
            self.token_ids[rows, positions] = token_ids.to(torch.int32)
