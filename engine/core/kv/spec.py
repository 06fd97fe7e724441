"""What a layer stores per token, in bytes: the currency that the planner turns into pages."""

from dataclasses import dataclass

from engine.config import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Keys and values of a run of equal attention layers, in pages of PAGE_SIZE tokens.

    One page id addresses the same page index in every layer, so a request has one block table:

        k_cache[layer], v_cache[layer] : [num_pages, PAGE_SIZE, num_kv_heads, head_dim]
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def page_bytes(self) -> int:
        return self.bytes_per_token * PAGE_SIZE


def pages_for(num_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // PAGE_SIZE)
