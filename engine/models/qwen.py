"""Qwen2, Qwen2.5 and dense Qwen3: Llama's decoder with another attention block.

    Qwen2: biases on q, k and v, none on the output projection
    Qwen3: no biases; every head's q and k is RMS-normalised (over head_dim) before RoPE
"""

from dataclasses import replace

from engine.layers.attention import Attention
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.models.base import Weights
from engine.models.config.model import ModelConfig
from engine.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen2Attention(LlamaAttention):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(replace(config, attention_bias=True))
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size)


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.attention = Attention(
            config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5, config.sliding_window,
            q_norm=self.q_norm, k_norm=self.k_norm,
        )  # fmt: skip

    def weights(self, prefix: str) -> Weights:
        norms = {f"{prefix}q_norm.weight": self.q_norm.weight, f"{prefix}k_norm.weight": self.k_norm.weight}
        return {**super().weights(prefix), **norms}


class _QwenForCausalLM(LlamaForCausalLM):
    attention: type[LlamaAttention]

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        for block in self.blocks:  # weights have no memory yet, so replacing a block costs nothing
            block.self_attn = self.attention(config)


class Qwen2ForCausalLM(_QwenForCausalLM):
    attention = Qwen2Attention


class Qwen3ForCausalLM(_QwenForCausalLM):
    attention = Qwen3Attention
