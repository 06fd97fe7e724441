"""Which kernels a start with these flags needs on a GPU that is not here: the list that the start itself makes."""

from unittest.mock import patch

import torch

from engine.config import DEFAULT_PAGE_SIZE, EngineConfig
from engine.kernels.runtime.gpu_target import Target
from engine.kernels.runtime.launcher import Job, recording
from engine.layers.quant import fp8
from engine.models.config.model import ModelConfig
from engine.models.loading.loader import fill_with_nothing
from engine.prebuild.without_gpu import GPU, without_gpu
from engine.worker.cache import cache_spec
from engine.worker.startup.build import empty_model
from engine.worker.startup.copies import keep_copies
from engine.worker.startup.memory import loaded_bytes
from engine.worker.startup.memory_profile import kernels_of_a_start
from engine.worker.startup.resolve import gpu_defaults, resolve_dtype, resolve_kv_dtype


def kernels_for(config: EngineConfig, target: Target, total: int) -> set[Job]:
    """`total`: bytes of the GPU's memory. Of `config.model` only config.json is read, if its weights are not stored
    quantised (`load_format` "dummy"). Raises ModelError or ConfigError.

    What depends on measurements is left out: libraries whose algorithms are chosen by time may replace some of these.
    """
    model_config = ModelConfig.load(config.model)
    dtype = resolve_dtype(config, model_config)
    quick = patch.object(fp8, "quantize_weight", _without_content)
    with quick, without_gpu(target), recording(target) as jobs, torch.inference_mode():
        model = empty_model(config, model_config, GPU)
        page_size = config.block_size or DEFAULT_PAGE_SIZE["cuda"]
        spec = cache_spec(model.cache_layers(), resolve_kv_dtype(config, dtype), page_size)
        if config.per_layer_embeddings != "gpu":
            for table in model.lookup_tables():
                table.on_host = True
        free = int(total * config.gpu_memory_utilization) - loaded_bytes(model)
        seqs, tokens = gpu_defaults(config, model_config, spec, dtype, total, free)
        fill_with_nothing(model)
        keep_copies(model, config, free)
        kernels_of_a_start(
            model, spec, resolve_kv_dtype(config, dtype), config.max_num_batched_tokens or tokens,
            config.max_num_seqs or seqs, GPU, share_prefixes=not config.disable_cascade_attn,
        )  # fmt: skip
    return set(jobs)


def _without_content(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of fp8.quantize_weight, which takes minutes for a large model: the same shapes."""
    return torch.empty(weight.shape, dtype=fp8.FP8), torch.empty(weight.shape[0], dtype=torch.float32)
