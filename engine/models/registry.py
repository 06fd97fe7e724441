"""Architecture name in config.json -> the class that runs it. Nothing outside this table is ever imported."""

from torch import nn

from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.llama import LlamaForCausalLM

_ARCHITECTURES: dict[str, type[nn.Module]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
}


def model_class(config: ModelConfig) -> type[nn.Module]:
    try:
        return _ARCHITECTURES[config.architecture]
    except KeyError:
        raise ModelError(
            f"config.json: architecture {config.architecture!r} is not supported.",
            f"This version runs {', '.join(sorted(_ARCHITECTURES))}.",
        ) from None
