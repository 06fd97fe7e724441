"""What a model would take of a GPU, without the GPU and without the weights: config.json and the engine's flags.

Weights, pages, states and the split of what is left come from the code that the engine plans with when it starts. What
it measures there (activations, graphs, overhead, buffers) is a parameter here; without measurements, activations are
the upper bound that the engine uses on a CPU, overhead is a CUDA context, and the rest counts as nothing.
"""

from dataclasses import dataclass

import torch

from engine.capabilities import MIN_COMPUTE_CAPABILITY, check_capabilities
from engine.config import DEFAULT_PAGE_SIZE, EngineConfig
from engine.core.kv.planner import MemoryBudget, MemoryPlan, plan_memory
from engine.core.kv.spec import CacheSpec
from engine.errors import ConfigError
from engine.models.config.model import ModelConfig
from engine.models.loading.loader import quantize
from engine.models.registry import model_class
from engine.worker.build import DEFAULT_SEQS, gpu_defaults, resolve_dtype, resolve_kv_dtype, wanted_context
from engine.worker.memory import activation_bytes, host_bytes, loaded_bytes

_CONTEXT = 3 << 28  # a CUDA context, kernels' code and library workspaces, where nobody has measured them


@dataclass(frozen=True, slots=True)
class PlannedCard:
    """A GPU that need not be here."""

    name: str
    total: int                   # bytes, as the driver reports them
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes that an engine measured on such a GPU with these flags."""

    activations: int
    graphs: int
    overhead: int
    buffers: int


def plan_engine(config: EngineConfig, card: PlannedCard, measured: Measured | None = None) -> MemoryPlan:
    """Raises ModelError, ConfigError or OutOfMemoryPlanError, as the engine would."""
    if card.capability < MIN_COMPUTE_CAPABILITY:
        version = ".".join(map(str, card.capability))
        raise ConfigError(f"{card.name} has compute capability {version}; at least 8.0 is needed.", "--device",
                          "Use a newer GPU.")  # fmt: skip
    check_capabilities(config, "cuda")
    model_config = ModelConfig.load(config.model)
    dtype = resolve_dtype(config, model_config)
    wanted = wanted_context(config, model_config)
    build, before = model_class(model_config), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = build(model_config, wanted or model_config.max_position_embeddings).eval()
    finally:
        torch.set_default_dtype(before)
    model.set_state_dtype(config.mamba_ssm_cache_dtype, "cuda")
    if config.quantization is not None:
        quantize(model, config.quantization)
    if config.per_layer_embeddings != "gpu":
        for table in model.lookup_tables():
            table.on_host = True  # it has no weights to move

    spec = CacheSpec(
        tuple(model.cache_layers()), resolve_kv_dtype(config, dtype).itemsize,
        config.block_size or DEFAULT_PAGE_SIZE["cuda"],
    )  # fmt: skip
    weights, usable = loaded_bytes(model), int(card.total * config.gpu_memory_utilization)
    seqs, tokens = gpu_defaults(config, model_config, spec, dtype, card.total, usable - weights)
    tokens = config.max_num_batched_tokens or tokens
    if measured is None:
        most = min(config.max_num_seqs or seqs, tokens)
        measured = Measured(activation_bytes(model_config, dtype, tokens, most), 0, _CONTEXT, 0)
    budget = MemoryBudget(
        card.total, usable, weights, measured.activations, config.kv_cache_memory_bytes, measured.graphs,
        measured.overhead, measured.buffers, host_bytes(model),
    )  # fmt: skip
    return plan_memory(
        budget, spec, device=card.name, max_model_len=wanted, model_max_len=model_config.max_position_embeddings,
        max_num_seqs=config.max_num_seqs, default_num_seqs=seqs, usual_num_seqs=DEFAULT_SEQS["cuda"],
        step_tokens=tokens,
    )  # fmt: skip
