"""From a config to a running engine: check, load, plan memory, allocate, connect."""

import gc
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from engine.capabilities import (
    ONLINE_INTEGERS,
    check_capabilities,
    nvidia_driver_present,
    resolve_device,
)
from engine.config import DEFAULT_PAGE_SIZE, EngineConfig
from engine.core.kv.planner import (
    MemoryBudget,
    MemoryPlan,
    gib,
    plan_memory,
)
from engine.core.kv.spec import CacheSpec
from engine.core.loop import EngineCore
from engine.errors import OutOfMemoryPlanError
from engine.kernels.gemm import cpu_format
from engine.kernels.gemm.scaled import has_fp8_units
from engine.kernels.runtime import compile_pool, origins, prebuilt, warm_cache_hint
from engine.layers.linear import Linear
from engine.layers.moe import RoutedExperts
from engine.layers.quant import cpu_few_rows
from engine.message import msg
from engine.models.base import CausalLM
from engine.models.batch_invariant import make_batch_invariant
from engine.models.config.model import ModelConfig
from engine.models.config.quantization import read_quantization
from engine.models.loading.checkpoint import check_checkpoint
from engine.models.loading.kv_scales import use_kv_scales
from engine.models.loading.loader import compute_in, fill_randomly, load_weights, quantize
from engine.models.loading.quantized import stays_fp8, use_stored_formats
from engine.models.registry import model_class
from engine.text.grammar.compiler import GrammarCompiler
from engine.worker.cache import Cache, cache_spec
from engine.worker.runner import Runner
from engine.worker.startup.copies import keep_copies
from engine.worker.startup.embedding_offload import keep_tables, lock_tables
from engine.worker.startup.host import host_memory
from engine.worker.startup.memory import (
    GpuMemory,
    activation_bytes,
    arithmetic_notes,
    check_weights_fit,
    cpu_budget,
    gpu_budget,
    host_bytes,
    outcome,
    weight_bytes,
)
from engine.worker.startup.resolve import (
    DEFAULT_BATCHED_TOKENS,
    DEFAULT_MAX_ITL_MS,
    DEFAULT_SEQS,
    choose_device,
    gpu_defaults,
    resolve_dtype,
    resolve_kv_dtype,
    wanted_context,
)
from engine.worker.startup.start_clock import StartClock

if TYPE_CHECKING:
    from engine.worker.device_runner import DeviceRunner  # imported where there is a GPU: CPU builds have no Triton

log = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]



