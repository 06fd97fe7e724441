"""How the cache of a GPU is laid out: every number once, and a head's part of a page in one piece."""

from types import SimpleNamespace

import pytest
import torch

from engine.core.kv.pages import Arena
from engine.core.kv.spec import AttentionLayer, CacheSpec, StateLayer
from engine.core.kv.strips import cut
from engine.worker import cache as cache_module
from engine.worker.cache import Cache

_FULL = AttentionLayer(2, 64)
_WINDOW = AttentionLayer(4, 32, window=32)
_STATE = StateLayer(((3, 20, 20), (4, 7)), ("float32", "bfloat16"))
_MIB = 1 << 20


@pytest.mark.parametrize("layers", [(_FULL,) * 3, (_FULL, _WINDOW, _FULL)])
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


@pytest.mark.parametrize("scale_bytes", [0, 4])
@pytest.mark.parametrize("layers", [
    (_FULL, _WINDOW, _WINDOW), (_FULL, _STATE, _STATE, _FULL, _STATE), (_STATE, _FULL, _WINDOW, _STATE, _WINDOW),
    (_FULL, _WINDOW, AttentionLayer(1, 32), _WINDOW, _WINDOW, _WINDOW, _WINDOW),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_slabs_share_nothing_and_are_cleared_alone(layers, scale_bytes, kind, monkeypatch):
    """Every unit that is handed out fills its bytes: those of other units, and of what padding is written to, stay."""
    monkeypatch.setattr(cache_module, "_zeros", lambda size, device: torch.zeros(size, dtype=torch.uint8))
    spec, num_slabs = CacheSpec(layers, 1 if scale_bytes else 2, 16, scale_bytes), 3
    dtype = torch.int8 if scale_bytes else torch.bfloat16
    cache = Cache(spec, num_slabs, dtype, SimpleNamespace(type=kind))  # type: ignore[arg-type]
    memory = spec.memory(num_slabs)
    arena = Arena(num_slabs, memory.per_slab, memory.first_ids, memory.runs)

    def bytes_of(kind: int, unit: int) -> torch.Tensor:
        if kind < len(spec.groups):
            parts = [view for i in spec.groups[kind].layers for view in (*cache.kv[i], *cache.scales.get(i, ()))]
        else:
            parts = [view for state in cache.states.values() for view in state]
        for part in parts:
            part[unit] = 1
        found = cache.memory != 0
        assert found.sum() >= sum(part[unit].numel() for part in parts)
        cache.memory.zero_()
        return found

    padding = [bytes_of(kind, 0) for kind in range(len(arena.pools))]
    per_slab: list[list[torch.Tensor]] = [[] for _ in range(num_slabs)]
    for kind, pool in enumerate(arena.pools):
        units = pool.take(pool.capacity)
        assert units is not None
        mine = [bytes_of(kind, unit) for unit in units]
        assert torch.stack([*mine, *padding]).sum(0).max() <= len(padding)
        assert torch.stack([*mine, padding[kind]]).sum(0).max() == 1
        for unit, found in zip(units, mine, strict=True):
            per_slab[pool.slab_of(unit)].append(found)
        pool.release(units)
    slabs = [torch.stack(found).any(0) for found in per_slab]
    assert torch.stack(slabs).sum(0).max() == 1
    assert not any((slab & used).any() for slab in slabs for used in padding)
    cache.memory.fill_(1)
    cache.clear_slab(1)
    assert not cache.memory[slabs[1]].any()
    assert cache.memory[slabs[0] | slabs[2] | torch.stack(padding).any(0)].all()


def test_the_state_of_a_slot_is_copied_whole_and_alone(monkeypatch):
    spec = CacheSpec((_STATE, _FULL, _STATE, _STATE, _FULL), 2, 16)
    cache = Cache(spec, 4, torch.bfloat16, torch.device("cpu"))
    tensors = [tensor for state in cache.states.values() for tensor in state]
    for n, tensor in enumerate(tensors):
        tensor[2] = n + 1
    before = cache.memory.count_nonzero()
    cache.copy_state(2, 3)
    for n, tensor in enumerate(tensors):
        assert (tensor[2:4] == n + 1).all()
    assert cache.memory.count_nonzero() == 2 * before


def _page(heads: int, head_dim: int, scale_bytes: int = 0, dtype_bytes: int = 2) -> int:
    return 16 * 2 * heads * (head_dim * dtype_bytes + scale_bytes)


@pytest.mark.parametrize("pages, states, strips, per_slab, most", [
    pytest.param([(_page(2, 512), 5), (_page(8, 256), 25)], [], 25, (10, 1), 3.2, id="Gemma 4 26B-A4B"),
    pytest.param([(_page(2, 512, 4, 1), 5), (_page(8, 256, 4, 1), 25)], [], 25, (10, 1), 1.6, id="the same in int8"),
    pytest.param([(_page(1, 512), 3), (_page(1, 256), 12)], [], 12, (4, 2), 0.4, id="Gemma 4 E2B"),
    pytest.param([(_page(16, 128), 10), (_page(16, 128), 52)], [], 160, (16, 3), 20, id="Gemma 3 27B"),
    pytest.param([(_page(4, 256), 16)], [48 * 128 * 128 * 2 + 4 * 10240 * 2] * 48, 16, (76, 1), 76, id="Qwen3.6-27B"),
])  # fmt: skip
def test_models_waste_little_of_a_slab(pages, states, strips, per_slab, most):
    layout = cut(pages, states)
    assert (layout.count, layout.per_slab) == (strips, per_slab)
    assert layout.slab_bytes <= most * _MIB
    assert layout.count * layout.front <= layout.slab_bytes + sum(size * layers for size, layers in pages)
    sizes = [size * layers for size, layers in pages] + ([sum(states)] if states else [])
    for n, size in zip(layout.per_slab, sizes, strict=True):
        assert 0.97 * layout.slab_bytes <= n * size <= layout.slab_bytes
