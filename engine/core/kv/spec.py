"""What a model's layers keep of a sequence, and how its memory is cut: the currency of planner, scheduler and worker.

    attention layers   a key and a value a token, in pages of P tokens; layers whose pages live equally long (same
                       window) form a *group*: one page id holds P tokens of all of them, one block table serves them
    recurrent layers   a state a sequence: one *slot* holds that of all of them

Pages of each group and slots are cut from equal *slabs*. A slab holds n pages of one group, or n slots, and can change
hands when all of it is free (strips.py says where it lies):

    slab 0: pages of group 0 | slab 1: slots | slab 2: pages of group 1 | ...

If all layers are one group and there are no states, there is nothing to change hands: a page is a slab.
"""

import math
from dataclasses import dataclass, field

from engine.core.kv.strips import Strips, aligned, cut

_ROW_ALIGN = 16    # int32 elements


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one attention layer caches a token: a key and a value of `num_kv_heads` x `head_dim`."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None    # tokens that a token attends to, itself included; None: all
    kv_from: int | None = None   # index of the layer whose cache it reads: it stores nothing itself


@dataclass(frozen=True, slots=True)
class StateLayer:
    """What one recurrent layer keeps a sequence, however long: tensors of these shapes and torch dtypes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor, rounded up to where the next may begin."""
        bits = {"float32": 4, "bfloat16": 2, "float16": 2}
        return [aligned(math.prod(s) * bits[d]) for s, d in zip(self.shapes, self.dtypes, strict=True)]


