"""Mixtral: Mistral's decoder with experts in place of every layer's MLP (arXiv:2401.04088)."""

from engine.models.base import Weights
from engine.models.config.model import ModelConfig
from engine.models.config.moe import MoeConfig
from engine.models.llama import LlamaForCausalLM
from engine.models.qwen3_moe import ExpertMLP, make_sparse


class MixtralMLP(ExpertMLP):
    """w1 is the gate projection, w3 the up projection, w2 the down projection."""

    def weights(self, prefix: str) -> Weights:
        prefix = prefix.removesuffix("mlp.") + "block_sparse_moe."
        names = ("w1", "w3", "w2")
        return {**self.gate.weights(f"{prefix}gate."), **self.experts.weights(f"{prefix}experts.", names)}


class MixtralForCausalLM(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        moe = MoeConfig.parse(config.raw, inner="intermediate_size", renormalize=True)
        super().__init__(config, max_model_len)
        make_sparse(self, [True] * config.num_layers, moe, MixtralMLP)
