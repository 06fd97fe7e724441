"""GEMMs of one to three rows on a Zen 4, where oneDNN reads a bf16 weight at 12 to 15 GB/s on one thread.

FBGEMM reads a second copy of the weight, the same numbers in fp16, at 25, which is as fast as the memory is. It sums in
another order, so it is left out of steps that must repeat (engine/layers/repeatable.py). Copies are kept where the
weights are not large and memory is left. The kind of CPU decides, not a measurement, as in cpu_format.py.
(Measurements: docs/performance/cpu.md.)
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from engine.kernels.gemm import cpu_format
from engine.kernels.gemm.fp16_weight import Fp16Weight
from engine.kernels.runtime.cpu_threads import num_threads
from engine.layers.quant.unquantized import ON_PACKED

log = logging.getLogger(__name__)

_MOST_BYTES = 4 << 30   # of weights with a copy: packing takes two to four seconds a GiB
_MOST_SHARE = 4         # of the memory that is left, copies get one part


def keep_copies(model: nn.Module, available: int) -> None:
    """After loading, with so many bytes of memory left."""
    layers: list[Any] = [m for m in model.modules() if getattr(m, "gemm", None) is ON_PACKED and not m.batch_invariant]
    if not layers or not cpu_format.reads_bf16_slowly():
        return
    if sum(layer.packed.nbytes for layer in layers) > min(_MOST_BYTES, available // _MOST_SHARE):
        return
    with ThreadPoolExecutor(layers[0].threads) as pool:  # FBGEMM packs a matrix on one thread
        size = sum(pool.map(_keep_copy, layers))
    log.info("Weights are kept in fp16, too (%.1f GiB): this CPU reads them faster in steps of few tokens.",
             size / (1 << 30))  # fmt: skip


def _keep_copy(layer: Any) -> int:
    """Bytes of the copy: none, if fp16 cannot hold the weight."""
    with torch.inference_mode(), num_threads(1):
        layer.few_rows = Fp16Weight.pack(layer.packed.to_dense(), layer.bias)
    return 0 if layer.few_rows is None else layer.few_rows.nbytes
