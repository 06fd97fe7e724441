"""Changes of the request table on their way to the GPU: tokens of new requests, pages, state slots."""

from collections.abc import Iterator

import torch

from engine.core.batch import StepPlan
from engine.kernels.pointwise import inputs
from engine.worker.staging import Staging, aligned


def send_updates(
    plan: StepPlan,
    stage: Staging,
    token_ids: torch.Tensor,
    block_tables: torch.Tensor,
    state_slots: torch.Tensor | None,
) -> None:
    """Append the plan's changes to what `stage` holds, send everything, and apply them, in as many copies as needed.

    token_ids [rows, length], block_tables [groups, rows, width] and state_slots [rows] are the table on the device.
    """

    def apply() -> None:
        """Send what is packed, and copy the runs [R, 4] in it into the table."""
        at = stage.put(runs) if runs else 0
        stage.send()
        tables = block_tables.flatten(0, 1)
        inputs.apply_runs(stage.device_words, at, len(runs) // 4, token_ids, tables, state_slots)

    runs: list[int] = []
    first = stage.end
    for which, start, values in _changes(plan, token_ids, block_tables, state_slots is not None):
        done = 0
        while done < len(values):
            room = stage.room - aligned(len(runs) + 4)  # the list of runs comes behind their words
            if room <= 0:
                apply()
                stage.go_on(first)
                runs = []
                continue
            part = values[done : done + room]
            runs += [which, start + done, stage.put(part), len(part)]
            done += len(part)
    apply()


def _changes(
    plan: StepPlan, token_ids: torch.Tensor, block_tables: torch.Tensor, has_states: bool
) -> Iterator[tuple[int, int, list[int]]]:
    """(table, first word there, the words) of all changes, in an order that does not matter."""
    rows, length = token_ids.shape
    width = block_tables.shape[2]
    for update in plan.page_updates:
        yield inputs.PAGES, (update.group * rows + update.row) * width + update.start, update.pages
    for init in plan.row_inits:
        yield inputs.TOKENS, init.row * length, init.token_ids
        if has_states:
            yield inputs.STATES, init.row, [init.slot]
