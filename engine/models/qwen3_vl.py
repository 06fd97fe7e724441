"""The language model of Qwen3-VL: dense Qwen3 under another prefix.

Its RoPE uses three positions (time, height, width), which are equal for text, and the vision tower adds to hidden
states only at image positions (DeepStack). So for pure text the model is exactly Qwen3.
"""

from engine.models.base import Weights
from engine.models.qwen import Qwen3ForCausalLM

_PREFIX = "model.language_model."


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    def weights(self) -> Weights:
        found = super().weights()
        return {_PREFIX + n.removeprefix("model.") if n.startswith("model.") else n: t for n, t in found.items()}

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or name.startswith("model.visual.")
