"""Llama, Mistral and SmolLM: pre-norm decoder layers with grouped-query attention and a gated SiLU MLP.

    h += o_proj(attention(rope(qkv(norm(h)))))        h += down(silu(gate(norm(h))) * up(norm(h)))
"""

import torch
from torch import nn

from engine.layers.activation import GatedLinear
from engine.layers.attention import Attention
from engine.layers.context import get_context
from engine.layers.embed import Embedding, LMHead
from engine.layers.gemm_inputs import Activations
from engine.layers.last_tokens import keep_last
from engine.layers.linear import Linear, MergedLinear
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rope, RotaryEmbedding
from engine.models.base import CausalLM, Weights
from engine.models.config.model import ModelConfig


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sizes = [n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        self.qkv_proj = MergedLinear(config.hidden_size, sizes, bias=config.attention_bias)
        self.o_proj = Linear(sizes[0], config.hidden_size, bias=config.attention_bias)
        self.attention = Attention(
            config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5, config.sliding_window
        )

    def forward(self, x: Activations, rope: Rope) -> torch.Tensor:
        return self.o_proj(self.heads(x, rope))

    def heads(self, x: Activations, rope: Rope) -> torch.Tensor:
        """Everything before the output projection: [T, H] -> [T, Hq D]."""
        return self.attention(self.qkv_proj(x), rope)

    def weights(self, prefix: str) -> Weights:
        qkv = self.qkv_proj.part_weights(prefix, ("q_proj", "k_proj", "v_proj"))
        return {**qkv, **self.o_proj.weights(f"{prefix}o_proj.")}


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.gate_up_proj = GatedLinear(config.hidden_size, inner, bias=config.mlp_bias)
        self.down_proj = Linear(inner, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Activations) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj.gated(x, self.down_proj))

    def weights(self, prefix: str) -> Weights:
        gate_up = self.gate_up_proj.part_weights(prefix, ("gate_proj", "up_proj"))
        return {**gate_up, **self.down_proj.weights(f"{prefix}down_proj.")}


class LlamaLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor | None, rope: Rope, *, is_last: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The residual stream is x + residual; either may be missing, in the arguments and in the result."""
        mlp = self.mlp
        normed, residual = self._attend(x, residual, rope, mlp.gate_up_proj, is_last=is_last)
        return mlp.down_proj.onto(residual, mlp.gate_up_proj.gated(normed, mlp.down_proj)), residual

    def _attend(
        self, x: torch.Tensor | None, residual: torch.Tensor | None, rope: Rope, consumer: Linear, *, is_last: bool
    ) -> tuple[Activations, torch.Tensor]:
        """The first half of a layer. Returns the residual stream, and its norm in the form that `consumer` reads."""
        attention = self.self_attn
        normed, residual = self.input_layernorm.add(x, residual, attention.qkv_proj)
        heads = attention.heads(normed, rope)
        if is_last:
            heads, residual = keep_last(heads), keep_last(residual)
        x = attention.o_proj.onto(residual, heads)
        return self.post_attention_layernorm.add(x, residual, consumer)


class LlamaForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.blocks = [LlamaLayer(config) for _ in range(config.num_layers)]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.tie(self.embed_tokens)
        self.rope = RotaryEmbedding(config.head_dim, max_model_len, config.rope)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        x, residual = None, self.embed_tokens(token_ids)
        rope = self.rope.rows(get_context().positions, residual.dtype)
        for layer in self.blocks:
            x, residual = layer(x, residual, rope, is_last=layer is self.blocks[-1])
        return self.norm(residual) if x is None else self.norm(x, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def weights(self) -> Weights:
        found: dict[str, torch.Tensor] = {
            "model.embed_tokens.weight": self.embed_tokens.weight,
            "model.norm.weight": self.norm.weight,
        }
        if not self.config.tie_word_embeddings:
            found |= self.lm_head.weights("lm_head.")
        for i, layer in enumerate(self.blocks):
            prefix = f"model.layers.{i}."
            found[f"{prefix}input_layernorm.weight"] = layer.input_layernorm.weight
            found[f"{prefix}post_attention_layernorm.weight"] = layer.post_attention_layernorm.weight
            found |= layer.self_attn.weights(f"{prefix}self_attn.")
            found |= layer.mlp.weights(f"{prefix}mlp.")
        return found

    def ignores(self, name: str) -> bool:
        """Some checkpoints contain a head although it is tied."""
        return super().ignores(name) or (self.config.tie_word_embeddings and name == "lm_head.weight")
