"""The end of a step with prompts: of each sequence only the last token's hidden state is read.

What the last layer writes for later steps, keys and values or a state, is of all tokens. Behind that it goes on with
those few alone: the output projection and the MLP of one layer in 36 are 2 % of a prompt's arithmetic. Where the last
layers have no keys of their own (Gemma 4 E2B, E4B), all of these do, by ForwardContext.narrowed: more than half of a
prompt's arithmetic.
"""

from typing import TypeVar, cast

import torch

from engine.layers.context import get_context
from engine.layers.gemm_inputs import QuantizedRows

Rows = TypeVar("Rows", bound=torch.Tensor | QuantizedRows)


def wanted(rows: Rows) -> Rows:
    """Of rows [T, ..] those that the end of the step needs [N, ..]; without such a choice all, as they are."""
    index = get_context().wanted
    if index is None:
        return rows
    if isinstance(rows, torch.Tensor):
        return cast(Rows, rows.index_select(0, index))
    plain = None if rows.plain is None else rows.plain.index_select(0, index)
    return cast(Rows, rows._replace(values=_bytes(rows.values, index), scale=rows.scale[index], plain=plain))


def _bytes(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """PyTorch selects rows of bytes, but not of fp8 numbers everywhere."""
    return values.view(torch.uint8).index_select(0, index).view(values.dtype)
