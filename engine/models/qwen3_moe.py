"""Qwen3-MoE: Qwen3's decoder with experts in place of the MLP, in all layers or in every n-th."""

import torch

from engine.layers.gemm_inputs import QuantizedRows
from engine.layers.moe import SparseMLP
from engine.layers.rope import Rope
from engine.models.base import Weights
from engine.models.config.fields import get_field
from engine.models.config.model import ModelConfig
from engine.models.config.moe import MoeConfig, sparse_layers
from engine.models.llama import LlamaForCausalLM, LlamaLayer
from engine.models.qwen import Qwen3ForCausalLM


class ExpertMLP(SparseMLP):
    """The experts of a layer, stored as a matrix for each expert, under Qwen's names."""

    def __init__(self, hidden_size: int, moe: MoeConfig) -> None:
        super().__init__(hidden_size, moe.inner, moe.num_experts, moe.top_k, renormalize=moe.renormalize)

    def weights(self, prefix: str) -> Weights:
        return {**self.gate.weights(f"{prefix}gate."), **self.experts.weights(f"{prefix}experts.")}


class SparseLayer(LlamaLayer):
    """A decoder layer with experts in place of its MLP."""

    def __init__(self, dense: LlamaLayer, mlp: ExpertMLP) -> None:
        super(LlamaLayer, self).__init__()
        self.input_layernorm = dense.input_layernorm
        self.self_attn = dense.self_attn
        self.post_attention_layernorm = dense.post_attention_layernorm
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor | None, rope: Rope, *, is_last: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        normed, residual = self._attend(x, residual, rope, self.mlp.gate, is_last=is_last)
        assert not isinstance(normed, QuantizedRows)  # experts read unquantised activations
        return self.mlp.onto(residual, normed), residual


def make_sparse(model: LlamaForCausalLM, sparse: list[bool], moe: MoeConfig, mlp: type[ExpertMLP] = ExpertMLP) -> None:
    """Replace the layers that have experts. Weights have no memory yet, so this costs nothing."""
    for i in range(len(sparse)):
        if sparse[i]:
            layer = SparseLayer(model.blocks[i], mlp(model.config.hidden_size, moe))
            model.blocks[i] = model.layers[i] = layer


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        renormalize = get_field(config.raw, "norm_topk_prob", bool, False)
        moe = MoeConfig.parse(config.raw, inner="moe_intermediate_size", renormalize=renormalize)
        sparse = sparse_layers(config.raw, config.num_layers)
        super().__init__(config, max_model_len)
        make_sparse(self, sparse, moe)
