"""Gemma 4, text: Gemma's layers with a scalar after each; an embedding for each layer, or experts parallel to the MLP.

    h += post_attention_norm(attention(input_norm(h)))                                     as in gemma.py
    h += post_feedforward_norm(mlp(pre_feedforward_norm(h)))                               likewise, but in 26B-A4B:
    h += post_feedforward_norm(norm_1(mlp(pre_feedforward_norm(h))) + norm_2(experts(pre_norm_2(h), router(h))))
    h += per_layer_norm(per_layer_projection(gelu(per_layer_gate(h)) * e[layer]))          E2B, E4B
    h *= layer_scalar

    e = (token part + norm(projection of the token's embedding) / sqrt(H)) / sqrt(2)       [T, layers, 256]

Attention: q, k and v are all normalised, and scores are not scaled. Full layers have larger heads, and in the large
models v is k. The last layers of the small models have no keys of their own: they read those of the last layer of their
kind that has some.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from engine.layers.activation import gate_mul
from engine.layers.embed import Embedding
from engine.layers.gemm_inputs import Activations, QuantizedRows, UnnormedRows
from engine.layers.last_tokens import keep_last
from engine.layers.linear import Linear
from engine.layers.moe import RoutedExperts, Router, Routing, choose_experts, kernel_rows
from engine.layers.norm import WideRMSNorm
from engine.layers.rope import Rope
from engine.layers.weight_memory import empty_parameter
from engine.models.base import Weights
from engine.models.config.gemma import GemmaConfig, GemmaLayerConfig, read_gemma4
from engine.models.config.model import ModelConfig
from engine.models.config.moe import MoeConfig
from engine.models.gemma import Following, GemmaForCausalLM, GemmaLayer, GemmaMLP

_LAYER_KV = re.compile(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight")


class PerLayerEmbeddings(nn.Module):
    """Token ids [T] and their embeddings [T, H] -> the per-layer embeddings e [T, layers, P]."""

    def __init__(self, config: ModelConfig, gemma: GemmaConfig) -> None:
        super().__init__()
        self.shape = len(gemma.layers), gemma.per_layer_size
        width = len(gemma.layers) * gemma.per_layer_size
        self.embed_tokens_per_layer = Embedding(gemma.per_layer_vocab, width, scale=gemma.per_layer_size**0.5)
        self.per_layer_model_projection = Linear(config.hidden_size, width)
        self.per_layer_projection_norm = WideRMSNorm(gemma.per_layer_size, config.rms_norm_eps)
        self.projection_scale = config.hidden_size**-0.5

    def forward(self, token_ids: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        of_token = self.embed_tokens_per_layer(token_ids).view(-1, *self.shape)
        of_embedding = self.per_layer_model_projection(embeddings) * self.projection_scale
        normed = self.per_layer_projection_norm(of_embedding.view(-1, self.shape[1])).view(-1, *self.shape)
        return (normed + of_token).mul_(2**-0.5)

    def weights(self, prefix: str) -> Weights:
        return {
            f"{prefix}embed_tokens_per_layer.weight": self.embed_tokens_per_layer.weight,
            **self.per_layer_model_projection.weights(f"{prefix}per_layer_model_projection."),
            f"{prefix}per_layer_projection_norm.weight": self.per_layer_projection_norm.weight,
        }


class PerLayerInput(nn.Module):
    """A layer's use of its embedding e [T, P]: project(gelu(gate(x)) * e), and the norm after it."""

    def __init__(self, config: ModelConfig, size: int) -> None:
        super().__init__()
        self.per_layer_input_gate = Linear(config.hidden_size, size)
        self.per_layer_projection = Linear(size, config.hidden_size)
        self.post_per_layer_input_norm = WideRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Activations, e: torch.Tensor) -> torch.Tensor:
        project = self.per_layer_projection
        return project(gate_mul(self.per_layer_input_gate(x), e, "gelu_tanh", project))

    def weights(self, prefix: str) -> Weights:
        return {
            **self.per_layer_input_gate.weights(f"{prefix}per_layer_input_gate."),
            **self.per_layer_projection.weights(f"{prefix}per_layer_projection."),
            f"{prefix}post_per_layer_input_norm.weight": self.post_per_layer_input_norm.weight,
        }


