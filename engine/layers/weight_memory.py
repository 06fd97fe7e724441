"""The memory of weights: none before they are loaded, then a pool separate from temporary tensors.

PyTorch's allocator puts a new tensor into any free block. Weights that are quantised while they load would end up in
blocks of temporary tensors, and the rest of each such block could not be returned: another tenth of the weights' memory
(docs/performance/constants.md). So they get a separate pool, in which nothing is ever freed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_pool: torch.cuda.MemPool | None = None


def empty_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter (of the default dtype) without memory: the loader (models/loading/loader.py) fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


@contextmanager
def weight_pool(device: torch.device) -> Iterator[torch.cuda.MemPool | None]:
    """On a GPU: the pool from which `for_good` allocates inside this context. It must outlive every tensor allocated
    from it."""
    global _pool
    assert _pool is None, "one model is loaded at a time"
    _pool = torch.cuda.MemPool() if device.type == "cuda" else None
    try:
        yield _pool
    finally:
        _pool = None


@contextmanager
def for_good() -> Iterator[None]:
    """Tensors made inside this context live as long as the model."""
    if _pool is None:
        yield
    else:
        with torch.cuda.use_mem_pool(_pool):
            yield