def build_engine(
    config: EngineConfig, progress: Progress | None = None, clock: StartClock | None = None
) -> EngineCore:
    """Load `config.model` and make it ready to step.

    Raises ModelError (the directory is wrong), ConfigError (a flag cannot be honoured here) or OutOfMemoryPlanError
    (it does not fit), each before the expensive work that it would waste. `progress(stage, done, total)` is called
    while weights load. `clock`: of a start that began before; its phases are logged at the end.
    """
    clock = clock or StartClock()
    device = choose_device(config)
    clock.lap("device")
    model_config = ModelConfig.load(config.model)
    dtype, max_len_wanted = resolve_dtype(config, model_config), wanted_context(config, model_config)
    compute = cpu_format.compute_dtype(dtype) if device.type == "cpu" else dtype
    model = empty_model(config, model_config, device)
    gpu = GpuMemory.now(device) if device.type == "cuda" else None
    if gpu is not None:
        keep_tables(model, config, device)
        check_weights_fit(model, config, gpu)
        came = prebuilt.of_model(model_config.raw, torch.cuda.get_device_capability(gpu.device))
        if not came and not warm_cache_hint.found(*_deciding(config, model_config, gpu)):
            compile_pool.start_early()  # so that it is ready when the weights have been loaded
        compile_pool.load_here(cache=not came)
    clock.lap("model")
    with torch.inference_mode():
        if config.load_format == "dummy":
            fill_randomly(model, device=device)
        else:
            load_weights(model, config.model, progress, device)
        if gpu is not None:
            lock_tables(model, config, device)
            keep_copies(model, config, gpu.usable(config.gpu_memory_utilization) - weight_bytes(model))
        elif config.seed is None:  # with one, all requests must repeat
            cpu_few_rows.keep_copies(model, host_memory()[1])
    clock.lap("weights")

    kv_dtype = resolve_kv_dtype(config, compute)
    page_size = config.block_size or DEFAULT_PAGE_SIZE[device.type]
    spec = cache_spec(model.cache_layers(), kv_dtype, page_size)
    default_seqs = DEFAULT_SEQS[device.type]
    default_tokens = DEFAULT_BATCHED_TOKENS[device.type]
    if gpu is not None:
        free = gpu.usable(config.gpu_memory_utilization) - weight_bytes(model)
        default_seqs, default_tokens = gpu_defaults(config, model_config, spec, dtype, gpu.total, free)
    num_seqs = config.max_num_seqs or default_seqs
    max_tokens = config.max_num_batched_tokens or default_tokens
    if gpu is not None:
        if progress:
            progress("measuring steps", 0, 1)
        budget = _measured_budget(config, model, spec, dtype, kv_dtype, max_tokens, num_seqs, gpu, clock)
    else:
        activations = activation_bytes(model_config, compute, max_tokens, min(num_seqs, max_tokens))
        budget = cpu_budget(config, weight_bytes(model), activations, _cpu_format(config, dtype, compute))
    wishes = {
        "device": str(device), "max_model_len": max_len_wanted, "model_max_len": model_config.max_position_embeddings,
        "max_num_seqs": config.max_num_seqs, "default_num_seqs": default_seqs,
        "usual_num_seqs": DEFAULT_SEQS[device.type], "step_tokens": max_tokens,
    }  # fmt: skip
    try:
        plan = plan_memory(budget, spec, **wishes)
    except OutOfMemoryPlanError:
        if kv_dtype.itemsize <= resolve_kv_dtype(config, dtype).itemsize:
            raise
        kv_dtype = dtype  # half the memory; only a little slower
        spec = cache_spec(model.cache_layers(), kv_dtype, page_size)
        plan = plan_memory(budget, spec, **wishes)
    if gpu is not None:
        plan = replace(plan, notes=(*plan.notes, *arithmetic_notes(model, dtype, device)))
    log.info("%s", plan.table())
    log.info("Planned memory in numbers: %s", json.dumps(plan.numbers()))

    with torch.inference_mode():
        cache = Cache(spec, plan.num_slabs, kv_dtype, device)
    if gpu is not None:
        runner = _start_on_gpu(config, model, plan, cache, max_tokens, gpu, progress, clock)
        warm_cache_hint.write(*_deciding(config, model_config, gpu))
        depth = 1 if config.overlap is False else 2
    else:
        runner = Runner(
            model, spec, num_rows=plan.max_num_seqs + 1, max_model_len=plan.max_model_len, device=device,
            repeats=config.seed is not None,
        )  # fmt: skip
        runner.bind_cache(cache)
        depth = 2 if config.overlap else 1
    core = EngineCore(
        config,
        runner,
        memory=spec.memory(plan.num_slabs),
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=max_tokens,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        depth=depth,
        max_itl=(DEFAULT_MAX_ITL_MS[device.type] if config.max_itl_ms is None else config.max_itl_ms) / 1e3,
        grammars=_grammars(config, model_config),
        description=_describe(plan, model_config, dtype, compute, device),
    )
    clock.lap("rest")
    log.info("%s", clock.line())
    return core


def _cpu_format(config: EngineConfig, dtype: torch.dtype, compute: torch.dtype) -> str:
    text = cpu_format.describe(dtype, compute)
    return f"{config.quantization} of {text}" if config.quantization in ONLINE_INTEGERS else text


