"""What a model's layers keep of a sequence, in bytes: the currency that the planner turns into memory."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one attention layer caches a token: a key and a value of `num_kv_heads` x `head_dim`."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None    # a token sees so many, itself included; None: all
    kv_from: int | None = None   # index of the layer whose cache it reads: it stores nothing itself


@dataclass(frozen=True, slots=True)
class StateLayer:
    """What one recurrent layer keeps a sequence, however long: tensors of these shapes and torch dtypes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


CacheLayer = AttentionLayer | StateLayer


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The caches of all layers, in layer order, in pages of `page_size` tokens.

    One page id addresses the same page index in every layer, so a request has one block table:

        k_cache[layer], v_cache[layer] : [num_pages, page_size, num_kv_heads, head_dim]

    Raises ValueError for a layer that reads the cache of a layer which stores none, or one of another shape.
    """

    layers: tuple[CacheLayer, ...]
    dtype_bytes: int     # of keys and values
    page_size: int

    def __post_init__(self) -> None:
        for i, layer in enumerate(self.layers):
            if isinstance(layer, AttentionLayer) and layer.kv_from is not None:
                source = self.layers[layer.kv_from] if 0 <= layer.kv_from < i else None
                shape = (layer.num_kv_heads, layer.head_dim, layer.window)
                if not isinstance(source, AttentionLayer) or source.kv_from is not None or shape != (
                    source.num_kv_heads, source.head_dim, source.window
                ):
                    raise ValueError(f"layer {i} cannot read the cache of layer {layer.kv_from}")

    @property
    def storing(self) -> dict[int, AttentionLayer]:
        """The attention layers that have a cache of their own, by index."""
        return {
            i: layer for i, layer in enumerate(self.layers)
            if isinstance(layer, AttentionLayer) and layer.kv_from is None
        }

    @property
    def bytes_per_token(self) -> int:
        return sum(2 * layer.num_kv_heads * layer.head_dim * self.dtype_bytes for layer in self.storing.values())

    @property
    def page_bytes(self) -> int:
        return self.bytes_per_token * self.page_size


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)