CacheLayer = AttentionLayer | StateLayer


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Attention layers whose pages live equally long."""

    window: int | None
    layers: tuple[int, ...]   # layers with a cache of their own, by index in CacheSpec.layers
    page_bytes: int           # of all of them


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The caches of all layers, in layer order, in pages of `page_size` tokens.

    `scale_bytes` is what the scale of a key or value takes that a token has of each head: 0 if it has none of its own.

    Raises ValueError for a layer that reads the cache of a layer which stores none, or one of another shape.
    """

    layers: tuple[CacheLayer, ...]
    dtype_bytes: int     # of keys and values
    page_size: int
    scale_bytes: int = 0
    groups: tuple[PageGroup, ...] = field(init=False)
    slot_bytes: int = field(init=False)              # a sequence's states; 0: there are none
    strips: Strips | None = field(init=False)        # None: one group, and no states

    def __post_init__(self) -> None:
        for i, layer in enumerate(self.layers):
            if isinstance(layer, AttentionLayer) and layer.kv_from is not None:
                source = self.layers[layer.kv_from] if 0 <= layer.kv_from < i else None
                shape = (layer.num_kv_heads, layer.head_dim, layer.window)
                if not isinstance(source, AttentionLayer) or source.kv_from is not None or shape != (
                    source.num_kv_heads, source.head_dim, source.window
                ):
                    raise ValueError(f"layer {i} cannot read the cache of layer {layer.kv_from}")
        windows = {layer.window for layer in self.storing.values()}
        if not windows:
            raise ValueError("a model needs an attention layer")
        groups = tuple(self._group(window) for window in sorted(windows, key=lambda w: (w is not None, w)))
        slot_bytes = sum(sum(layer.sizes) for layer in self.layers if isinstance(layer, StateLayer))
        strips = None
        if len(groups) > 1 or slot_bytes or self.scale_bytes:
            pages = [(max(self._page_bytes(i) for i in group.layers), len(group.layers)) for group in groups]
            strips = cut(pages, [sum(layer.sizes) for layer in self.layers if isinstance(layer, StateLayer)])
        for name, value in (("groups", groups), ("slot_bytes", slot_bytes), ("strips", strips)):
            object.__setattr__(self, name, value)

    @property
    def storing(self) -> dict[int, AttentionLayer]:
        """The attention layers that have a cache of their own, by index."""
        return {
            i: layer for i, layer in enumerate(self.layers)
            if isinstance(layer, AttentionLayer) and layer.kv_from is None
        }

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of every group: `page_size` tokens that are within every window."""
        return sum(group.page_bytes for group in self.groups)

    @property
    def slab_bytes(self) -> int:
        return self.strips.slab_bytes if self.strips else self.page_bytes

    @property
    def per_slab(self) -> tuple[int, ...]:
        """Pages of each group, then slots if there are states."""
        return self.strips.per_slab if self.strips else (1,)

    @property
    def state_dtypes(self) -> str:
        """The dtypes of recurrent states (a layer's first tensor): `float32`."""
        return " and ".join(sorted({layer.dtypes[0] for layer in self.layers if isinstance(layer, StateLayer)}))

    @property
    def fixed_bytes(self) -> int:
        """Bytes outside the slabs: what padding is written to."""
        return self.strips.count * self.strips.front if self.strips else self.page_bytes

    def memory(self, num_slabs: int) -> "CacheMemory":
        """The scheduler's view of `num_slabs` slabs."""
        windows = tuple(group.window for group in self.groups)
        if self.per_slab == (1,):  # nothing to move between kinds: one large slab
            return CacheMemory(self.page_size, windows, False, (num_slabs,), 1)
        assert self.strips is not None
        return CacheMemory(
            self.page_size, windows, bool(self.slot_bytes), self.per_slab, num_slabs,
            runs=self.strips.runs, first_ids=self.strips.first_ids,
        )  # fmt: skip

    def slabs_for(self, length: int, step_tokens: int, seqs: int = 1) -> int:
        """Slabs that hold `seqs` sequences of `length` tokens, if a step adds at most `step_tokens` to one."""
        windows = tuple(group.window for group in self.groups)
        memory = CacheMemory(self.page_size, windows, bool(self.slot_bytes), self.per_slab, 0)
        return memory.slabs_for(length, step_tokens, seqs)

    def _page_bytes(self, i: int) -> int:
        """Bytes of a page of layer `i` alone."""
        layer = self.storing[i]
        token = 2 * layer.num_kv_heads * (layer.head_dim * self.dtype_bytes + self.scale_bytes)
        return token * self.page_size

    def _group(self, window: int | None) -> PageGroup:
        members = tuple(i for i, layer in self.storing.items() if layer.window == window)
        return PageGroup(window, members, sum(map(self._page_bytes, members)))


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """The cache as the scheduler sees it: kinds of units, and how many of each a slab holds."""

    page_size: int
    windows: tuple[int | None, ...]   # of each group of pages
    has_state: bool                   # a last kind: slots, of which a sequence has one
    per_slab: tuple[int, ...]
    num_slabs: int
    state_grid: int = 64              # checkpoints of states lie at multiples: recurrent kernels work in such chunks
    runs: tuple[int, ...] = ()        # of each kind: runs of numbers in which a slab's units are; empty: one of each
    first_ids: tuple[int, ...] = ()   # of each kind: the first unit of the first slab; empty: 1, behind padding

    @classmethod
    def of_pages(cls, num_pages: int, page_size: int) -> "CacheMemory":
        """Full attention alone: one group, of `num_pages` pages, not counting the null page."""
        return cls(page_size, (None,), False, (num_pages,), 1)

    @property
    def window_groups(self) -> tuple[int, ...]:
        """The groups whose layers see a window of tokens only."""
        return tuple(group for group, window in enumerate(self.windows) if window is not None)

    def pages_out_of_window(self, group: int, position: int) -> int:
        """Pages of a group that no token from `position` on attends to."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.page_size

    def most_pages(self, group: int, length: int, step_tokens: int) -> int:
        """The most pages of a group that a sequence of `length` tokens must hold at a time: those that the first token
        of a step attends to, and those that tokens after the step will. Pages in between may be the null page
        (KVManager.grow)."""
        every, window = pages_for(length, self.page_size), self.windows[group]
        if window is None:
            return every
        seen = pages_for(window - 1, self.page_size) + 1
        return min(every, pages_for(window - 1 + step_tokens, self.page_size) + 1, 2 * seen)

    def slabs_for(self, length: int, step_tokens: int, seqs: int = 1) -> int:
        count = -(-seqs // self.per_slab[-1]) if self.has_state else 0
        for group, per in zip(range(len(self.windows)), self.per_slab, strict=False):
            every = pages_for(length, self.page_size)
            # Worst case: one sequence takes every token of the step, the others hold only their windows.
            pages = self.most_pages(group, length, step_tokens) + (seqs - 1) * self.most_pages(group, length, 1)
            # Pages that follow a window begin anywhere in a slab, and may end in the middle of one just emptied.
            slack = 2 if pages < seqs * every and per > 1 and len(self.per_slab) > 1 else 0
            count += min(-(-seqs * every // per), -(-pages // per) + slack)
        return count


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def table_widths(max_model_len: int, page_size: int) -> tuple[int, int]:
    """Token ids and page ids in a row of the request table. Rows begin at multiples of 64 bytes, whatever the length:
    GPU kernels have a variant for aligned rows, and only that one is compiled before the first request."""
    return _row_width(max_model_len), _row_width(pages_for(max_model_len, page_size))


def _row_width(count: int) -> int:
    return -(-count // _ROW_ALIGN) * _ROW_ALIGN
