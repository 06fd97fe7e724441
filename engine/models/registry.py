"""Maps the architecture in config.json to the class that runs it. Nothing outside this table is ever imported."""

from pathlib import Path

import torch

from engine.errors import ModelError
from engine.message import msg
from engine.models.base import CausalLM
from engine.models.config.model import ModelConfig
from engine.models.gemma import Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from engine.models.gemma4 import Gemma4ForCausalLM, Gemma4ForConditionalGeneration
from engine.models.llama import LlamaForCausalLM
from engine.models.mixtral import MixtralForCausalLM
from engine.models.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM
from engine.models.qwen3_5 import Qwen35ForCausalLM
from engine.models.qwen3_moe import Qwen3MoeForCausalLM
from engine.models.qwen3_vl import Qwen3VLForConditionalGeneration

_ARCHITECTURES: dict[str, type[CausalLM]] = {
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Gemma3ForConditionalGeneration": Gemma3ForConditionalGeneration,
    "Gemma4ForCausalLM": Gemma4ForCausalLM,
    "Gemma4ForConditionalGeneration": Gemma4ForConditionalGeneration,
    "Gemma4UnifiedForCausalLM": Gemma4ForCausalLM,
    "Gemma4UnifiedForConditionalGeneration": Gemma4ForConditionalGeneration,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3_5ForCausalLM": Qwen35ForCausalLM,
    "Qwen3_5ForConditionalGeneration": Qwen35ForCausalLM,
    "Qwen3_5MoeForCausalLM": Qwen35ForCausalLM,
    "Qwen3_5MoeForConditionalGeneration": Qwen35ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "Qwen3NextForCausalLM": Qwen35ForCausalLM,
    "Qwen3VLForConditionalGeneration": Qwen3VLForConditionalGeneration,
}


def model_class(config: ModelConfig) -> type[CausalLM]:
    try:
        return _ARCHITECTURES[config.architecture]
    except KeyError:
        raise ModelError(
            msg("config.json: architecture {architecture} is not supported.",
                architecture=f"{config.architecture!r}"),
            msg("This version runs {architectures}.", architectures=", ".join(sorted(_ARCHITECTURES))),
        ) from None


def empty_model(model_dir: Path, dtype: torch.dtype = torch.bfloat16) -> CausalLM:
    """The model that a directory's config.json describes, without memory for its weights, ready to load."""
    config = ModelConfig.load(model_dir)
    torch.set_default_dtype(dtype)
    try:
        return model_class(config)(config, min(4096, config.max_position_embeddings)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
