"""The memory behind the layers' caches: one allocation, and the views that layers work on."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from engine.core.kv.spec import AttentionLayer, CacheLayer, CacheSpec, StateLayer

_SCALE = torch.float32  # of an int8 cache


class Cache:
    """Keys and values of every attention layer, k, v [num_pages, page_size, Hkv, D], and the recurrent layers' states,
    tuples of [num_slots, *shape]. `num_slabs` slabs and the memory outside them (engine/core/kv/spec.py), all zeros.

    If all pages are of one kind, a slab is a page, and each layer's pages are contiguous. Otherwise a page contains its
    tokens for one layer after another, and a layer's pages are strided:

        | null page | slab 0: [k0 v0 k1 v1 ...] [k0 v0 k1 v1 ...] | slab 1: [state 0, state 1, ...] | ... |

    An int8 cache has a scale for each token and head, in the layer's page: [k, scales of k, v, scales of v]. Scales
    [num_pages, page_size, Hkv] lie like the numbers that they are for: a stride of theirs is that of the numbers,
    divided by D (from page to page: by 4, the bytes of a scale). The attention kernels rely on that.

    Within a layer's page, a CPU has tokens before heads, [page_size, Hkv, D], because it gathers whole pages. A GPU has
    heads before tokens, because a program of its attention reads one head: 4 KiB in one piece instead of sixteen.

    The memory must be zeros: the CPU's attention reads whole pages and masks afterwards, and a stray NaN times zero is
    NaN. On a CPU the zeros come from the kernel (calloc), so a page takes memory only once it is written.
    """

    def __init__(self, spec: CacheSpec, num_slabs: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.num_slabs = num_slabs
        self.memory = _zeros(num_slabs * spec.slab_bytes + spec.fixed_bytes, device)
        self.kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.scales: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of an int8 cache's k and v
        self.states: dict[int, tuple[torch.Tensor, ...]] = {}
        self._begin = max(spec.page_strides)  # where the first slab begins
        self._heads_first = _is_gpu(device)
        if len(spec.per_slab) == 1 and not spec.scale_bytes:
            self._cut_layers(dtype)
        elif len(spec.per_slab) == 1:
            self._cut_scaled_layers(dtype)
        else:
            self._cut_pages(dtype)
            self._cut_slots()

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def padding_slot(self) -> int:
        """The slot for padding, which no sequence has."""
        return self.num_slabs * self.spec.per_slab[-1]

    def bind(self, modules: Sequence[nn.Module]) -> None:
        """Bind each caching module, in the order of `spec.layers`, to its part of the memory."""
        group_of = {i: g for g, group in enumerate(self.spec.groups) for i in group.layers}
        for i, (module, layer) in enumerate(zip(modules, self.spec.layers, strict=True)):
            if isinstance(layer, AttentionLayer):
                source = i if layer.kv_from is None else layer.kv_from
                module.k_cache, module.v_cache = self.kv[source]
                module.group = group_of[source]  # type: ignore[assignment]
                if source in self.scales:
                    module.k_scale, module.v_scale = self.scales[source]
            else:
                module.state = self.states[i]  # type: ignore[assignment]

    def slab(self, index: int) -> torch.Tensor:
        """The bytes of a slab."""
        start = self._begin + index * self.spec.slab_bytes
        return self.memory[start : start + self.spec.slab_bytes]

    def copy_state(self, source: int, target: int) -> None:
        """Copy all recurrent layers' states from slot to slot."""
        stride = self.spec.slot_stride
        slots = self.memory[self._begin :][: (self.padding_slot + 1) * stride].view(-1, stride)
        slots[target].copy_(slots[source])

    def _cut_layers(self, dtype: torch.dtype) -> None:
        at = 0
        for i, layer in self.spec.storing.items():
            page = (self.spec.page_size, layer.num_kv_heads)
            shape = (2, self.num_slabs + 1, *(page[::-1] if self._heads_first else page), layer.head_dim)
            size = math.prod(shape) * dtype.itemsize
            both = self.memory[at : at + size].view(dtype).view(shape)
            key, value = both.transpose(2, 3) if self._heads_first else both
            self.kv[i] = key, value
            at += size

    def _cut_scaled_layers(self, dtype: torch.dtype) -> None:
        """Each layer's pages follow one another, each with the scales of its numbers."""
        at = 0
        for i, layer in self.spec.storing.items():
            stride = 2 * self._bytes_of(layer, dtype)
            self._cut_layer(i, layer, dtype, at, stride, self.num_slabs + 1)
            at += stride * (self.num_slabs + 1)

    def _cut_pages(self, dtype: torch.dtype) -> None:
        """Page 0 of each group (the null page) ends where the first slab begins."""
        spec = self.spec
        for group, per, stride in zip(spec.groups, spec.per_slab, spec.page_strides, strict=False):
            at = self._begin - stride
            for i in group.layers:
                layer = spec.storing[i]
                self._cut_layer(i, layer, dtype, at, stride, self.num_slabs * per + 1)
                at += 2 * self._bytes_of(layer, dtype)

    def _bytes_of(self, layer: AttentionLayer, dtype: torch.dtype) -> int:
        """Bytes of a layer's keys in a page, or of its values."""
        return self.spec.page_size * layer.num_kv_heads * (layer.head_dim * dtype.itemsize + self.spec.scale_bytes)

    def _cut_layer(self, i: int, layer: AttentionLayer, dtype: torch.dtype, at: int, stride: int, pages: int) -> None:
        """Keys and values of layer `i`: its part of a page begins at byte `at` of the first one, and `stride` bytes
        later in the next."""
        page_size, heads, dim = self.spec.page_size, layer.num_kv_heads, layer.head_dim
        token, head = (1, page_size) if self._heads_first else (heads, 1)
        memory, scales = self.memory.view(dtype), self.memory.view(_SCALE) if self.spec.scale_bytes else None
        cut, cut_scales = [], []
        for start in (at, at + self._bytes_of(layer, dtype)):
            strides = (stride // dtype.itemsize, token * dim, head * dim, 1)
            cut.append(memory.as_strided((pages, page_size, heads, dim), strides, start // dtype.itemsize))
            if scales is not None:
                behind = start + page_size * heads * dim * dtype.itemsize
                cut_scales.append(scales.as_strided(
                    (pages, page_size, heads), (stride // _SCALE.itemsize, token, head), behind // _SCALE.itemsize
                ))  # fmt: skip
        self.kv[i] = cut[0], cut[1]
        if cut_scales:
            self.scales[i] = cut_scales[0], cut_scales[1]

    def _cut_slots(self) -> None:
        at, stride = self._begin, self.spec.slot_stride
        for i, layer in enumerate(self.spec.layers):
            if not isinstance(layer, StateLayer):
                continue
            tensors = []
            for shape, name, size in zip(layer.shapes, layer.dtypes, layer.sizes, strict=True):
                dtype: torch.dtype = getattr(torch, name)
                strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
                tensors.append(self.memory.view(dtype).as_strided(
                    (self.padding_slot + 1, *shape), (stride // dtype.itemsize, *strides), at // dtype.itemsize
                ))  # fmt: skip
                at += size
            self.states[i] = tuple(tensors)


def cache_spec(layers: Sequence[CacheLayer], dtype: torch.dtype, page_size: int) -> CacheSpec:
    """What `layers` keep in a cache of `dtype`."""
    return CacheSpec(tuple(layers), dtype.itemsize, page_size, _SCALE.itemsize if dtype == torch.int8 else 0)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
