"""The memory behind the layers' caches: one allocation, and the views that layers work on."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from engine.core.kv.spec import AttentionLayer, CacheLayer, CacheSpec, StateLayer
from engine.core.kv.strips import Strips, deal

_SCALE = torch.float32  # of an int8 cache


class Cache:
    """Keys and values of every attention layer, k, v [num_pages, page_size, Hkv, D], and the recurrent layers' states,
    tuples of [num_slots, *shape]. `num_slabs` slabs and the memory outside them, all zeros. Page 0 and slot 0 are for
    padding.

    Without strips (engine/core/kv/strips.py), each layer has its keys in one piece, and its values in another. With
    them, a layer's pages are its strips, one behind another, and its keys in a page come before its values:

        | page 0: k, v | page 1: k, v | ... | last page of the last strip: k, v |

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
        self._heads_first = _is_gpu(device)
        if spec.strips is None:
            self._cut_layers(dtype)
        else:
            self._cut_pages(spec.strips, dtype)
            self._cut_slots(spec.strips)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

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

    def clear_slab(self, index: int) -> None:
        strips = self.spec.strips
        assert strips is not None, "without strips, no slab changes hands"
        start = strips.front + index * strips.piece
        self.memory.view(strips.count, -1)[:, start : start + strips.piece].zero_()

    def copy_state(self, source: int, target: int) -> None:
        """Copy all recurrent layers' states from slot to slot."""
        strips = self.spec.strips
        assert strips is not None
        stride = strips.strides[-1]
        slots = self.memory.view(strips.count, -1)[:, strips.front - stride :].unfold(1, stride, stride)
        slots[:, target].copy_(slots[:, source])

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

    def _cut_pages(self, strips: Strips, dtype: torch.dtype) -> None:
        for group, run, stride in zip(self.spec.groups, strips.runs, strips.strides, strict=False):
            size = run * strips.strip_bytes(self.num_slabs)
            for n, i in enumerate(group.layers):
                self._cut_layer(i, self.spec.storing[i], dtype, n * size, stride, size // stride)

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

    def _cut_slots(self, strips: Strips) -> None:
        layers = [(i, layer) for i, layer in enumerate(self.spec.layers) if isinstance(layer, StateLayer)]
        stride, size = strips.strides[-1], strips.strip_bytes(self.num_slabs)
        for strip, dealt in enumerate(deal(len(layers), strips.count)):
            at = strip * size + strips.front - stride
            for i, layer in (layers[n] for n in dealt):
                self.states[i] = self._cut_states(layer, at, stride, 1 + self.num_slabs * strips.per_piece[-1])
                at += sum(layer.sizes)

    def _cut_states(self, layer: StateLayer, at: int, stride: int, slots: int) -> tuple[torch.Tensor, ...]:
        tensors = []
        for shape, name, size in zip(layer.shapes, layer.dtypes, layer.sizes, strict=True):
            dtype: torch.dtype = getattr(torch, name)
            strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            tensors.append(self.memory.view(dtype).as_strided(
                (slots, *shape), (stride // dtype.itemsize, *strides), at // dtype.itemsize
            ))  # fmt: skip
            at += size
        return tuple(tensors)


def cache_spec(layers: Sequence[CacheLayer], dtype: torch.dtype, page_size: int) -> CacheSpec:
    """What `layers` keep in a cache of `dtype`."""
    return CacheSpec(tuple(layers), dtype.itemsize, page_size, _SCALE.itemsize if dtype == torch.int8 else 0)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
