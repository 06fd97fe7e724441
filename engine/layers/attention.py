"""One attention layer's view of the KV cache: write the step's keys and values, then attend over pages."""

from typing import Any

import torch
from torch import nn

from engine.kernels.attention.reference import AttentionBatch, as_cached, paged_attention, write_kv
from engine.kernels.pointwise.kv_format import KvScale
from engine.layers.context import DeviceBatch, get_context
from engine.layers.norm import RMSNorm, WideRMSNorm, unit_rms
from engine.layers.rope import Rope, rotate


class Attention(nn.Module):
    """Causal grouped-query attention over pages, from the fused projection of a layer to its heads' outputs.

        qkv ─► q, k, v ─► per-head norms (some families) ─► RoPE of q, k ─► k, v into their slots ─► attention

    Variants: `k_eq_v`: V is K before its norm and RoPE. `own_kv=False`: the layer has no K/V of its own and reads
    another layer's cache. `v_norm_eps`: V is normalised, by a norm without a weight.

    On a GPU, everything before the attention is one kernel. Layers like Llama's have a special one, which works in
    place. The worker binds `k_cache` and `v_cache` [num_pages, page_size, Hkv, D] after it has planned memory.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch_invariant = False  # GPU: use attention.batch_invariant in all steps; then decode steps have tiles, too
    k_scale: KvScale = 1.0  # an fp8 cache holds k / k_scale and v / v_scale (models/loading/kv_scales.py);
    v_scale: KvScale = 1.0  # of an int8 cache these are its own scales, which the worker binds
    group: int = 0   # whose pages these are (engine/core/kv/spec.py); the worker sets it

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        *,
        v_norm_eps: float | None = None,
        softcap: float | None = None,
        k_eq_v: bool = False,
        own_kv: bool = True,
    ) -> None:
        super().__init__()
        self.q_norm, self.k_norm = q_norm, k_norm
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.window = window
        self.v_norm_eps = v_norm_eps
        self.softcap = softcap
        self.k_eq_v = k_eq_v
        self.own_kv = own_kv

    def forward(self, qkv: torch.Tensor, rope: Rope) -> torch.Tensor:
        """qkv [T, (Hq + 2 Hkv) D], or the parts that the layer has; may be overwritten -> [T, Hq D]."""
        context = get_context()
        slot_mapping, batch = context.of_group(self.group)
        if isinstance(batch, DeviceBatch):
            return self._on_device(qkv, rope, context.positions, slot_mapping, batch)
        return self._on_cpu(qkv, rope, slot_mapping, batch)

    def _on_cpu(
        self, qkv: torch.Tensor, rope: Rope, slot_mapping: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        qk = heads[:, : self.num_heads + self.num_kv_heads] if self.own_kv else heads
        if self.q_norm is not None:
            parts = [self.q_norm(qk[:, : self.num_heads])]
            if self.own_kv and self.k_norm is not None:
                parts.append(self.k_norm(qk[:, self.num_heads :]))
            qk = torch.cat(parts, 1)
        qk = rotate(qk, rope)
        q = qk[:, : self.num_heads]
        if self.own_kv:
            k, v = qk[:, self.num_heads :], heads[:, -self.num_kv_heads :]
            if self.v_norm_eps is not None:
                v = unit_rms(v, self.v_norm_eps)
            write_kv(k, v, self.k_cache, self.v_cache, slot_mapping, **self._kv_scales)
            if k.dtype != self.k_cache.dtype and (batch.prefills or self.lends):
                # Round the chunk's own K and V as the cache will, so that results do not depend on where the prompt was
                # cut into chunks.
                dtype = self.k_cache.dtype
                k, v = as_cached(k, self.k_scale, dtype), as_cached(v, self.v_scale, dtype)
            self._step_k_v = (k, v) if self.lends else None
        else:
            (owner,) = self._owner
            assert owner._step_k_v is not None, "its owner comes first in a step"
            k, v = owner._step_k_v
        out = paged_attention(
            q, k, v, self.k_cache, self.v_cache, batch, scale=self.scale, window=self.window, softcap=self.softcap,
            **self._kv_scales,
        )  # fmt: skip
        return out.view(qkv.shape[0], -1)

    def borrow_from(self, owner: "Attention") -> None:
        """Read the step's own K and V from `owner`: this layer has none. (The worker binds the owner's cache.)"""
        self._owner = (owner,)  # in a tuple, so that PyTorch does not register it as a submodule
        owner.lends = True

    def _on_device(
        self,
        qkv: torch.Tensor,
        rope: Rope,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        batch: DeviceBatch,
    ) -> torch.Tensor:
        from engine.kernels.attention import batch_invariant, shared_prefix
        from engine.kernels.attention import chunks as attention_chunks
        from engine.kernels.attention import decode as attention_decode

        tokens = qkv.shape[0]
        if self._like_llama and 2 * rope.cos.shape[-1] == self.head_dim:
            q, own = self._heads_like_llama(qkv, rope, positions, slot_mapping)
        else:
            q, own = self._heads(qkv, rope, positions, slot_mapping, keep=batch.tiles is not None)
        out = torch.empty(tokens, self.num_heads, self.head_dim, dtype=qkv.dtype, device=qkv.device)
        if self.batch_invariant:
            assert batch.tiles is not None and batch.starts is not None  # noqa: PT018
            assert batch.q_starts is not None and batch.counts is not None  # noqa: PT018
            own_kv = None if own is None or not batch.has_own_keys else (own[:, 0], own[:, 1])
            batch_invariant.attention(
                q, own_kv, self.k_cache, self.v_cache, batch.tiles, batch.rows, batch.starts, batch.q_starts,
                batch.counts, batch.block_table, out, block_q=batch.tile_tokens, scale=self.scale, window=self.window,
                softcap=self.softcap, **self._kv_scales,
            )  # fmt: skip
            return out.view(tokens, -1)
        single = tokens if batch.tiles is None else batch.num_single
        if single:
            splits = attention_decode.num_splits(single, self.num_kv_heads, batch.multiprocessors)
            prefix = None
            if batch.shared is not None and self.can_share:
                prefix = shared_prefix.attend_prefix(
                    q[:single], self.k_cache, self.v_cache, batch.rows[:single], batch.shared, batch.block_table,
                    splits=shared_prefix.num_splits(single, self.num_heads, self.num_kv_heads, batch.multiprocessors),
                    scale=self.scale, softcap=self.softcap, **self._kv_scales,
                )  # fmt: skip
            attention_decode.decode(
                q[:single], self.k_cache, self.v_cache, batch.rows[:single], batch.seq_lens[:single],
                batch.block_table, out[:single], splits=splits, scale=self.scale, window=self.window,
                softcap=self.softcap, shared=prefix,
                shortest=attention_decode.shortest_slice(
                    single, self.num_kv_heads, self.head_dim, batch.multiprocessors
                ),
                **self._kv_scales,
            )  # fmt: skip
        if batch.tiles is not None:
            assert batch.starts is not None and batch.q_starts is not None and batch.counts is not None  # noqa: PT018
            assert own is not None
            k, v = own.unbind(1)
            splits = 1
            if self.window is None:
                splits = attention_chunks.num_slices(
                    tokens - batch.num_single, batch.tile_tokens, self.num_kv_heads, self.head_dim,
                    batch.multiprocessors, qkv.device,
                )  # fmt: skip
            attention_chunks.mixed(
                q, k, v, self.k_cache, self.v_cache, batch.tiles, batch.rows, batch.starts, batch.q_starts,
                batch.counts, batch.block_table, out, block_q=batch.tile_tokens, scale=self.scale, window=self.window,
                softcap=self.softcap, splits=splits, **self._kv_scales,
            )  # fmt: skip
        return out.view(tokens, -1)

    @property
    def can_share(self) -> bool:
        """Whether decode attention can read a prefix once for the sequences that share it."""
        from engine.kernels.attention.shared_prefix import LARGEST_HEAD

        return self.window is None and self.head_dim <= LARGEST_HEAD and not self.batch_invariant

    @property
    def _kv_scales(self) -> dict[str, Any]:
        """The scales of the cache that this layer reads, as keyword arguments of the kernels."""
        owner = self if self.own_kv else self._owner[0]
        return {"k_scale": owner.k_scale, "v_scale": owner.v_scale}

    @property
    def _like_llama(self) -> bool:
        unlike = self.k_eq_v or not self.own_kv or self.v_norm_eps is not None
        return not unlike and not isinstance(self.q_norm, WideRMSNorm)

    @property
    def _norms(self) -> dict[str, Any]:
        """The norms of q and k, as keyword arguments: weights, epsilon, and the offset of wide norms."""
        if self.q_norm is None:
            return {}
        k_norm = None if self.k_norm is None else self.k_norm.weight
        norms = {"q_norm": self.q_norm.weight, "k_norm": k_norm, "eps": self.q_norm.eps}
        return norms | {"offset": self.q_norm.offset} if isinstance(self.q_norm, WideRMSNorm) else norms

    def _heads_like_llama(
        self, qkv: torch.Tensor, rope: Rope, positions: torch.Tensor, slot_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In place: q [T, Hq, D] and the step's own k and v [T, 2, Hkv, D], which are also written to the cache."""
        from engine.kernels.pointwise import fused

        q = fused.rope_and_write_kv(
            qkv, rope.cos, rope.sin, positions, slot_mapping, self.k_cache, self.v_cache, self.num_heads,
            heads=8 if self.batch_invariant else 0, **self._norms, **self._kv_scales,
        )  # fmt: skip
        own = qkv[:, self.num_heads * self.head_dim :].view(qkv.shape[0], 2, self.num_kv_heads, self.head_dim)
        return q, own

    def _heads(
        self, qkv: torch.Tensor, rope: Rope, positions: torch.Tensor, slot_mapping: torch.Tensor, *, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same for other kinds of heads, in new tensors. k and v are returned only with `keep`, for prompt
        chunks."""
        from engine.kernels.attention.heads import heads_and_write_kv

        assert self.q_norm is None or isinstance(self.q_norm, WideRMSNorm)
        norms = self._norms
        if self.v_norm_eps is not None:
            norms.setdefault("eps", self.v_norm_eps)
        q, own = heads_and_write_kv(
            qkv, rope.cos, rope.sin, rope.distance, positions, slot_mapping, self.k_cache, self.v_cache, self.num_heads,
            v_norm=self.v_norm_eps is not None, k_eq_v=self.k_eq_v, own_kv=self.own_kv, keep=keep, **norms,
            **self._kv_scales,
        )  # fmt: skip
        if not self.own_kv:
            (owner,) = self._owner
            own = owner._step_kv
        self._step_kv = own if self.lends else None
        return q, own

    _step_kv: torch.Tensor | None = None  # K and V of the current mixed step, for layers that borrow them
    _step_k_v: tuple[torch.Tensor, torch.Tensor] | None = None  # the same on a CPU, for every step
    lends = False
    _owner: "tuple[Attention]"


def tile_tokens(
    num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, *, batch_invariant: bool = False
) -> int:
    """Query tokens in a tile of the mixed kernel; times the heads that share a key head, they fill the tile's rows."""
    if batch_invariant:
        from engine.kernels.attention.batch_invariant import tile_tokens

        return tile_tokens(num_heads // num_kv_heads)
    from engine.kernels.attention.chunks import query_rows

    return max(1, query_rows(head_dim, device) // (num_heads // num_kv_heads))
