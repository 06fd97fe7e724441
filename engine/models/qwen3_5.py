"""Qwen3.5, Qwen3.6 (text) and Qwen3-Next: by turns three recurrent layers (Gated DeltaNet) and one of gated attention.

    h += mixer(norm(h))        h += mlp(norm(h))        norms multiply by 1 + w

    mixer = Gated DeltaNet     a state of fixed size for each sequence (engine/layers/gated_delta.py)
          | attention          heads of 256, of which RoPE rotates 64; norms of q and k; a gate for each number:
                               o_proj(attention(q, k, v) * sigmoid(gate))
    mlp   = down(silu(gate(x)) * up(x))
          | experts(x) + sigmoid(shared_gate(x)) * shared_expert(x)

Checkpoints of the multimodal model load, too; their vision tensors and those of the drafter (mtp) are ignored.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from engine.core.kv.spec import AttentionLayer, CacheLayer
from engine.kernels.recurrent.reference import DeviceRecurrentBatch, RecurrentBatch
from engine.layers.activation import gate_mul
from engine.layers.attention import Attention
from engine.layers.context import StateBatch, get_context
from engine.layers.embed import Embedding, LMHead
from engine.layers.gated_delta import GatedDeltaNet
from engine.layers.gemm_inputs import Activations, QuantizedRows, UnnormedRows
from engine.layers.last_tokens import keep_last
from engine.layers.linear import Linear, MergedLinear
from engine.layers.moe import SparseMLP
from engine.layers.norm import WideRMSNorm
from engine.layers.rope import Rope, RotaryEmbedding
from engine.models.base import CausalLM, Weights
from engine.models.config.model import ModelConfig
from engine.models.config.qwen3_5 import Qwen35Config, read_qwen3_5
from engine.models.llama import LlamaMLP

if TYPE_CHECKING:
    from engine.kernels.moe.decode import DenseBranch

_MULTIMODAL = "model.language_model."  # where those checkpoints have the text model


def _norm(size: int, config: ModelConfig) -> WideRMSNorm:
    return WideRMSNorm(size, config.rms_norm_eps, offset=1.0)


class GatedQKV(MergedLinear):
    """q, k, v and the gate of attention. On disk the gate of each head follows its q; here it comes last."""

    def __init__(self, config: ModelConfig) -> None:
        self.shape = config.num_heads, 2, config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        super().__init__(config.hidden_size, [2 * config.num_heads * config.head_dim, kv_size, kv_size])
        self._is_ordered = False

    def finalize(self, *, keep_weight: bool = False) -> None:
        if not self._is_ordered:
            outputs = torch.arange(self.out_features, device=self.weight.device)
            q, gate = outputs[: self.out_sizes[0]].view(self.shape).unbind(1)
            self.method.reorder(self, torch.cat((q.flatten(), outputs[self.out_sizes[0] :], gate.flatten())))
            self._is_ordered = True
        super().finalize(keep_weight=keep_weight)


class GatedAttention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_size = config.num_heads * config.head_dim
        self.qkv_proj = GatedQKV(config)
        self.o_proj = Linear(self.gate_size, config.hidden_size)
        self.q_norm, self.k_norm = _norm(config.head_dim, config), _norm(config.head_dim, config)
        self.attention = Attention(
            config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5, None,
            q_norm=self.q_norm, k_norm=self.k_norm,
        )  # fmt: skip

    def heads(self, x: Activations, rope: Rope) -> torch.Tensor | QuantizedRows:
        """Everything before the output projection: [T, H] -> [T, Hq D]."""
        qkv, gate = self.qkv_proj(x).tensor_split((-self.gate_size,), -1)
        return gate_mul(gate, self.attention(qkv, rope), "sigmoid", self.o_proj)

    def weights(self, prefix: str) -> Weights:
        return {
            **self.qkv_proj.part_weights(prefix, ("q_proj", "k_proj", "v_proj")),
            **self.o_proj.weights(f"{prefix}o_proj."),
            f"{prefix}q_norm.weight": self.q_norm.weight,
            f"{prefix}k_norm.weight": self.k_norm.weight,
        }


class SharedExpertMLP(SparseMLP):
    """Experts that a router chooses, and a shared expert that every token goes through."""

    def __init__(self, config: ModelConfig, own: Qwen35Config) -> None:
        moe = own.moe
        assert moe is not None
        super().__init__(config.hidden_size, moe.inner, moe.num_experts, moe.top_k, renormalize=moe.renormalize)
        self.shared_expert = LlamaMLP(replace(config, intermediate_size=own.shared_inner))
        self.shared_expert_gate = Linear(config.hidden_size, 1)
        self.shared_expert_gate.quantizable = False
        self.is_stacked = True  # the layout on disk: all experts in one tensor, or a matrix for each

    @property
    def readers(self) -> tuple[Linear, ...]:
        """The GEMMs that read the layer's norm. Experts read it, too, and need it unquantised."""
        return self.shared_expert.gate_up_proj, self.shared_expert_gate, self.gate

    def fits_decode(self, rows: int) -> bool:
        linears = *self.readers, self.shared_expert.down_proj
        return self.experts.fused and all(linear.read_by_experts(rows) for linear in linears)

    def _dense_branch(self) -> "DenseBranch":
        from engine.kernels.moe.decode import DenseBranch

        first, second = self.shared_expert.gate_up_proj, self.shared_expert.down_proj
        return DenseBranch(*first.streamed, *second.streamed, self.shared_expert_gate.weight)

    def fits_block(self, rows: int) -> bool:
        shared = self.shared_expert
        plain = shared.gate_up_proj.is_plain and shared.down_proj.is_plain
        return plain and self.experts.runs_block(rows, self.gate, self._dense_branch())

    def _in_block(self, rows: int) -> bool:
        """Whether the experts' kernels compute the shared expert, too."""
        return self.fits_decode(rows) or self.fits_block(rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self._in_block(x.shape[0]):
            return y
        return y.addcmul_(self.shared_expert_gate(x).sigmoid(), self.shared_expert(x))

    def onto(self, residual: torch.Tensor, x: Activations) -> torch.Tensor | None:
        if isinstance(x, UnnormedRows) and not self.fits_decode(x.values.shape[0]):
            x = x.normed()
        y = super().onto(residual, x)
        if isinstance(x, UnnormedRows):
            return y
        plain = x.plain if isinstance(x, QuantizedRows) else x
        assert plain is not None
        if self._in_block(plain.shape[0]):
            return y
        target = residual if y is None else y
        target.addcmul_(self.shared_expert_gate(plain).sigmoid(), self.shared_expert(x))
        return y

    def weights(self, prefix: str) -> Weights:
        experts = self.experts.stacked_weights if self.is_stacked else self.experts.weights
        return {
            **self.gate.weights(f"{prefix}gate."),
            **experts(f"{prefix}experts."),
            **self.shared_expert.weights(f"{prefix}shared_expert."),
            **self.shared_expert_gate.weights(f"{prefix}shared_expert_gate."),
        }


class Qwen35Layer(nn.Module):
    def __init__(self, config: ModelConfig, own: Qwen35Config, index: int) -> None:
        super().__init__()
        self.input_layernorm = _norm(config.hidden_size, config)
        self.post_attention_layernorm = _norm(config.hidden_size, config)
        self.mixer: GatedAttention | GatedDeltaNet
        if own.layers[index] == "full_attention":
            self.mixer = GatedAttention(config)
        else:
            self.mixer = GatedDeltaNet(
                config.hidden_size, key_heads=own.key_heads, value_heads=own.value_heads, key_dim=own.key_dim,
                value_dim=own.value_dim, conv_width=own.conv_width, eps=config.rms_norm_eps,
                mixed_on_disk=own.mixed_on_disk,
            )  # fmt: skip
        self.mlp = SharedExpertMLP(config, own) if own.sparse[index] else LlamaMLP(config)

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        rope: Rope,
        batch: RecurrentBatch | DeviceRecurrentBatch,
        *,
        is_last: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The residual stream is x + residual; either may be missing, in the arguments and in the result."""
        mixer, mlp = self.mixer, self.mlp
        if isinstance(mixer, GatedAttention):
            normed, residual = self.input_layernorm.add(x, residual, mixer.qkv_proj)
            heads, project = mixer.heads(normed, rope), mixer.o_proj
        else:
            normed, residual = self.input_layernorm.add(x, residual, mixer.in_proj_qkvz, mixer.in_proj_ba)
            heads, project = mixer.heads(normed, batch), mixer.out_proj
        if is_last:
            heads, residual = keep_last(heads), keep_last(residual)
        x = project.onto(residual, heads)
        if isinstance(mlp, LlamaMLP):
            normed, residual = self.post_attention_layernorm.add(x, residual, mlp.gate_up_proj)
            return mlp.down_proj.onto(residual, mlp.gate_up_proj.gated(normed, mlp.down_proj)), residual
        normed, residual = self.post_attention_layernorm.add(x, residual, *mlp.readers)
        return mlp.onto(residual, normed), residual

    def weights(self, prefix: str) -> Weights:
        norms = {
            f"{prefix}input_layernorm.weight": self.input_layernorm.weight,
            f"{prefix}post_attention_layernorm.weight": self.post_attention_layernorm.weight,
        }
        name = "self_attn" if isinstance(self.mixer, GatedAttention) else "linear_attn"
        return {**norms, **self.mixer.weights(f"{prefix}{name}."), **self.mlp.weights(f"{prefix}mlp.")}


def _recurrent_batch(positions: torch.Tensor, state: StateBatch) -> RecurrentBatch | DeviceRecurrentBatch:
    """The step in the form that recurrent layers need: made once for all of them."""
    if not positions.is_cuda:
        return RecurrentBatch.build(positions, state.slots, state.q_starts, state.counts)
    if len(state.slots) == len(positions):
        return DeviceRecurrentBatch(positions, state.slots)
    from engine.kernels.recurrent.prefill import plan_chunks

    chunks = plan_chunks(state.counts, state.num_chunks)
    return DeviceRecurrentBatch(positions, state.slots, state.q_starts, state.counts, chunks)


class Qwen35ForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        own = read_qwen3_5(config.raw, config.rope, is_next=config.architecture == "Qwen3NextForCausalLM")
        self._state_dtype = own.state_dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.blocks = [Qwen35Layer(config, own, i) for i in range(config.num_layers)]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = _norm(config.hidden_size, config)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.tie(self.embed_tokens)
        self.set_state_dtype("auto", "cpu")
        self.rope = RotaryEmbedding(config.head_dim, max_model_len, own.rope)
        self._prefix = _MULTIMODAL if config.architecture.endswith("ForConditionalGeneration") else "model."

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        context = get_context()
        assert context.state is not None, "the worker gave this step no state slots"
        batch = _recurrent_batch(context.positions, context.state)
        x, residual = None, self.embed_tokens(token_ids)
        rope = self.rope.rows(context.positions, residual.dtype)
        for layer in self.blocks:
            x, residual = layer(x, residual, rope, batch, is_last=layer is self.blocks[-1])
        return self.norm(residual) if x is None else self.norm(x, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def cache_layers(self) -> list[CacheLayer]:
        attention = AttentionLayer(self.config.num_kv_heads, self.config.head_dim)
        mixers = [layer.mixer for layer in self.blocks]
        return [m.cache_layer() if isinstance(m, GatedDeltaNet) else attention for m in mixers]

    def cache_modules(self) -> list[nn.Module]:
        mixers = [layer.mixer for layer in self.blocks]
        return [m if isinstance(m, GatedDeltaNet) else m.attention for m in mixers]

    def set_state_dtype(self, wanted: str, device: str) -> None:
        """`auto`: the dtype that the checkpoint names; if it names none, on a GPU the model's dtype, which halves the
        bytes that a step moves.

        float16 is never used, because the numbers of a state are not bounded.
        """
        if wanted == "auto":
            own = "bfloat16" if device == "cuda" and self.embed_tokens.weight.dtype == torch.bfloat16 else "float32"
            wanted = self._state_dtype or own
        for layer in self.blocks:
            if isinstance(layer.mixer, GatedDeltaNet):
                layer.mixer.state_dtype = wanted

    def adapt(self, names: Iterable[str]) -> None:
        stacked = any(name.endswith(".mlp.experts.gate_up_proj") for name in names)
        for layer in self.blocks:
            if isinstance(layer.mlp, SharedExpertMLP):
                layer.mlp.is_stacked = stacked

    def weights(self) -> Weights:
        prefix = self._prefix
        found: dict[str, torch.Tensor] = {
            f"{prefix}embed_tokens.weight": self.embed_tokens.weight,
            f"{prefix}norm.weight": self.norm.weight,
        }
        if not self.config.tie_word_embeddings:
            found |= self.lm_head.weights("lm_head.")
        for i, layer in enumerate(self.blocks):
            found |= layer.weights(f"{prefix}layers.{i}.")
        return found

    def ignores(self, name: str) -> bool:
        """The vision tower, the drafter's head, and a head that is on disk although it is tied."""
        return (
            super().ignores(name)
            or name.startswith(("model.visual.", "mtp."))
            or (self.config.tie_word_embeddings and name == "lm_head.weight")
        )
