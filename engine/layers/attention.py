"""One attention layer's view of the KV cache: write the step's keys and values, then attend over pages."""

import torch
from torch import nn

from engine.kernels.attention import paged_attention, write_kv
from engine.layers.context import get_context


class Attention(nn.Module):
    """Causal grouped-query attention over pages.

    The worker binds `k_cache` and `v_cache` [num_pages, page_size, Hkv, D] after it has planned memory.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, window: int | None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.window = window

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""
        context = get_context()
        write_kv(k, v, self.k_cache, self.v_cache, context.slot_mapping)
        return paged_attention(
            q, k, v, self.k_cache, self.v_cache, context.attention, scale=self.scale, window=self.window
        )
