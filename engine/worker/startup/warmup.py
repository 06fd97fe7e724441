"""Compiles every kernel that steps will need, before the first request, which would otherwise wait for seconds.

A step's kernels depend on the number of rows of its GEMMs, on whether it has few sequences, on the number of slices of
decode attention and on the block size of the experts, but not on its tokens. So one step of each kind runs with its
kernels recorded and not launched. Then all recorded kernels are compiled in parallel.
"""

import logging
import time
from collections.abc import Iterable

import torch

from engine.core.batch import StepPlan
from engine.kernels.attention import shared_prefix
from engine.kernels.attention.decode import SMALL_BATCH, num_splits
from engine.kernels.gemm import autotune, cublaslt
from engine.kernels.gemm.packed import group_scaled
from engine.kernels.gemm.small_batch import PRODUCT_ROWS
from engine.kernels.gemm.trials import Weight
from engine.kernels.runtime.compile_ahead import compile_ahead
from engine.kernels.runtime.launcher import Job, recording, target_of
from engine.layers.linear import Linear
from engine.layers.moe import kinds_of_steps
from engine.layers.quant import fp8, unquantized
from engine.layers.quant.packed_gpu import PackedParts
from engine.models.base import CausalLM
from engine.worker.cuda_graphs import graph_sizes
from engine.worker.device_runner import DeviceRunner
from engine.worker.startup.layer_kinds import one_of_each_kind

log = logging.getLogger(__name__)

_CHOSEN_ROWS = 256     # the most rows of a decode step for which algorithms are chosen
_CHOSEN_OUTPUTS = 1 << 16  # more outputs: an output head, which is not part of a graph
_CHOSEN_BYTES = 8 << 20    # for smaller fp8 weights (35B-A3B) a choice gains nothing


@torch.inference_mode()
def compile_steps(runner: DeviceRunner, max_batch: int, mixed: Iterable[StepPlan]) -> int:
    """Compile and load the kernels of decode steps of up to `max_batch` sequences, and of mixed steps like these.

    Returns how many variants had to be compiled. The runner's caches must be bound; they are not modified.
    """
    jobs = needed_kernels(runner, max_batch, mixed)
    count = compile_ahead(jobs, torch.cuda.get_device_capability(runner.device))
    load_kernels(jobs)
    return count


def load_kernels(jobs: Iterable[Job]) -> None:
    """Load them now: not while a request waits, nor while a graph is being recorded."""
    for job in jobs:
        job.kernel.load(job)


@torch.inference_mode()
def needed_kernels(runner: DeviceRunner, max_batch: int, mixed: Iterable[StepPlan]) -> set[Job]:
    """The variants that `compile_steps` compiles, recorded and not launched."""
    with recording() as jobs, one_of_each_kind(runner.model.layers):
        for size in _decode_sizes(runner, max_batch):
            runner._decode(size)
        for size in _shared_sizes(runner, max_batch):
            runner._decode_shared(size)
        for size in sorted(kinds_of_steps(runner.model, len(runner._ids), target_of(runner.device))):
            runner._decode(size)
        for shape in runner.mixed_shapes():
            runner.mixed_of(shape)
        for plan in mixed:
            runner.sample(runner.forward(plan))
        runner.warm_up()
    return jobs


@torch.inference_mode()
def choose_matmuls(model: CausalLM, dtype: torch.dtype, max_batch: int, max_tokens: int) -> None:
    """Measure which cuBLASLt algorithms are fastest for decode steps, before their graphs are recorded, and for full
    steps, because nearly all steps are full while there are prompts. `dtype`: that of activations."""
    kinds: dict[torch.dtype, dict[tuple[int, int], list[Weight]]] = {}
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
        if kind == fp8.FP8:  # in full steps the library's first choice is as good as any
            least = 0 if cublaslt.has_forms() else fp8.FEW_ROWS
            measured += autotune.choose(weights, [size for size in sizes if size > least], dtype, fp8=True)
        else:
            measured += autotune.choose(weights, sorted({*sizes, max_tokens}), kind)
    if measured:
        log.info("measured the algorithms of %d GEMMs in %.1f s", measured, time.monotonic() - began)


def _meets_fp8_rows(model: CausalLM) -> bool:
    """Whether packed weights meet fp8 activations: their kernel has a variant of its own for more than 128 rows."""
    packed = (module.packed for module in model.modules() if isinstance(module, Linear))
    return any(isinstance(each, PackedParts) and each.grouped is not None for each in packed)


def _decode_sizes(runner: DeviceRunner, max_batch: int) -> list[int]:
    """Batch sizes that cover every variant of GEMMs and of decode attention."""
    rows = (*PRODUCT_ROWS, group_scaled.MANY_ROWS) if _meets_fp8_rows(runner.model) else PRODUCT_ROWS
    sizes = {size for size in rows if size <= len(runner._ids)}
    for heads in {layer.num_kv_heads for layer in runner.attention_layers}:
        seen = set()
        for batch in range(1, max_batch + 1):
            variant = num_splits(batch, heads, runner.multiprocessors), batch <= SMALL_BATCH
            if variant not in seen:
                seen.add(variant)
                sizes.add(batch)
    return sorted(sizes)


def _shared_sizes(runner: DeviceRunner, max_batch: int) -> list[int]:
    """Batch sizes that cover every variant of attention to sequences that share a prefix."""
    if runner.prefixes is None:
        return []
    sizes, seen = set(), set()
    for layer in runner.attention_layers:
        heads, key_heads = layer.num_heads, layer.num_kv_heads
        for batch in range(shared_prefix.LEAST_SEQUENCES, max_batch + 1):
            splits = num_splits(batch, key_heads, runner.multiprocessors)
            prefix_splits = shared_prefix.num_splits(batch, heads, key_heads, runner.multiprocessors)
            variant = heads, key_heads, splits, prefix_splits, batch <= SMALL_BATCH
            if layer.can_share and variant not in seen:
                seen.add(variant)
                sizes.add(batch)
    return sorted(sizes)
