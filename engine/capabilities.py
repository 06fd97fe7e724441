"""What this build and a device support, without importing torch, so that the command line and the engine refuse the
same.

Each refusal is one sentence that names the flag, and says what to do instead.
"""

from pathlib import Path

from engine.config import PAGE_SIZES, STATE_DTYPES, TABLE_PLACES, EngineConfig
from engine.errors import ConfigError
from engine.message import msg

# Add to these together with the code that implements them.
CHECKPOINT_QUANTIZATION = frozenset({"awq", "compressed-tensors", "gptq", "modelopt"})  # methods of checkpoints
ONLINE_INTEGERS = frozenset({"int8", "int4", "int4-g32"})  # of 16-bit checkpoints, while they load
CPU_QUANTIZATION = ONLINE_INTEGERS | CHECKPOINT_QUANTIZATION
INT8_KV = frozenset({"int8", "int8_per_token_head"})  # the second is vLLM's name
CPU_KV_DTYPES = frozenset({"auto", "bfloat16", "float16", "float32"}) | INT8_KV
CUDA_QUANTIZATION = frozenset({"fp8"}) | ONLINE_INTEGERS | CHECKPOINT_QUANTIZATION
CUDA_KV_DTYPES = frozenset({"auto", "bfloat16", "float16", "fp8", "fp8_e4m3"}) | INT8_KV
MIN_COMPUTE_CAPABILITY = (8, 0)  # bf16 tensor cores
FP8_COMPUTE_CAPABILITY = (8, 9)


def nvidia_driver_present() -> bool:
    """Whether a CUDA device may exist here: the driver's control node. The engine process itself asks torch."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()  # the second under WSL


def resolve_device(requested: str, cuda_available: bool) -> str:
    """ "cpu" or "cuda". Raises ConfigError for `--device cuda` if there is no GPU."""
    if requested == "cuda" and not cuda_available:
        raise ConfigError(
            msg("--device cuda: no CUDA GPU is usable on this machine."), "--device",
            msg("Leave the flag out, use --device cpu, or check the driver with nvidia-smi."),
        )
    if requested == "auto":
        return "cuda" if cuda_available else "cpu"
    return requested


def check_capabilities(config: EngineConfig, device: str) -> None:
    """Raise ConfigError, naming the flag, for a setting that `device` ("cpu" or "cuda") does not support."""
    quantization = CPU_QUANTIZATION if device == "cpu" else CUDA_QUANTIZATION
    kv_dtypes = CPU_KV_DTYPES if device == "cpu" else CUDA_KV_DTYPES
    if config.quantization is not None and config.quantization not in quantization:
        raise ConfigError(
            msg("--quantization {quantization} is not available on {device}.", quantization=config.quantization,
                device=device), "--quantization",
            msg("Leave the flag out to run the checkpoint in its own precision."),
        )
    if config.kv_cache_dtype not in kv_dtypes:
        raise ConfigError(
            msg("--kv-cache-dtype {kv_cache_dtype} is not available on {device}.",
                kv_cache_dtype=config.kv_cache_dtype, device=device), "--kv-cache-dtype",
            msg("Use one of: {kv_dtypes}.", kv_dtypes=", ".join(sorted(kv_dtypes))),
        )
    if config.batch_invariant and config.kv_cache_dtype in INT8_KV:
        raise ConfigError(
            msg("--batch-invariant is not available with an int8 KV cache."), "--batch-invariant",
            msg("Leave one of the two out, or use --kv-cache-dtype fp8."),
        )
    if config.mamba_ssm_cache_dtype not in ("auto", *STATE_DTYPES):
        raise ConfigError(
            msg("--mamba-ssm-cache-dtype {mamba_ssm_cache_dtype} is not available.",
                mamba_ssm_cache_dtype=config.mamba_ssm_cache_dtype), "--mamba-ssm-cache-dtype",
            msg("Use one of: auto, {state_dtypes}.", state_dtypes=", ".join(STATE_DTYPES)),
        )
    if config.per_layer_embeddings not in ("auto", *TABLE_PLACES):
        raise ConfigError(
            msg("--per-layer-embeddings {per_layer_embeddings} is not available.",
                per_layer_embeddings=config.per_layer_embeddings), "--per-layer-embeddings",
            msg("Use one of: auto, {table_places}.", table_places=", ".join(TABLE_PLACES)),
        )
    if device == "cpu" and config.per_layer_embeddings == "gpu":
        raise ConfigError(
            msg("--per-layer-embeddings gpu is not available on cpu."), "--per-layer-embeddings",
            msg("Leave the flag out: all weights are in host memory."),
        )
    if device == "cpu" and config.batch_invariant:
        raise ConfigError(
            msg(
                "--batch-invariant is not available on cpu: its libraries choose the order of sums by the size of "
                "a step."
            ),
            "--batch-invariant",
            msg("Leave the flag out, or use a GPU."),
        )
    if config.block_size is not None and config.block_size not in PAGE_SIZES:
        raise ConfigError(
            msg("--block-size {block_size} is not available.", block_size=config.block_size), "--block-size",
            msg("Use one of: {page_sizes}.", page_sizes=", ".join(map(str, PAGE_SIZES))),
        )
    if config.tensor_parallel_size != 1:
        where = msg("a CPU") if device == "cpu" else msg("more than one GPU")
        raise ConfigError(
            msg(
                "--tensor-parallel-size {tensor_parallel_size} is not available: this engine cannot yet split a "
                "model over {where}.",
                tensor_parallel_size=config.tensor_parallel_size,
                where=where,
            ),
            "--tensor-parallel-size",
            msg("Use 1."),
        )
