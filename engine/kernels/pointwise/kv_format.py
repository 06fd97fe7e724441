"""How keys and values lie in the KV cache: its own dtype, and what its numbers are multiplied by.

    bfloat16, float16, float32   as they are
    float8_e4m3fn                k / k_scale and v / v_scale, one number each for a layer
    int8                         rounded, with a float32 scale for each token and head, which lies in the same page
"""

import torch

KvScale = float | torch.Tensor
"""Of cached keys or values: one number (1 if the cache is not fp8), or an int8 cache's scales [num_pages, P, Hkv]."""


def is_fp8(cache: torch.Tensor) -> bool:
    return cache.element_size() == 1 and cache.dtype != torch.int8


def for_writing(scale: KvScale) -> KvScale:
    """What kernels that write to the cache get: the inverse of one number, or the scales to fill in."""
    return scale if isinstance(scale, torch.Tensor) else 1 / scale
