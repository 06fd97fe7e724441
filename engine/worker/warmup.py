"""Compile every kernel that steps will need before the first request, which would otherwise wait for seconds.

The kernels of a step depend on how many rows its products have, on whether its sequences are few, into how many slices
decode attention cuts and into what blocks experts' tokens fall, not on what the step holds. So a step of each kind is
gone through with kernels only noted, not started, and all that were noted are compiled side by side.
"""

import logging
import time
from collections.abc import Iterable

import torch

from engine.core.batch import StepPlan
from engine.kernels.attention.decode import SMALL_BATCH, num_splits
from engine.kernels.gemm import autotune, cublaslt
from engine.kernels.gemm.small_batch import PRODUCT_ROWS
from engine.kernels.runtime.compile_ahead import compile_ahead
from engine.kernels.runtime.launcher import recording, target_of
from engine.layers.linear import Linear
from engine.layers.moe import kinds_of_steps
from engine.layers.quant import fp8, unquantized
from engine.models.base import CausalLM
from engine.worker.cuda_graphs import graph_sizes
from engine.worker.device_runner import DeviceRunner

log = logging.getLogger(__name__)

_CHOSEN_ROWS = 256     # of decode steps
_CHOSEN_OUTPUTS = 1 << 16  # more: a head, which no graph holds
_CHOSEN_BYTES = 8 << 20    # of fp8: choosing for the small products of 35B-A3B changed nothing


@torch.inference_mode()
def prepare(runner: DeviceRunner, max_batch: int, mixed: Iterable[StepPlan]) -> int:
    """Compile for decode steps of up to `max_batch` sequences, and for mixed steps as these are.

    Returns how many variants were not at hand. The runner's caches must be bound; their content stays as it is.
    """
    with recording() as jobs:
        for size in _decode_sizes(runner, max_batch):
            runner._decode(size)
        for size in sorted(kinds_of_steps(runner.model, len(runner._ids), target_of(runner.device))):
            runner._decode(size)
        for shape in runner.mixed_shapes():
            runner.mixed_of(shape)
        for plan in mixed:
            runner.sample(runner.forward(plan))
        runner.warm_up()
    return compile_ahead(jobs, torch.cuda.get_device_capability(runner.device))


@torch.inference_mode()
def choose_products(model: CausalLM, dtype: torch.dtype, max_batch: int, max_tokens: int) -> None:
    """Measure which of the library's algorithms are the fastest in decode steps, before graphs of them are recorded,
    and in full steps: while there are prompts, nearly all steps are full. `dtype` is that of activations."""
    kinds: dict[torch.dtype, dict[tuple[int, int], list[autotune.Weight]]] = {}
    for module in model.modules():
        if not isinstance(module, Linear) or module.out_features > _CHOSEN_OUTPUTS:
            continue
        weight = module.by_library
        if weight is not None and (weight.scale is None or weight.values.nbytes >= _CHOSEN_BYTES):
            shape = module.out_features, module.in_features
            kinds.setdefault(weight.values.dtype, {}).setdefault(shape, []).append(weight)
    began, measured = time.monotonic(), 0
    sizes = [size for size in graph_sizes(max_batch) if unquantized.FEW_ROWS < size <= _CHOSEN_ROWS]
    for kind, weights in kinds.items():
        if kind == fp8.FP8:  # of full steps the library's first choice is as good as any
            least = 0 if cublaslt.has_forms() else fp8.FEW_ROWS
            measured += autotune.choose(weights, [size for size in sizes if size > least], dtype, fp8=True)
        else:
            measured += autotune.choose(weights, sorted({*sizes, max_tokens}), kind)
    if measured:
        log.info("measured %d products in %.1f s, to choose their algorithms", measured, time.monotonic() - began)


def _decode_sizes(runner: DeviceRunner, max_batch: int) -> list[int]:
    """Batch sizes that stand for all: one for every variant of products, and of decode attention."""
    sizes = {size for size in PRODUCT_ROWS if size <= len(runner._ids)}
    for heads in {layer.num_kv_heads for layer in runner.attention_layers}:
        seen = set()
        for batch in range(1, max_batch + 1):
            variant = num_splits(batch, heads, runner.multiprocessors), batch <= SMALL_BATCH
            if variant not in seen:
                seen.add(variant)
                sizes.add(batch)
    return sorted(sizes)
