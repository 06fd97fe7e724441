"""What this build and a device can honour, without importing torch: the command line and the engine refuse alike.

Each refusal is one sentence that names the flag, and says what to do instead.
"""

from pathlib import Path

from engine.config import PAGE_SIZES, STATE_DTYPES, TABLE_PLACES, EngineConfig
from engine.errors import ConfigError

# Grows with the code that makes them work.
CPU_QUANTIZATION: frozenset[str] = frozenset()
CPU_KV_DTYPES = frozenset({"auto", "bfloat16", "float16", "float32"})
CUDA_QUANTIZATION = frozenset({"fp8"})
CUDA_KV_DTYPES = frozenset({"auto", "bfloat16", "float16", "fp8", "fp8_e4m3"})
MIN_COMPUTE_CAPABILITY = (8, 0)  # bf16 matrix units
FP8_COMPUTE_CAPABILITY = (8, 9)


def nvidia_driver_present() -> bool:
    """Whether a CUDA device may exist here: the driver's control node. The engine process itself asks torch."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()  # the second under WSL


def resolve_device(requested: str, cuda_available: bool) -> str:
    """ "cpu" or "cuda". Raises ConfigError for `--device cuda` where there is none."""
    if requested == "cuda" and not cuda_available:
        raise ConfigError(
            "--device cuda: no CUDA GPU is usable on this machine.", "--device",
            "Leave the flag out, use --device cpu, or check the driver with nvidia-smi.",
        )
    if requested == "auto":
        return "cuda" if cuda_available else "cpu"
    return requested


def check_capabilities(config: EngineConfig, device: str) -> None:
    """Raise ConfigError, naming the flag, for what `device` ("cpu" or "cuda") cannot do."""
    quantization = CPU_QUANTIZATION if device == "cpu" else CUDA_QUANTIZATION
    kv_dtypes = CPU_KV_DTYPES if device == "cpu" else CUDA_KV_DTYPES
    if config.quantization is not None and config.quantization not in quantization:
        raise ConfigError(
            f"--quantization {config.quantization} is not available on {device}.", "--quantization",
            "Leave the flag out to run the checkpoint in its own precision.",
        )
    if config.kv_cache_dtype not in kv_dtypes:
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype} is not available on {device}.", "--kv-cache-dtype",
            f"Use one of: {', '.join(sorted(kv_dtypes))}.",
        )
    if config.mamba_ssm_cache_dtype not in ("auto", *STATE_DTYPES):
        raise ConfigError(
            f"--mamba-ssm-cache-dtype {config.mamba_ssm_cache_dtype} is not available.", "--mamba-ssm-cache-dtype",
            f"Use one of: auto, {', '.join(STATE_DTYPES)}.",
        )
    if config.per_layer_embeddings not in ("auto", *TABLE_PLACES):
        raise ConfigError(
            f"--per-layer-embeddings {config.per_layer_embeddings} is not available.", "--per-layer-embeddings",
            f"Use one of: auto, {', '.join(TABLE_PLACES)}.",
        )
    if device == "cpu" and config.per_layer_embeddings == "gpu":
        raise ConfigError(
            "--per-layer-embeddings gpu is not available on cpu.", "--per-layer-embeddings",
            "Leave the flag out: all weights are in host memory.",
        )
    if device == "cpu" and config.batch_invariant:
        raise ConfigError(
            "--batch-invariant is not available on cpu: its libraries choose the order of sums by the size of a step.",
            "--batch-invariant", "Leave the flag out, or use a GPU.",
        )
    if config.block_size is not None and config.block_size not in PAGE_SIZES:
        raise ConfigError(
            f"--block-size {config.block_size} is not available.", "--block-size",
            f"Use one of: {', '.join(map(str, PAGE_SIZES))}.",
        )
    if config.tensor_parallel_size != 1:
        where = "a CPU" if device == "cpu" else "more than one GPU"
        raise ConfigError(
            f"--tensor-parallel-size {config.tensor_parallel_size} is not available: this engine cannot yet split a "
            f"model over {where}.", "--tensor-parallel-size", "Use 1.",
        )
