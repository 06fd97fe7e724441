"""Gemma 2 and 3, and what Gemma 4 shares with them: alternating sliding-window and full layers, with norms before and
after attention and MLP.

    h += post_attention_norm(attention(input_norm(h)))        h += post_feedforward_norm(mlp(pre_feedforward_norm(h)))

    Gemma 2: caps on attention scores and logits
    Gemma 3: per-head norms of q and k; sliding and full layers each have a rope
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.core.kv.spec import AttentionLayer, CacheLayer
from engine.layers.activation import GatedLinear
from engine.layers.attention import Attention
from engine.layers.context import continue_with_last_tokens, get_context
from engine.layers.embed import Embedding, LMHead
from engine.layers.gemm_inputs import Activations
from engine.layers.last_tokens import keep_last
from engine.layers.linear import Linear, MergedLinear
from engine.layers.norm import WideRMSNorm
from engine.layers.rope import Rope, RotaryEmbedding
from engine.models.base import CausalLM, Weights
from engine.models.config.gemma import GemmaConfig, GemmaLayerConfig, read_gemma2, read_gemma3
from engine.models.config.model import ModelConfig

_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
_OTHER_SENSES = re.compile(
    r"(model\.)?(vision_tower|vision_embedder|embed_vision|audio_tower|embed_audio|multi_modal_projector)\."
)


class GemmaAttention(nn.Module):
    def __init__(self, config: ModelConfig, gemma: GemmaConfig, layer: GemmaLayerConfig) -> None:
        super().__init__()
        heads, dim = config.num_heads, layer.head_dim
        self.parts = {"q_proj": heads * dim}
        if layer.kv_from is None:
            self.parts["k_proj"] = layer.num_kv_heads * dim
            if not layer.k_eq_v:
                self.parts["v_proj"] = layer.num_kv_heads * dim
        self.norms: dict[str, WideRMSNorm] = {}
        if gemma.qk_norm:
            names = ("q_norm", "k_norm") if layer.kv_from is None else ("q_norm",)
            self.norms = {name: WideRMSNorm(dim, config.rms_norm_eps, offset=gemma.norm_offset) for name in names}
        self.qkv_proj = MergedLinear(config.hidden_size, list(self.parts.values()))
        self.o_proj = Linear(heads * dim, config.hidden_size)
        self.attention = Attention(
            heads, layer.num_kv_heads, dim, gemma.attention_scale, layer.window, **self.norms,
            v_norm_eps=config.rms_norm_eps if gemma.v_norm else None, softcap=gemma.attention_softcap,
            k_eq_v=layer.k_eq_v, own_kv=layer.kv_from is None,
        )  # fmt: skip

    def heads(self, x: Activations, rope: Rope) -> torch.Tensor:
        """Everything before the output projection: [T, H] -> [T, Hq D]."""
        return self.attention(self.qkv_proj(x), rope)

    def weights(self, prefix: str) -> Weights:
        norms = {f"{prefix}{name}.weight": norm.weight for name, norm in self.norms.items()}
        return {**self.qkv_proj.part_weights(prefix, self.parts), **norms, **self.o_proj.weights(f"{prefix}o_proj.")}


class GemmaMLP(nn.Module):
    def __init__(self, hidden_size: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = GatedLinear(hidden_size, inner, gate="gelu_tanh")
        self.down_proj = Linear(inner, hidden_size)

    def forward(self, x: Activations) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj.gated(x, self.down_proj))

    def weights(self, prefix: str) -> Weights:
        gate_up = self.gate_up_proj.part_weights(prefix, ("gate_proj", "up_proj"))
        return {**gate_up, **self.down_proj.weights(f"{prefix}down_proj.")}


class Following(NamedTuple):
    """The reader of a layer's output: the next layer's norm, and the GEMM after it (None: the model's output)."""

    norm: WideRMSNorm
    consumer: Linear | None
    reads_last: bool  # it reads only the last tokens


class GemmaLayer(nn.Module):
    def __init__(self, config: ModelConfig, gemma: GemmaConfig, layer: GemmaLayerConfig) -> None:
        super().__init__()

        def norm() -> WideRMSNorm:
            return WideRMSNorm(config.hidden_size, config.rms_norm_eps, offset=gemma.norm_offset)

        self.kind = layer.kind
        self.input_layernorm = norm()
        self.self_attn = GemmaAttention(config, gemma, layer)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = GemmaMLP(config.hidden_size, layer.intermediate_size)
        self.post_feedforward_layernorm = norm()

    def forward(
        self, x: torch.Tensor, normed: Activations, rope: Rope, following: Following
    ) -> tuple[torch.Tensor, Activations]:
        """x [T, H] (changed in place) and its input norm -> x and the following layer's norm of it; only of the last
        tokens if no later layer reads others."""
        heads = self.self_attn.heads(normed, rope)
        if following.reads_last:
            heads, x = keep_last(heads), keep_last(x)
        (normed,) = self.post_attention_layernorm.onto(
            x, self.self_attn.o_proj(heads), (self.pre_feedforward_layernorm,), self.mlp.gate_up_proj
        )
        (normed,) = self.post_feedforward_layernorm.onto(
            x, self.mlp(normed), (following.norm,), following.consumer
        )
        return x, normed

    def weights(self, prefix: str) -> Weights:
        found = {f"{prefix}{name}.weight": m.weight for name, m in self.named_children() if isinstance(m, WideRMSNorm)}
        return {**found, **self.self_attn.weights(f"{prefix}self_attn."), **self.mlp.weights(f"{prefix}mlp.")}


class GemmaForCausalLM(CausalLM):
    """The text model, alone or as part of a multimodal checkpoint, whose other tensors are not loaded."""

    read: Callable[[dict[str, Any]], GemmaConfig]
    prefix = "model."  # of the tensors' names; `adapt` may find another

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.gemma = gemma = type(self).read(config.raw)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, scale=config.hidden_size**0.5)
        self.blocks = [self._layer(layer) for layer in gemma.layers]
        for block, layer in zip(self.blocks, gemma.layers, strict=True):
            if layer.kv_from is not None:
                block.self_attn.attention.borrow_from(self.blocks[layer.kv_from].self_attn.attention)
        self.last_to_write = max(i for i, layer in enumerate(gemma.layers) if layer.kv_from is None)
        self.layers = nn.ModuleList(self.blocks)
        self.norm = WideRMSNorm(config.hidden_size, config.rms_norm_eps, offset=gemma.norm_offset)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.tie(self.embed_tokens)
        self.rope_tables: dict[str, RotaryEmbedding] = {}
        for kind, dim in {(layer.kind, layer.head_dim): None for layer in gemma.layers}:
            self.rope_tables[kind] = RotaryEmbedding(dim, max_model_len, gemma.ropes[kind])
        self.ropes = nn.ModuleDict(self.rope_tables)

    def _layer(self, layer: GemmaLayerConfig) -> GemmaLayer:
        return GemmaLayer(self.config, self.gemma, layer)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._through_layers(self.embed_tokens(token_ids))

    def _through_layers(self, x: torch.Tensor, *of_layers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Embeddings [T, H], which it overwrites, and further inputs of each layer -> hidden states.

        When only layers without keys of their own remain, all tokens except each prompt's last are dropped, because
        nothing would read what these layers compute for them.
        """
        ropes = self._rope_rows(x.dtype)
        end = len(self.blocks) - 1 if get_context().last_only is None else self.last_to_write
        readers = [Following(layer.input_layernorm, layer.self_attn.qkv_proj, False) for layer in self.blocks[1:]]
        readers.append(Following(self.norm, None, False))
        readers[end] = readers[end]._replace(reads_last=True)
        normed, x = self.blocks[0].input_layernorm.add(x, None, self.blocks[0].self_attn.qkv_proj)
        for i, (layer, following) in enumerate(zip(self.blocks, readers, strict=True)):
            x, normed = layer(x, normed, ropes[layer.kind], following, *(each[i] for each in of_layers))
            if following.reads_last and following.consumer is not None:
                of_layers = tuple([*each[: i + 1], *map(keep_last, each[i + 1 :])] for each in of_layers)
                continue_with_last_tokens()
                ropes = self._rope_rows(x.dtype)
        assert isinstance(normed, torch.Tensor)
        return normed

    def _rope_rows(self, dtype: torch.dtype) -> dict[str, Rope]:
        positions = get_context().positions
        return {kind: table.rows(positions, dtype) for kind, table in self.rope_tables.items()}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Soft-capped logits in float32: near the cap, bf16 could not tell them apart."""
        logits, cap = self.lm_head(hidden), self.gemma.final_softcap
        if cap is None:
            return logits
        if logits.is_cuda:
            from engine.kernels.pointwise.fused import softcap

            return softcap(logits, cap)
        return logits.float().div_(cap).tanh_().mul_(cap)

    def cache_layers(self) -> list[CacheLayer]:
        return [AttentionLayer(c.num_kv_heads, c.head_dim, c.window, c.kv_from) for c in self.gemma.layers]

    def adapt(self, names: Iterable[str]) -> None:
        """Find the prefix of the text model: there are three, for text-only, multimodal and older checkpoints."""
        there = set(names)
        self.prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in there), self.prefix)

    def weights(self) -> Weights:
        found: dict[str, torch.Tensor] = {
            f"{self.prefix}embed_tokens.weight": self.embed_tokens.weight,
            f"{self.prefix}norm.weight": self.norm.weight,
        }
        if not self.config.tie_word_embeddings:
            found |= self.lm_head.weights(self._head_name.removesuffix("weight"))
        for i, layer in enumerate(self.blocks):
            found |= layer.weights(f"{self.prefix}layers.{i}.")
        return found

    def ignores(self, name: str) -> bool:
        """Some checkpoints contain a head although it is tied."""
        tied = self.config.tie_word_embeddings and name == self._head_name
        return super().ignores(name) or tied or _OTHER_SENSES.match(name) is not None

    @property
    def _head_name(self) -> str:
        return "language_model.lm_head.weight" if self.prefix.startswith("language_model.") else "lm_head.weight"


class Gemma2ForCausalLM(GemmaForCausalLM):
    read = staticmethod(read_gemma2)


class Gemma3ForCausalLM(GemmaForCausalLM):
    read = staticmethod(read_gemma3)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    prefix = "language_model.model."
