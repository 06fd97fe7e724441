"""The end of a step with prompts: only the last token's hidden state of each sequence is read.

The last layer writes keys and values (or a state) of all tokens, because later steps need them. Then it continues with
only the last tokens, which saves the output projection and the MLP of one layer. If the last layers have no K/V of
their own (Gemma 4 E2B, E4B), all of them run only on the last tokens (ForwardContext.last_only), which saves more than
half of a prompt's arithmetic.
"""

from typing import TypeVar, cast

import torch

from engine.layers.context import get_context
from engine.layers.gemm_inputs import QuantizedRows

Rows = TypeVar("Rows", bound=torch.Tensor | QuantizedRows)


def keep_last(rows: Rows) -> Rows:
    """Rows [T, ..] -> the rows [N, ..] of the tokens whose hidden states are read at the end; all if all are read."""
    index = get_context().last
    if index is None:
        return rows
    if isinstance(rows, torch.Tensor):
        return cast(Rows, rows.index_select(0, index))
    plain = None if rows.plain is None else rows.plain.index_select(0, index)
    return cast(Rows, rows._replace(values=_bytes(rows.values, index), scale=rows.scale[index], plain=plain))


def _bytes(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of an fp8 tensor, selected as bytes: PyTorch cannot select fp8 rows on every device."""
    return values.view(torch.uint8).index_select(0, index).view(values.dtype)
