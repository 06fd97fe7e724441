"""What the layers of one forward pass share. It is set once per step, so that `forward` of a layer only takes
activations. Each thread has its own: on a CPU two parts of a step run at once (worker/parts.py)."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.kernels.attention.reference import AttentionBatch


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """How a step's tokens group into sequences, for the GPU's kernels. All tensors int32 on the device.

    rows          [B]     row of the block table
    seq_lens      [B]     length including the step's tokens (decode steps)
    block_table   [rows, max_pages]
    tiles         [n, 2]  (sequence, its first token in the chunk) of each tile of `tile_tokens` query tokens; None in a
                          pure decode step, where token i belongs to sequence i
    starts, q_starts, counts [B]  position of the first token, its place in the step, how many (mixed steps)
    num_single            in a mixed step: how many sequences at its beginning have one token and no tiles; for them,
                          seq_lens and all else is as in a decode step
    shared        [S]     how many tokens each of the S sequences with one token shares with others
                          (attention.shared_prefix); None: decode attention reads every sequence's keys by itself
    has_own_keys          whether layers that borrow keys can read those of this step's tokens from the projection
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    multiprocessors: int
    tiles: torch.Tensor | None = None
    tile_tokens: int = 0
    starts: torch.Tensor | None = None
    q_starts: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    num_single: int = 0
    shared: torch.Tensor | None = None
    has_own_keys: bool = True


@dataclass(frozen=True, slots=True)
class StateBatch:
    """Which state each sequence of a step continues, for recurrent layers. All of length B, the number of sequences.

    slots     int64   index into a layer's state tensors; padding has one of its own
    fresh     bool    it starts from zero, whatever its slot holds: these are its first tokens
    q_starts  int64   place of its first token in the step
    counts    int64   how many tokens it has in the step; a decode step has one each

    num_chunks        number of chunks, of 64 tokens or less, of all sequences with several tokens: the only fact about
    a
                      mixed step that the host must know (recurrent.prefill.num_chunks); 0 in a decode step
    """

    slots: torch.Tensor
    fresh: torch.Tensor
    q_starts: torch.Tensor
    counts: torch.Tensor
    num_chunks: int = 0


@dataclass(slots=True)
class ForwardContext:
    """Filled by the worker from StepInputs.

    positions     [T] int64   position of each token in its sequence
    slot_mapping  [T] int64   where its K and V go: page * page_size + offset
    attention                 how the T tokens group into sequences, and their block tables
    more_groups               slot_mapping and attention of further groups of layers, which have pages of their own
    state                     for models with recurrent layers
    last          [N] int64   the tokens whose hidden states are read at the end of the step; None: all
    last_only                 makes the context of the same step with only these tokens, each the newest of its
                              sequence; None: every layer except the last needs all tokens
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    attention: AttentionBatch | DeviceBatch
    more_groups: Sequence[tuple[torch.Tensor, AttentionBatch | DeviceBatch]] = ()
    state: StateBatch | None = None
    last: torch.Tensor | None = None
    last_only: "Callable[[], ForwardContext] | None" = None

    def of_group(self, group: int) -> tuple[torch.Tensor, AttentionBatch | DeviceBatch]:
        """slot_mapping and attention of the layers of a group (engine/core/kv/spec.py)."""
        return self.more_groups[group - 1] if group else (self.slot_mapping, self.attention)


class _Current(threading.local):
    context: ForwardContext | None = None


_current = _Current()


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` current on this thread; steps do not nest."""
    assert _current.context is None, "a forward pass is already running"
    _current.context = context
    try:
        yield
    finally:
        _current.context = None


def continue_with_last_tokens() -> None:
    """Continue the running forward pass with only the last tokens. The remaining layers read all keys and values from
    the cache, and write none."""
    context = get_context()
    assert context.last_only is not None
    _current.context = context.last_only()


def get_context() -> ForwardContext:
    context = _current.context
    assert context is not None, "no forward pass is running"
    return context
