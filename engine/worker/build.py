"""From a config to a running engine: check, load, plan memory, allocate, connect."""

import logging
from collections.abc import Callable

import torch

from engine.capabilities import check_capabilities
from engine.config import DEFAULT_PAGE_SIZE, EngineConfig
from engine.core.kv.planner import MemoryPlan, plan_memory
from engine.core.kv.spec import AttentionSpec
from engine.core.loop import EngineCore
from engine.errors import ConfigError
from engine.models.config import ModelConfig
from engine.models.loader import fill_randomly, finalize, load_weights
from engine.models.registry import model_class
from engine.worker.memory import activation_bytes, allocate_kv, cpu_budget, weight_bytes
from engine.worker.runner import Runner

log = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]

_DEFAULT_SEQS = 256
_DEFAULT_BATCHED_TOKENS = 512
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def build_engine(config: EngineConfig, progress: Progress | None = None) -> EngineCore:
    """Load `config.model` and make it ready to step.

    Raises ModelError (the directory is wrong), ConfigError (a flag cannot be honoured here) or OutOfMemoryPlanError
    (it does not fit), each before the expensive work that would be in vain. `progress(stage, done, total)` is called
    while weights load.
    """
    device = choose_device(config)
    model_config = ModelConfig.load(config.model)
    build = model_class(model_config)
    dtype = resolve_dtype(config, model_config)
    check_capabilities(config, device.type)
    max_len_wanted = _wanted_context(config, model_config)

    max_tokens = config.max_num_batched_tokens or _DEFAULT_BATCHED_TOKENS
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = build(model_config, max_len_wanted or model_config.max_position_embeddings).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        if config.load_format == "dummy":
            fill_randomly(model)
        else:
            load_weights(model, config.model, progress)
        finalize(model)

    spec = AttentionSpec(
        model_config.num_layers,
        model_config.num_kv_heads,
        model_config.head_dim,
        dtype.itemsize,
        config.block_size or DEFAULT_PAGE_SIZE[device.type],
    )
    num_seqs = config.max_num_seqs or _DEFAULT_SEQS
    activations = activation_bytes(model_config, dtype, max_tokens, min(num_seqs, max_tokens))
    plan = plan_memory(
        cpu_budget(config, weight_bytes(model), activations),
        spec,
        device=str(device),
        max_model_len=max_len_wanted,
        model_max_len=model_config.max_position_embeddings,
        max_num_seqs=config.max_num_seqs,
        default_num_seqs=_DEFAULT_SEQS,
    )
    log.info("%s", plan.table())

    runner = Runner(
        model,
        num_rows=plan.max_num_seqs + 1,
        max_model_len=plan.max_model_len,
        page_size=plan.page_size,
        device=device,
    )
    with torch.inference_mode():
        runner.bind_cache(allocate_kv(spec, plan.num_pages, dtype, device))
    return EngineCore(
        config,
        runner,
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=max_tokens,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        depth=2 if config.overlap else 1,
        description=_describe(plan, model_config, dtype, device),
    )


def choose_device(config: EngineConfig) -> torch.device:
    """The device asked for. This version computes on the CPU; a GPU that was asked for is never quietly replaced."""
    if config.device == "cuda":
        raise ConfigError("--device cuda: this version computes on the CPU only.", "--device", "Use --device cpu.")
    return torch.device("cpu")


def resolve_dtype(config: EngineConfig, model_config: ModelConfig) -> torch.dtype:
    return _DTYPES[model_config.dtype if config.dtype == "auto" else config.dtype]


def _wanted_context(config: EngineConfig, model_config: ModelConfig) -> int | None:
    """The context length to honour, or None to fit it to memory."""
    wanted, limit = config.max_model_len, model_config.max_position_embeddings
    if wanted is None or wanted == "auto":
        return None
    if wanted < 2:
        raise ConfigError(f"--max-model-len {wanted}: a request needs at least 2 tokens.", "--max-model-len")
    if wanted > limit:
        raise ConfigError(
            f"--max-model-len {wanted}: the model was trained for {limit} positions (max_position_embeddings).",
            "--max-model-len", f"Use at most {limit}.",
        )
    return wanted


def _describe(plan: MemoryPlan, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict:
    return {
        "architecture": config.architecture,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "memory_plan": plan.table(),
    }
