"""Plans the memory that a model would take on a GPU, without the GPU and the weights, from config.json and the engine's
flags.

Weights, pages, states and the split of the remaining memory come from the code with which the engine plans at start-up.
What it measures there (activations, graphs, overhead, buffers) is a parameter here. Without measurements these are
estimated; docs/performance/planner.md compares the estimates with measurements.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from engine.capabilities import MIN_COMPUTE_CAPABILITY, check_capabilities
from engine.config import DEFAULT_PAGE_SIZE, EngineConfig
from engine.core.kv.planner import GIB, MemoryBudget, MemoryPlan, plan_memory
from engine.core.kv.spec import CacheLayer, StateLayer
from engine.errors import ConfigError, ModelError
from engine.layers.embed import LMHead
from engine.layers.linear import Linear
from engine.layers.moe import ExpertLinear, Router
from engine.layers.quant.head import copied_head, copy_kept
from engine.layers.quant.packed_gpu import copies_kept
from engine.layers.token_bytes import token_bytes
from engine.message import msg, reason
from engine.models.base import CausalLM
from engine.models.config.model import ModelConfig
from engine.models.loading.loader import quantize
from engine.models.loading.quantized import use_stored_formats
from engine.models.registry import model_class
from engine.worker.cache import cache_spec
from engine.worker.startup.memory import host_bytes, loaded_bytes
from engine.worker.startup.resolve import DEFAULT_SEQS, gpu_defaults, resolve_dtype, resolve_kv_dtype, wanted_context

_RESERVED = 5 * GIB // 4  # for the CUDA context, kernels' code, library workspaces, graphs and buffers
_SCORED_ROWS = 512        # logits that are copied to float32 at a time
SHAPES = Path(__file__).parent / "bench/configs"  # of models that are planned and measured without their weights


@dataclass(frozen=True, slots=True)
class PlannedGpu:
    """A GPU that need not be in this machine."""

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


@dataclass(frozen=True, slots=True)
class _Shape:
    """The memory that a model's tensors and caches take, in bytes."""

    config: ModelConfig
    weights: int         # including rotary tables for the model's longest context
    per_position: int    # bytes of the rotary tables per position
    on_host: int
    per_token: int       # bytes that a stream's next token moves: the weights that it uses, states read and written
    layers: tuple[CacheLayer, ...]
    int4_copies: int     # bytes of second copies of int4 weights
    head_copy: int       # ... of the output head
    token_width: int     # numbers a token takes in the widest layer of a step
    row_width: int       # bytes of a sequence's logits, including a capped copy


def shipped_shape(name: str) -> Path | None:
    """The directory with the config.json of a model that Atoll was measured with; it holds no weights."""
    found = SHAPES / name
    return found if found.parent == SHAPES and (found / "config.json").is_file() else None


def native_context(model: Path) -> int:
    """The longest context that config.json allows. Raises ModelError."""
    return ModelConfig.load(model).max_position_embeddings


def plan_engine(config: EngineConfig, card: PlannedGpu, measured: Measured | None = None) -> MemoryPlan:
    """The memory plan. Raises ModelError, ConfigError or OutOfMemoryPlanError, as the engine would."""
    if card.capability < MIN_COMPUTE_CAPABILITY:
        version = ".".join(map(str, card.capability))
        raise ConfigError(msg("{name} has compute capability {version}; at least 8.0 is needed.", name=card.name,
                              version=version), "--device",
                          msg("Use a newer GPU."))  # fmt: skip
    check_capabilities(config, "cuda")
    shape = _shape_of(config)
    dtype, wanted = resolve_dtype(config, shape.config), wanted_context(config, shape.config)
    page_size = config.block_size or DEFAULT_PAGE_SIZE["cuda"]
    spec = cache_spec(shape.layers, resolve_kv_dtype(config, dtype), page_size)
    usable = int(card.total * config.gpu_memory_utilization)
    weights = shape.weights
    if config.int4_copy == "auto" and config.quantized_activations == "auto" and card.capability == (9, 0):
        weights += copies_kept(shape.int4_copies, usable - weights)
    if not config.batch_invariant:
        weights += copy_kept(shape.head_copy, usable - weights)
    seqs, tokens = gpu_defaults(config, shape.config, spec, dtype, card.total, usable - weights)
    tokens = config.max_num_batched_tokens or tokens
    if measured is None:
        most = min(config.max_num_seqs or seqs, tokens)
        measured = Measured(_activations(shape, dtype, tokens, most), 0, _RESERVED, 0)
    budget = MemoryBudget(
        card.total, usable, weights, measured.activations, config.kv_cache_memory_bytes, measured.graphs,
        measured.overhead, measured.buffers, shape.on_host,
    )  # fmt: skip
    return plan_memory(
        budget, spec, device=card.name, max_model_len=wanted,
        model_max_len=shape.config.max_position_embeddings, max_num_seqs=config.max_num_seqs, default_num_seqs=seqs,
        usual_num_seqs=DEFAULT_SEQS["cuda"], step_tokens=tokens,
    )  # fmt: skip


