"""What a layer stores per token, in bytes: the currency that the planner turns into pages."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Keys and values of a run of equal attention layers, in pages of `page_size` tokens.

    One page id addresses the same page index in every layer, so a request has one block table:

        k_cache[layer], v_cache[layer] : [num_pages, page_size, num_kv_heads, head_dim]
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    page_size: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def page_bytes(self) -> int:
        return self.bytes_per_token * self.page_size


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)