@torch.inference_mode(mode=False)  # in which views do not know their base: by it stored formats find their layers
def empty_model(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> CausalLM:
    """The model with every layer in its format for `device`, before it has weights. Raises ModelError, ConfigError."""
    build = model_class(model_config)
    dtype = resolve_dtype(config, model_config)
    check_capabilities(config, device.type)
    max_len_wanted = wanted_context(config, model_config)

    torch.set_default_dtype(dtype)
    try:
        model = build(model_config, max_len_wanted or model_config.max_position_embeddings).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    compute = cpu_format.compute_dtype(dtype) if device.type == "cpu" else dtype
    if device.type == "cpu" and compute == torch.float32:
        compute_in(model, compute)
    model.set_state_dtype(config.mamba_ssm_cache_dtype, device.type)
    tensors = None if config.load_format == "dummy" else check_checkpoint(config.model)
    stored = use_stored_formats(model, model_config, config.model, tensors)
    if tensors is not None:
        use_kv_scales(model, tensors, is_fp8=config.kv_cache_dtype.startswith("fp8"))
    if config.quantization is not None:
        quantize(model, config.quantization, None if stored is None else stored.method)
    for module in model.modules():
        if isinstance(module, Linear | RoutedExperts):
            module.fp8_activations = config.quantized_activations == "auto" and not config.batch_invariant
    if config.batch_invariant:
        fp8 = config.quantization == "fp8" or config.kv_cache_dtype.startswith("fp8") or stays_fp8(model)
        make_batch_invariant(model, fp8=fp8, fp8_units=device.type != "cuda" or has_fp8_units(device))
    return model


def _grammars(config: EngineConfig, model_config: ModelConfig) -> GrammarCompiler | None:
    """The compiler of grammars that answers can follow; None if the vocabulary is not known."""
    if config.skip_tokenizer_init or not (config.model / "tokenizer.json").is_file():
        return None
    return GrammarCompiler(config.model, model_config.vocab_size, model_config.eos_token_ids)


def preload_worker(config: EngineConfig) -> None:
    """The part of `build_engine` that needs no device: import every library, check the flags and the model's config.

    Raises ModelError or ConfigError.
    """
    kind = resolve_device(config.device, nvidia_driver_present())
    check_capabilities(config, kind)
    model_config = ModelConfig.load(config.model)
    model_class(model_config)
    read_quantization(model_config, config.model)
    resolve_dtype(config, model_config)
    wanted_context(config, model_config)
    if kind == "cuda":
        from engine.worker.startup import memory_profile  # noqa: F401


def _measured_budget(
    config: EngineConfig,
    model: CausalLM,
    spec: CacheSpec,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    max_tokens: int,
    num_seqs: int,
    gpu: GpuMemory,
    clock: StartClock,
) -> MemoryBudget:
    """The memory left on a GPU that holds the weights. Raises OutOfMemoryPlanError if not even one step fits."""
    from engine.worker.startup.memory_profile import measure_steps
    from engine.worker.startup.warmup import choose_matmuls

    weights = weight_bytes(model)
    clock.lap("imports")
    try:
        if not config.enforce_eager:  # cuBLASLt keeps the code of every algorithm that it has run: half a gigabyte
            choose_matmuls(model, dtype, min(num_seqs, max_tokens), max_tokens)
            clock.lap("choice of matmuls")
        needs = measure_steps(
            model, spec, kv_dtype, max_tokens, num_seqs, gpu.device, clock, graphs=not config.enforce_eager,
            share_prefixes=not config.disable_cascade_attn,
        )
    except torch.OutOfMemoryError:
        raise OutOfMemoryPlanError(
            msg("A step of {max_tokens} tokens of {num_seqs} sequences does not fit beside the weights "
                "({weights}) on {device} ({total}, of which others hold {others}).", max_tokens=max_tokens,
                num_seqs=min(num_seqs, max_tokens), weights=gib(weights), device=gpu.device, total=gib(gpu.total),
                others=gib(gpu.others)),
            "--max-num-batched-tokens",
            msg("Lower --max-num-batched-tokens and --max-num-seqs."),
        ) from None
    return gpu_budget(config, weights, needs, gpu, host_bytes(model))


def _start_on_gpu(
    config: EngineConfig,
    model: CausalLM,
    plan: MemoryPlan,
    cache: Cache,
    max_tokens: int,
    gpu: GpuMemory,
    progress: Progress | None,
    clock: StartClock,
) -> "DeviceRunner":
    """A runner with compiled kernels and recorded graphs."""
    from engine.worker.device_runner import DeviceRunner

    with torch.inference_mode():
        runner = DeviceRunner(
            model, plan.spec, num_rows=plan.max_num_seqs + 1, max_model_len=plan.max_model_len,
            max_num_tokens=max_tokens, device=gpu.device, share_prefixes=not config.disable_cascade_attn,
        )  # fmt: skip
        runner.bind_cache(cache)
    runner.warm_up()
    clock.lap("pages")
    if not config.enforce_eager:
        if progress:
            progress("recording graphs", 0, 1)
        runner.capture_graphs(min(plan.max_num_seqs, max_tokens))
        clock.lap(f"{runner.num_graphs} graphs")
    log.info("%s", outcome(plan, gpu))
    log.info("%s", origins.line())
    gc.collect()
    gc.freeze()  # objects from start-up live until the end: keep collections from traversing them
    return runner


def _deciding(config: EngineConfig, model_config: ModelConfig, gpu: GpuMemory) -> tuple[str, ...]:
    """Key of the warm-cache hint: everything known before weights are loaded that decides which kernels a start
    needs."""
    return torch.cuda.get_device_name(gpu.device), repr(config), repr(model_config.raw)


def _describe(
    plan: MemoryPlan, config: ModelConfig, dtype: torch.dtype, compute: torch.dtype, device: torch.device
) -> dict:
    return {
        "architecture": config.architecture,
        "dtype": str(dtype).removeprefix("torch."),
        "compute_dtype": str(compute).removeprefix("torch."),
        "device": str(device),
        "hidden_size": config.hidden_size,
        "memory_plan": plan.table(),
        "kernels": origins.counts() if device.type == "cuda" else {},
    }
