"""How the cache of a GPU is laid out: every number once, and a head's part of a page in one piece."""

from types import SimpleNamespace

import pytest
import torch

from engine.core.kv.spec import AttentionLayer, CacheSpec
from engine.worker import cache as cache_module
from engine.worker.cache import Cache

_FULL = AttentionLayer(2, 64)


@pytest.mark.parametrize("layers", [(_FULL,) * 3, (_FULL, AttentionLayer(4, 32, window=32), _FULL)])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_views_of_pages(layers, kind, monkeypatch):
    monkeypatch.setattr(cache_module, "_zeros", lambda size, device: torch.zeros(size, dtype=torch.uint8))
    spec = CacheSpec(layers, 2, 16)
    cache = Cache(spec, 5, torch.bfloat16, SimpleNamespace(type=kind))  # type: ignore[arg-type]
    numbers = torch.arange(cache.memory.numel() // 2)
    groups = {}
    for i, (k, v) in cache.kv.items():
        group = groups.setdefault(layers[i], [])
        for view in (k, v):
            assert view.shape[1:] == (16, layers[i].num_kv_heads, layers[i].head_dim)
            mine = numbers.as_strided(view.shape, view.stride(), view.storage_offset())
            one_head = mine[:, :, 1]
            assert (one_head[2].max() - one_head[2].min() + 1 == one_head[2].numel()) == (kind == "cuda")
            group.append(mine[1:].flatten())
    for group in groups.values():  # groups share memory by slabs, the layers of one do not
        together = torch.cat(group)
        assert together.unique().numel() == together.numel()
