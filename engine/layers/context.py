"""What the layers of one forward pass share: set once a step, so that a layer's `forward` takes only activations."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.kernels.attention import AttentionBatch


@dataclass(slots=True)
class ForwardContext:
    """Filled by the worker from StepInputs.

    positions     [T] int64   position of each token in its sequence
    slot_mapping  [T] int64   where its K and V go: page * page_size + offset
    attention                 how the T tokens group into sequences, and their block tables
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    attention: AttentionBatch


_current: ForwardContext | None = None


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` current; steps do not nest."""
    global _current
    assert _current is None, "a forward pass is already running"
    _current = context
    try:
        yield
    finally:
        _current = None


def get_context() -> ForwardContext:
    assert _current is not None, "no forward pass is running"
    return _current
