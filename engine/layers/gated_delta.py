"""A Gated DeltaNet layer: a recurrent layer, whose state has the same size however long the sequence is."""

from typing import Any

import torch
from torch import nn

from engine.core.kv.spec import StateLayer
from engine.kernels.recurrent.reference import (
    DeviceRecurrentBatch,
    RecurrentBatch,
    causal_conv,
    decay_and_beta,
    gated_delta_rule,
    gated_rms_norm,
)
from engine.layers.gemm_inputs import Activations, QuantizedRows
from engine.layers.linear import Linear, MergedLinear
from engine.layers.weight_memory import empty_parameter


class ByKeyHead(MergedLinear):
    """Fused linear layers whose checkpoints may interleave by key head: all parts of the first head, then of the
    second, ...

    In memory the parts always follow one another.
    """

    def __init__(self, in_features: int, out_sizes: list[int], key_heads: int, *, mixed_on_disk: bool) -> None:
        super().__init__(in_features, out_sizes)
        self.key_heads = key_heads
        self.is_mixed = mixed_on_disk

    def finalize(self, *, keep_weight: bool = False) -> None:
        if self.is_mixed:
            each = [size // self.key_heads for size in self.out_sizes]
            outputs = torch.arange(self.out_features, device=self.weight.device).view(self.key_heads, -1)
            self.method.reorder(self, torch.cat([part.flatten() for part in outputs.split(each, 1)]))
            self.is_mixed = False
        super().finalize(keep_weight=keep_weight)


class GatedDeltaNet(nn.Module):
    """[T, H] -> [T, H].

        x ─► q, k, v ─► causal convolution, silu ─► the gated delta rule ─► norm, gated by z ─► out_proj
          ├► b, a ─► how much a token writes and keeps ──┘                          │
          └► z ─────────────────────────────────────────────────────────────────────┘

    The worker binds `state`: the rule's [num_slots, HV, V, K] in `state_dtype`, the convolution's [num_slots, W, C];
    see engine.kernels.recurrent.reference.
    """

    state: tuple[torch.Tensor, ...]
    state_dtype = "float32"  # one of STATE_DTYPES

    def __init__(
        self,
        hidden_size: int,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int,
        eps: float,
        mixed_on_disk: bool = False,
    ) -> None:
        super().__init__()
        self.key_heads, self.value_heads = key_heads, value_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        self.key_size, self.value_size = key_heads * key_dim, value_heads * value_dim
        self.channels = 2 * self.key_size + self.value_size
        self.eps = eps
        self.mixed_on_disk = mixed_on_disk  # Qwen3-Next
        sizes = [self.key_size, self.key_size, self.value_size, self.value_size]
        self.in_proj_qkvz = ByKeyHead(hidden_size, sizes, key_heads, mixed_on_disk=mixed_on_disk)
        self.in_proj_ba = ByKeyHead(hidden_size, [value_heads] * 2, key_heads, mixed_on_disk=mixed_on_disk)
        self.in_proj_ba.quantizable = False  # it is small and decides what the state keeps: never quantised
        self.conv_weight = empty_parameter(self.channels, 1, conv_width)
        self.a_log = _float_parameter(value_heads)
        self.dt_bias = _float_parameter(value_heads)
        self.norm_weight = empty_parameter(value_dim)
        self.out_proj = Linear(self.value_size, hidden_size)

    def cache_layer(self) -> StateLayer:
        dtype = str(self.conv_weight.dtype).removeprefix("torch.")
        shapes = (self.value_heads, self.value_dim, self.key_dim), (self.conv_weight.shape[-1], self.channels)
        return StateLayer(shapes, (self.state_dtype, dtype))

    def forward(self, x: Activations, batch: RecurrentBatch | DeviceRecurrentBatch) -> torch.Tensor:
        return self.out_proj(self.heads(x, batch))

    def heads(
        self, x: Activations, batch: RecurrentBatch | DeviceRecurrentBatch
    ) -> torch.Tensor | QuantizedRows:
        """Everything before the output projection: [T, H] -> [T, HV V]."""
        qkv, z = self.in_proj_qkvz(x).split((self.channels, self.value_size), -1)
        ba, early = self.in_proj_ba.in_order(x)
        if isinstance(batch, DeviceRecurrentBatch):
            return self._on_device(qkv, z, ba, batch, early=early)
        return self._on_cpu(qkv, z, ba, batch)

    def _on_cpu(self, qkv: torch.Tensor, z: torch.Tensor, ba: torch.Tensor, batch: RecurrentBatch) -> torch.Tensor:
        state, conv_state = self.state
        mixed = causal_conv(qkv, self.conv_weight.squeeze(1), conv_state, batch)
        q, k, v = mixed.split((self.key_size, self.key_size, self.value_size), -1)
        keys, values = (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)
        b, a = ba.chunk(2, -1)
        g, beta = decay_and_beta(a, b, self.a_log, self.dt_bias)
        q, k, v = q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, values)
        out = gated_delta_rule(q, k, v, g, beta, state, batch)
        return gated_rms_norm(out, z.unflatten(-1, values), self.norm_weight, self.eps).flatten(1)

    def _on_device(
        self, qkv: torch.Tensor, z: torch.Tensor, ba: torch.Tensor, batch: DeviceRecurrentBatch, *, early: bool
    ) -> torch.Tensor | QuantizedRows:
        """`early`: when the next kernel starts, everything but `ba` is complete."""
        from engine.kernels.pointwise import norm
        from engine.kernels.recurrent import decode, prefill

        out = torch.empty(qkv.shape[0], self.value_heads, self.value_dim, dtype=qkv.dtype, device=qkv.device)
        arguments = self.kernel_arguments(qkv, ba, batch, out)
        if batch.chunks is not None:
            assert batch.q_starts is not None and batch.counts is not None  # noqa: PT018
            prefill.prefill(*arguments, q_starts=batch.q_starts, counts=batch.counts, chunks=batch.chunks)
        decode.decode(*arguments, q_starts=batch.q_starts, counts=batch.counts, early=early)
        if self.out_proj.wants_fp8(out.shape[0]):
            quantized = norm.gated_rms_norm_to_fp8(out, z, self.norm_weight, self.eps)
            return QuantizedRows(*quantized, out.dtype)
        return norm.gated_rms_norm(out, z, self.norm_weight, self.eps)

    def kernel_arguments(
        self, qkv: torch.Tensor, ba: torch.Tensor, batch: DeviceRecurrentBatch, out: torch.Tensor
    ) -> tuple[Any, ...]:
        """Arguments common to recurrent.prefill and recurrent.decode."""
        from engine.kernels.recurrent.shape import DeltaShape

        shape = DeltaShape(self.key_heads, self.value_heads, self.key_dim, self.value_dim)
        weights = self.conv_weight.squeeze(1), self.a_log, self.dt_bias
        return qkv, ba, *weights, batch.positions, batch.slots, *self.state, shape, out

    def weights(self, prefix: str) -> dict[str, torch.Tensor]:
        qkvz, ba = self.in_proj_qkvz, self.in_proj_ba
        if self.mixed_on_disk:
            projections = {**qkvz.weights(f"{prefix}in_proj_qkvz."), **ba.weights(f"{prefix}in_proj_ba.")}
        else:
            projections = {
                **qkvz.weights(f"{prefix}in_proj_qkv.", slice(0, self.channels)),
                **qkvz.weights(f"{prefix}in_proj_z.", slice(self.channels, None)),
                **ba.part_weights(prefix, ("in_proj_b", "in_proj_a")),
            }
        return {
            **projections,
            f"{prefix}conv1d.weight": self.conv_weight,
            f"{prefix}A_log": self.a_log,
            f"{prefix}dt_bias": self.dt_bias,
            f"{prefix}norm.weight": self.norm_weight,
            **self.out_proj.weights(f"{prefix}out_proj."),
        }


def _float_parameter(size: int) -> nn.Parameter:
    """A float32 parameter, whatever the model's dtype, because it goes through an exponential."""
    return nn.Parameter(torch.empty(size, dtype=torch.float32, device="meta"), requires_grad=False)
