"""Memory of weights, apart from what comes and goes while they are made.

PyTorch's allocator puts a new tensor into any block that another one has left. Where weights are quantised as they load
they would end up in blocks of temporary ones, and the rest of each such block could not be given back: of 30 GB of fp8
weights that was another 3 GB. So they get a pool of their own, in which nothing is ever freed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_pool: torch.cuda.MemPool | None = None


@contextmanager
def weight_pool(device: torch.device) -> Iterator[torch.cuda.MemPool | None]:
    """A pool for `for_good` to take from meanwhile, on a GPU. It must live as long as what was taken from it."""
    global _pool
    assert _pool is None, "one model is loaded at a time"
    _pool = torch.cuda.MemPool() if device.type == "cuda" else None
    try:
        yield _pool
    finally:
        _pool = None


@contextmanager
def for_good() -> Iterator[None]:
    """Tensors that are made meanwhile stay as long as the model."""
    if _pool is None:
        yield
    else:
        with torch.cuda.use_mem_pool(_pool):
            yield
