"""The layers' memory: shapes that differ from layer to layer, and layers that read another one's cache."""

import pytest
import torch
from torch import nn

from engine.core.kv.spec import AttentionLayer, CacheSpec
from engine.worker.cache import Cache

LAYERS = (
    AttentionLayer(num_kv_heads=4, head_dim=8),
    AttentionLayer(num_kv_heads=1, head_dim=32),
    AttentionLayer(num_kv_heads=4, head_dim=8, kv_from=0),
)


class Layer(nn.Module):
    k_cache: torch.Tensor
    v_cache: torch.Tensor


def bound(spec: CacheSpec, num_pages: int) -> list[Layer]:
    modules = [Layer() for _ in spec.layers]
    Cache(spec, num_pages - 1, torch.float32, torch.device("cpu")).bind(modules)
    return modules


def test_layers_of_different_shapes_share_page_ids_and_no_memory():
    spec = CacheSpec(LAYERS, dtype_bytes=4, page_size=8)
    assert spec.page_bytes == 8 * 2 * (4 * 8 + 32) * 4
    first, second, reader = bound(spec, num_pages=5)
    assert first.k_cache.shape == (5, 8, 4, 8)
    assert second.v_cache.shape == (5, 8, 1, 32)
    for i, cache in enumerate((first.k_cache, first.v_cache, second.k_cache, second.v_cache)):
        cache.fill_(i + 1)
    for i, cache in enumerate((first.k_cache, first.v_cache, second.k_cache, second.v_cache)):
        assert (cache == i + 1).all()
    assert reader.k_cache.data_ptr() == first.k_cache.data_ptr()
    assert reader.v_cache.data_ptr() == first.v_cache.data_ptr()


@pytest.mark.parametrize("bad", [
    AttentionLayer(4, 8, kv_from=3),               # itself
    AttentionLayer(4, 8, kv_from=2),               # stores nothing
    AttentionLayer(2, 8, kv_from=0),               # another shape
    AttentionLayer(4, 8, window=16, kv_from=0),    # another lifetime
    AttentionLayer(4, 8, kv_from=-1),
])  # fmt: skip
def test_a_layer_reads_only_a_cache_like_its_own(bad):
    with pytest.raises(ValueError, match="layer 3"):
        CacheSpec((*LAYERS, bad), dtype_bytes=4, page_size=8)