def weight_bytes(config: EngineConfig) -> tuple[int, int]:
    """(on a GPU, in host memory). Raises ModelError or ConfigError."""
    shape = _shape_of(config)
    return shape.weights, shape.on_host


def bytes_per_token(config: EngineConfig) -> int:
    """The bytes that one stream's next token moves over the memory bus at least, whatever its context."""
    return _shape_of(config).per_token


def full_requests(plan: MemoryPlan, context: int) -> int:
    """How many requests of `context` tokens fit into the plan's pages at a time, at most as many as may run at once."""
    low, high = 0, plan.max_num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        if plan.spec.slabs_for(context, plan.step_tokens, middle) <= plan.num_slabs:
            low = middle
        else:
            high = middle - 1
    return low


def _activations(shape: _Shape, dtype: torch.dtype, tokens: int, rows: int) -> int:
    """The memory that PyTorch's allocator holds after the largest step.

    A step computes layers first, then logits. Logits reuse the blocks that layers freed as far as they fit: about half.
    """
    layers = tokens * shape.token_width * dtype.itemsize
    logits = rows * shape.row_width + _SCORED_ROWS * shape.config.vocab_size * 4
    return max(layers, logits) + min(layers, logits) // 2


def _shape_of(config: EngineConfig) -> _Shape:
    model_config = ModelConfig.load(config.model)
    shape = _built(
        config.model.resolve(), (config.model / "config.json").stat().st_mtime_ns, resolve_dtype(config, model_config),
        config.mamba_ssm_cache_dtype, config.quantization, config.per_layer_embeddings != "gpu",
    )  # fmt: skip
    longest = model_config.max_position_embeddings
    unused = longest - (wanted_context(config, model_config) or longest)
    return replace(shape, weights=shape.weights - unused * shape.per_position)


@lru_cache(maxsize=256)
def _built(
    directory: Path, changed: int, dtype: torch.dtype, states: str, quantization: str | None, tables_on_host: bool,
) -> _Shape:  # fmt: skip
    """Build the model as the engine does before it loads: its tensors have shapes, but no memory yet."""
    config = ModelConfig.load(directory)
    build, before = model_class(config), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):  # tables of positions too: a long context's take seconds to compute
            model = build(config, config.max_position_embeddings).eval()
    except (RuntimeError, MemoryError) as error:
        raise ModelError(msg("The shapes of {name} are too large to lay out on this machine: {error}.",
                             name=directory.name, error=reason(error))) from None
    finally:
        torch.set_default_dtype(before)
    model.set_state_dtype(states, "cuda")
    stored = use_stored_formats(model, config, directory, None)
    if quantization is not None:
        quantize(model, quantization, None if stored is None else stored.method)
    if tables_on_host:
        for table in model.lookup_tables():
            table.on_host = True  # it has no weights to move
    tables = {id(t): t for t in model.buffers() if t.dim() and t.shape[0] == config.max_position_embeddings}
    per_position = sum(table.nbytes // table.shape[0] for table in tables.values())
    capped = 4 if config.raw.get("final_logit_softcapping") else 0
    read = token_bytes(model)
    head = copied_head(model, read)
    head_copy = 0 if head is None else head.method.copy_bytes(head)
    unread = 0 if head is None else head.loaded_bytes - head_copy
    moved = sum(2 * sum(layer.sizes) for layer in model.cache_layers() if isinstance(layer, StateLayer))
    return _Shape(config, loaded_bytes(model), per_position, host_bytes(model), read - unread + moved,
                  tuple(model.cache_layers()), _int4_copies(model), head_copy, _token_width(model, config),
                  config.vocab_size * (dtype.itemsize + capped))  # fmt: skip


def _int4_copies(model: CausalLM) -> int:
    linear = [module for module in model.modules() if isinstance(module, Linear) and not isinstance(module, LMHead)]
    return sum(module.method.copy_bytes(module) for module in linear)


def _token_width(model: CausalLM, config: ModelConfig) -> int:
    """The numbers per token of the residual stream and its copies, of queries, keys and values, and of the widest GEMM
    and its activation. For each expert of a token: the activation, its copy in fp8, and the expert's output."""
    modules = list(model.modules())
    widest = max((m.out_features for m in modules if isinstance(m, Linear) and m.out_features != config.vocab_size),
                 default=0)  # fmt: skip
    heads = config.num_heads + 2 * config.num_kv_heads
    width = 4 * config.hidden_size + 3 * heads * config.head_dim + 3 * widest // 2
    routers = [m for m in modules if isinstance(m, Router)]
    if routers:
        expert = max(m.out_features for m in modules if isinstance(m, ExpertLinear))
        width += routers[0].top_k * (3 * expert // 4 + config.hidden_size)
    return width