class Gemma4Router(nn.Module):
    """x [T, H] after this module's norm -> the experts of each token; each expert has its own factor."""

    def __init__(self, config: ModelConfig, moe: MoeConfig) -> None:
        super().__init__()
        self.proj = Router(config.hidden_size, moe.num_experts, moe.top_k)
        self.norm = WideRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.per_expert_scale = empty_parameter(moe.num_experts)
        self._root: float | None = config.hidden_size**-0.5

    def finalize(self) -> None:
        """After loading: multiply the norm's weight by a constant factor, in float32."""
        if self._root is not None:
            self.norm.weight = nn.Parameter(self.norm.weight.float() * self._root, requires_grad=False)
            self._root = None

    def forward(self, x: torch.Tensor) -> Routing:
        return choose_experts(self.proj(x), self.proj.top_k, expert_scale=self.per_expert_scale)


class ParallelExperts(nn.Module):
    """Experts in parallel with a layer's MLP, and the norms around both."""

    def __init__(self, config: ModelConfig, moe: MoeConfig) -> None:
        super().__init__()
        self.router = Gemma4Router(config, moe)
        self.experts = RoutedExperts(config.hidden_size, moe.inner, moe.num_experts, gate="gelu_tanh")
        self.pre_feedforward_layernorm_2 = WideRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm_1 = WideRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm_2 = WideRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.stacked = True  # the experts' layout on disk; quantisers write a matrix for each expert instead

    def forward(self, x: torch.Tensor | QuantizedRows, for_router: torch.Tensor) -> torch.Tensor:
        """x [T, H] normalised for the experts, and for the router."""
        return self.experts(x, self.router(for_router))

    def with_mlp(
        self, mlp: GemmaMLP, normed: Activations, x: Activations, for_router: Activations
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The results of the MLP and of these experts; for few rows, the same kernels compute both."""
        assert isinstance(for_router, torch.Tensor)
        assert not isinstance(normed, UnnormedRows)
        assert not isinstance(x, UnnormedRows)
        in_kernels = self._in_kernels(mlp, normed, x, for_router) if for_router.is_cuda else None
        return (mlp(normed), self(x, for_router)) if in_kernels is None else in_kernels

    def _in_kernels(
        self,
        mlp: GemmaMLP,
        normed: torch.Tensor | QuantizedRows,
        x: torch.Tensor | QuantizedRows,
        for_router: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`with_mlp` in the kernels for few rows, if they take so many and the weights' format."""
        from engine.kernels.moe import decode, few_tokens

        first, second, router, rows = mlp.gate_up_proj, mlp.down_proj, self.router.proj, for_router.shape[0]
        few = all(linear.read_by_experts(rows) for linear in (first, second, router))
        if not self.experts.fused or not (few or (first.is_plain and second.is_plain)):
            return None
        dense = decode.DenseBranch(*first.streamed, *second.streamed)
        options: dict[str, Any] = {
            "top_k": router.top_k, "gate": self.experts.gate, "expert_scale": self.router.per_expert_scale,
            "for_router": for_router, "dense": dense,
        }  # fmt: skip
        if self.experts.takes_dense(rows, dense):
            chosen = None if self.experts.routes(rows, router) else self.router(for_router)
            ours, of_mlp = few_tokens.sparse_block(
                kernel_rows(x), router.weight, *self.experts.stacks, for_dense=kernel_rows(normed), chosen=chosen,
                **options,
            )
        elif few:
            assert isinstance(x, torch.Tensor)
            assert isinstance(normed, torch.Tensor)
            ours, of_mlp = decode.sparse_block(
                x, router.weight, *self.experts.stacks, for_dense=normed, **options
            )
        else:
            return None
        assert of_mlp is not None
        return of_mlp, ours

    def weights(self, prefix: str) -> Weights:
        experts = self.experts.stacked_weights if self.stacked else self.experts.weights
        return {
            **self.router.proj.weights(f"{prefix}router.proj."),
            f"{prefix}router.scale": self.router.norm.weight,
            f"{prefix}router.per_expert_scale": self.router.per_expert_scale,
            f"{prefix}pre_feedforward_layernorm_2.weight": self.pre_feedforward_layernorm_2.weight,
            f"{prefix}post_feedforward_layernorm_1.weight": self.post_feedforward_layernorm_1.weight,
            f"{prefix}post_feedforward_layernorm_2.weight": self.post_feedforward_layernorm_2.weight,
            **experts(f"{prefix}experts."),
        }


class Gemma4Layer(GemmaLayer):
    def __init__(self, config: ModelConfig, gemma: GemmaConfig, layer: GemmaLayerConfig) -> None:
        super().__init__(config, gemma, layer)
        self.per_layer_input = PerLayerInput(config, gemma.per_layer_size) if gemma.per_layer_size else None
        self.sparse = None if gemma.moe is None else ParallelExperts(config, gemma.moe)
        self.layer_scalar = empty_parameter(1)

    def forward(
        self,
        x: torch.Tensor,
        normed: Activations,
        rope: Rope,
        following: Following,
        e: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Activations]:
        sparse, extra = self.sparse, self.per_layer_input
        norms = [self.pre_feedforward_layernorm]
        if sparse is not None:
            norms += sparse.pre_feedforward_layernorm_2, sparse.router.norm
        heads = self.self_attn.heads(normed, rope)
        if following.reads_last:
            heads, x = keep_last(heads), keep_last(x)
            e = None if e is None else keep_last(e)
        y = self.self_attn.o_proj(heads)
        consumers = [self.mlp.gate_up_proj] if sparse is None else [self.mlp.gate_up_proj, sparse.experts]
        normed, *others = self.post_attention_layernorm.onto(x, y, norms, *consumers)
        branch = None
        if sparse is None:
            y = self.mlp(normed)
        else:
            y, experts = sparse.with_mlp(self.mlp, normed, *others)
            branch = sparse.post_feedforward_layernorm_1, experts, sparse.post_feedforward_layernorm_2
        post = self.post_feedforward_layernorm
        if extra is not None:
            assert e is not None
            (changed,) = post.onto(x, y, (), extra.per_layer_input_gate, branch=branch)
            y, branch, post = extra(changed, e), None, extra.post_per_layer_input_norm
        (normed,) = post.onto(
            x, y, (following.norm,), following.consumer, branch=branch, scalar=self.layer_scalar
        )
        return x, normed

    def weights(self, prefix: str) -> Weights:
        found = {**super().weights(prefix), f"{prefix}layer_scalar": self.layer_scalar}
        for part in (self.per_layer_input, self.sparse):
            if part is not None:
                found |= part.weights(prefix)
        return found


class Gemma4ForCausalLM(GemmaForCausalLM):
    read = staticmethod(read_gemma4)

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.per_layer = PerLayerEmbeddings(config, self.gemma) if self.gemma.per_layer_size else None

    def _layer(self, layer: GemmaLayerConfig) -> Gemma4Layer:
        return Gemma4Layer(self.config, self.gemma, layer)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(token_ids)
        if self.per_layer is None:
            return self._through_layers(x)
        return self._through_layers(x, self.per_layer(token_ids, x).unbind(1))

    def lookup_tables(self) -> list[Embedding]:
        return [] if self.per_layer is None else [self.per_layer.embed_tokens_per_layer]

    def adapt(self, names: Iterable[str]) -> None:
        names = set(names)
        super().adapt(names)
        for i, layer in enumerate(self.layers):
            if isinstance(layer, Gemma4Layer) and layer.sparse is not None:
                each = f"{self.prefix}layers.{i}.experts.0.gate_proj.weight"
                layer.sparse.stacked = bool(names) and each not in names

    def weights(self) -> Weights:
        found = super().weights()
        return found if self.per_layer is None else {**found, **self.per_layer.weights(self.prefix)}

    def ignores(self, name: str) -> bool:
        """The checkpoint has unused projections for layers that share keys and values."""
        found = _LAYER_KV.fullmatch(name.removeprefix(self.prefix))
        if found is not None and int(found[1]) < len(self.gemma.layers):
            return self.gemma.layers[int(found[1])].kv_from is not None
        return super().ignores(name)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    prefix = "model.language_model."
