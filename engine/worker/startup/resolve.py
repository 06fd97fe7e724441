"""What the flags of a configuration mean on this device and for this model: device, dtypes, context and defaults."""

import torch

from engine.capabilities import INT8_KV, MIN_COMPUTE_CAPABILITY, resolve_device
from engine.config import EngineConfig
from engine.core.kv.planner import GIB, sensible_batched_tokens, sensible_seqs
from engine.core.kv.spec import CacheSpec
from engine.errors import ConfigError
from engine.message import msg
from engine.models.config.model import ModelConfig
from engine.worker.startup.memory import activation_bytes

DEFAULT_SEQS = {"cpu": 256, "cuda": 1024}
DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
DEFAULT_MAX_ITL_MS = {"cpu": 0, "cuda": 60}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def choose_device(config: EngineConfig) -> torch.device:
    """The device that was asked for; by default the GPU if there is one. A GPU that was asked for is never silently
    replaced.

    Raises ConfigError for a GPU that is missing, too old, or too full.
    """
    kind = resolve_device(config.device, torch.cuda.is_available())
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    version = ".".join(map(str, capability))
    if capability < MIN_COMPUTE_CAPABILITY:
        raise ConfigError(msg("{name} has compute capability {version}; at least 8.0 is needed.", name=name,
                              version=version), "--device",
                          msg("Use a newer GPU, or --device cpu."))
    torch.cuda.empty_cache()  # left by an earlier engine in this process
    free, total = torch.cuda.mem_get_info(device)
    wanted = int(total * config.gpu_memory_utilization)
    if free < wanted:
        raise ConfigError(
            msg("{name} has {free} GiB of {total} GiB free, but --gpu-memory-utilization "
                "{gpu_memory_utilization} asks for {wanted} GiB.", name=name, free=f"{free / GIB:.1f}",
                total=f"{total / GIB:.1f}", gpu_memory_utilization=config.gpu_memory_utilization,
                wanted=f"{wanted / GIB:.1f}"), "--gpu-memory-utilization",
            msg("Stop other programs that use the GPU (nvidia-smi lists them), or use at most {free}.",
                free=int(free / total * 99) / 100),
        )  # fmt: skip
    return device


def resolve_dtype(config: EngineConfig, model_config: ModelConfig) -> torch.dtype:
    return _DTYPES[model_config.dtype if config.dtype == "auto" else config.dtype]


def resolve_kv_dtype(config: EngineConfig, compute: torch.dtype) -> torch.dtype:
    """The dtype of cached keys and values; `compute` is that of activations.

    A CPU that computes in float32 also caches float32 if that fits. Otherwise it would have to widen every page that it
    reads, in every layer and step.
    """
    if config.kv_cache_dtype in ("fp8", "fp8_e4m3"):
        return torch.float8_e4m3fn
    if config.kv_cache_dtype in INT8_KV:
        return torch.int8
    return compute if config.kv_cache_dtype == "auto" else _DTYPES[config.kv_cache_dtype]


def wanted_context(config: EngineConfig, model_config: ModelConfig) -> int | None:
    """The context length to honour, or None to fit it to memory."""
    wanted, limit = config.max_model_len, model_config.max_position_embeddings
    if wanted is None or wanted == "auto":
        return None
    if wanted < 2:
        raise ConfigError(msg("--max-model-len {wanted}: a request needs at least 2 tokens.", wanted=wanted),
                          "--max-model-len")
    if wanted > limit:
        raise ConfigError(
            msg("--max-model-len {wanted}: the model was trained for {limit} positions (max_position_embeddings).",
                wanted=wanted, limit=limit),
            "--max-model-len", msg("Use at most {limit}.", limit=limit),
        )
    return wanted


def gpu_defaults(
    config: EngineConfig, model_config: ModelConfig, spec: CacheSpec, dtype: torch.dtype, total: int, free: int
) -> tuple[int, int]:
    """The defaults of (sequences at a time, tokens per step) on a GPU of `total` bytes, of which the weights leave
    `free`."""
    tokens = sensible_batched_tokens(
        DEFAULT_BATCHED_TOKENS["cuda"], total, free, lambda n: activation_bytes(model_config, dtype, n, 0)
    )
    return sensible_seqs(spec, DEFAULT_SEQS["cuda"], min(free, config.kv_cache_memory_bytes or free)), tokens
