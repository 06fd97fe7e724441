"""The memory behind the layers' caches: one allocation, and the views that layers work on."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from engine.core.kv.spec import AttentionLayer, CacheSpec


class Cache:
    """Keys and values of every attention layer, zeroed: k, v [num_pages, page_size, Hkv, D], one layer after another.

    Zeros matter: attention reads whole pages and masks afterwards, and a stray NaN times zero is NaN. On CPU the zeros
    are the kernel's own (calloc), so a page costs memory only once it is written.
    """

    def __init__(self, spec: CacheSpec, num_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.memory = _zeros(num_pages * spec.page_bytes, device)
        self.kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        at = 0
        for i, layer in spec.storing.items():
            shape = (2, num_pages, spec.page_size, layer.num_kv_heads, layer.head_dim)
            size = math.prod(shape) * dtype.itemsize
            key, value = self.memory[at : at + size].view(dtype).view(shape)
            self.kv[i] = key, value
            at += size

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def bind(self, modules: Sequence[nn.Module]) -> None:
        """Give each caching module, in the order of `spec.layers`, what it reads and writes."""
        for i, (module, layer) in enumerate(zip(modules, self.spec.layers, strict=True)):
            if isinstance(layer, AttentionLayer):
                source = i if layer.kv_from is None else layer.kv_from
                module.k_cache, module.v_cache = self.kv[source]


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
