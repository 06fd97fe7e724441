"""Plain-torch twins of the Triton kernels: the same names and arguments (tuning apart), in plain float32 arithmetic.

Tests and the self-test (engine/selftest) compare each kernel with its twin. Twins run on any device and may wait for
it. The twin of sampling.sampling is the CPU's own sampler, engine/worker/sample/sampler.py.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from engine.kernels.moe.tiles import VECTOR_TOKENS, max_blocks

_FP8_MAX = 448.0  # the largest e4m3 number


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    *,
    splits: int = 1,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """attention.decode.decode. `splits` changes nothing here."""
    for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        key, value = _sequence(k_cache, v_cache, block_table[row], length, k_scale, v_scale)
        out[i : i + 1] = _attend(q[i : i + 1], key, value, length - 1, scale, window, softcap)
    return out


def mixed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tiles: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    q_starts: torch.Tensor,
    counts: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    *,
    block_q: int,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """attention.chunks.mixed. Only the sequences that `tiles` lists are computed, tile by tile, as there."""
    for seq, first in tiles.tolist():
        count = min(int(counts[seq]) - first, block_q)
        if count <= 0:
            continue
        start = int(starts[seq]) + first
        key, value = _sequence(k_cache, v_cache, block_table[int(rows[seq])], start + count, k_scale, v_scale)
        at = slice(int(q_starts[seq]) + first, int(q_starts[seq]) + first + count)
        if int(counts[seq]) > 1:  # the chunk's own keys and values in full precision
            own = slice(int(q_starts[seq]), at.stop)
            key[int(starts[seq]) :], value[int(starts[seq]) :] = k[own].float(), v[own].float()
        out[at] = _attend(q[at], key, value, start, scale, window, softcap)
    return out


def _sequence(
    k_cache: torch.Tensor, v_cache: torch.Tensor, pages: torch.Tensor, length: int, k_scale: float, v_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` keys and values of a sequence, [L, Hkv, D] float32."""
    page_size = k_cache.shape[1]
    token = torch.arange(length, device=pages.device)
    page, offset = pages[token // page_size].long(), token % page_size
    key, value = (_indexable(cache)[page, offset].view(cache.dtype) for cache in (k_cache, v_cache))
    return key.float() * k_scale, value.float() * v_scale


def _attend(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """q [n, Hq, D] at positions start ..., key and value [L, Hkv, D] -> [n, Hq, D] in q's dtype."""
    if not key.shape[0]:
        return torch.zeros_like(q)
    group = q.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,lhd->hnl", q.float(), key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    query = torch.arange(start, start + q.shape[0], device=q.device)[:, None]
    at = torch.arange(key.shape[0], device=q.device)
    visible = at <= query
    if window is not None:
        visible &= at > query - window
        value = value.where((at > start - window)[:, None, None], 0.0)  # 0 * NaN is NaN
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), value).to(q.dtype)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    wide_offset: float | None = None,
    gate: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """gemm.small_batch.gemv."""
    if norm is not None:
        normed = rms_norm(x, *norm, wide_offset=wide_offset)
        assert isinstance(normed, torch.Tensor)
        x = normed
    y = few_rows(x, weight, bias, scale=scale)
    if gate is not None:
        first, second = y.chunk(2, -1)
        y = _gated(first, second, gate)
    return y if residual is None else residual.copy_(residual.float() + y.float())


def few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """gemm.small_batch.few_rows."""
    y = x.float() @ weight.float().T
    if scale is not None:
        y = y * scale.float()
    if x_scale is not None:
        y = y * x_scale.float()[:, None]
    if bias is not None:
        y = y + bias.float()
    return y.to(dtype or x.dtype)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    wide_offset: float | None = None,
    quantize: bool = False,
    plain: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """pointwise.fused.rms_norm."""
    if residual is not None:
        x = residual.copy_(x.float() + residual.float())
    if wide_offset is None:
        y = _normed(x, eps).to(x.dtype) * weight
    else:
        y = _wide_normed(x, weight, wide_offset, eps)
    if plain is not None:
        plain.copy_(y)
    return quantize_rows(y) if quantize else y


def post_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    following: Sequence[torch.Tensor],
    eps: float,
    offset: float,
    *,
    branch: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    scalar: torch.Tensor | None = None,
    quantize: bool = False,
) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None, list[torch.Tensor]]:
    """pointwise.post_norm.post_norm."""
    if branch is not None:
        x_weight, y, y_weight = branch
        x = _wide_normed(x, x_weight, offset, eps) + _wide_normed(y, y_weight, offset, eps)
    residual += _wide_normed(x, weight, offset, eps)
    if scalar is not None:
        residual *= scalar
    normed = [_wide_normed(residual, each, offset, eps) for each in following]
    first = normed[0] if normed else None
    if quantize:
        first = quantize_rows(residual if first is None else first)
    return first, normed[1:]


def gate_mul(
    gate: torch.Tensor, up: torch.Tensor, kind: str, *, quantize: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """pointwise.fused.gate_mul."""
    y = _gated(gate, up, kind)
    return quantize_rows(y) if quantize else y


def _gated(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    wide = gate.float()
    y = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "sigmoid": torch.sigmoid}[kind](wide)
    return y.to(up.dtype) * up


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """pointwise.fused.softcap."""
    return x.float().div(cap).tanh().mul(cap)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gemm.quantize.quantize_rows."""
    wide = x.float()
    scale = wide.abs().amax(-1).clamp_min(1e-12) / _FP8_MAX
    return (wide / scale[:, None]).to(torch.float8_e4m3fn), scale


def rope_and_write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """pointwise.fused.rope_and_write_kv."""
    _, page_size, kv_heads, dim = k_cache.shape
    q, k, v = qkv.unflatten(-1, (-1, dim)).split((num_heads, kv_heads, kv_heads), 1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
        assert isinstance(q, torch.Tensor)
        assert isinstance(k, torch.Tensor)
    at = positions.long()
    page, offset = slots.long() // page_size, slots.long() % page_size
    k = _rotated(k, cos[at], sin[at])
    qkv.unflatten(-1, (-1, dim))[:, num_heads : num_heads + kv_heads] = k
    for cache, new, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        _indexable(cache)[page, offset] = _indexable(_to_cache(new, scale, cache.dtype))
    out = qkv[:, : num_heads * dim].view(-1, num_heads, dim)
    out.copy_(_rotated(q, cos[at], sin[at]))
    return out


def heads_and_write_kv(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    distance: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    offset: float = 0.0,
    eps: float = 1e-6,
    v_norm: bool = False,
    k_eq_v: bool = False,
    own_kv: bool = True,
    keep: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """attention.heads.heads_and_write_kv. `k_eq_v` shows in the width of x."""
    _, page_size, kv_heads, dim = k_cache.shape
    at, pairs = positions.long(), cos.shape[-1]

    def turned(heads: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is not None:
            heads = _wide_normed(heads, norm, offset, eps)
        index = torch.arange(pairs, device=x.device)
        index = torch.cat((index, index + distance))
        return heads.index_copy(2, index, _rotated(heads[:, :, index], cos[at], sin[at]))

    parts = x.unflatten(-1, (-1, dim))
    q = turned(parts[:, :num_heads], q_norm)
    if not own_kv:
        return q, None
    k, v = turned(parts[:, num_heads : num_heads + kv_heads], k_norm), parts[:, -kv_heads:]
    if v_norm:
        v = _normed(v, eps).to(v.dtype)
    page, within = slots.long() // page_size, slots.long() % page_size
    for cache, new, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        _indexable(cache)[page, within] = _indexable(_to_cache(new, scale, cache.dtype))
    return q, torch.stack((k, v), 1) if keep else None


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def _wide_normed(x: torch.Tensor, weight: torch.Tensor, offset: float, eps: float) -> torch.Tensor:
    return (_normed(x, eps) * (offset + weight.float())).to(x.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _indexable(x: torch.Tensor) -> torch.Tensor:
    """fp8 numbers as bytes: not every operator of torch takes their dtype."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _to_cache(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype)
    return (x.float() / scale).clamp(-_FP8_MAX, _FP8_MAX).to(dtype)


def apply_runs(packed: torch.Tensor, runs_at: int, count: int, tokens: torch.Tensor, pages: torch.Tensor) -> None:
    """pointwise.inputs.apply_runs."""
    for table, target, source, words in packed[runs_at : runs_at + 4 * count].view(-1, 4).tolist():
        (pages if table else tokens).view(-1)[target : target + words] = packed[source : source + words]


def gather_inputs(
    row: torch.Tensor,
    position: torch.Tensor,
    tokens: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    state_slots: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
) -> None:
    """pointwise.inputs.gather_inputs."""
    rows, at = row.long(), position.long()
    token_ids.copy_(tokens[rows, at])
    positions.copy_(at)
    slots.copy_(pages[rows, at // page_size].long() * page_size + at % page_size)
    seq_lens.copy_(at + 1)
    if states is not None and state_slots is not None:
        states.copy_(state_slots[rows])


def gather_rows(table: torch.Tensor, ids: torch.Tensor, scale: float = 1.0, *, programs: int = 0) -> torch.Tensor:
    """pointwise.host_rows.gather_rows. `programs` changes nothing here."""
    rows = F.embedding(ids.to(table.device), table)
    return (rows.float() * scale).to(table.dtype).to(ids.device)


def choose_experts(
    logits: torch.Tensor, top_k: int, *, renormalize: bool = True, expert_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """moe.experts.choose_experts."""
    p = logits.softmax(-1, dtype=torch.float32)
    experts = p.sort(dim=-1, descending=True, stable=True)[1][:, :top_k]
    weights = p.gather(1, experts)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if expert_scale is not None:
        weights = weights * expert_scale.float()[experts]
    return weights, experts.int()


def group(experts: torch.Tensor, num_experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """moe.experts.group."""
    flat = experts.flatten().long()
    order = flat.sort(stable=True)[1].int()
    blocks, first = [], 0
    for expert, count in enumerate(torch.bincount(flat, minlength=num_experts).tolist()):
        blocks += [(expert, first + at, min(rows, count - at)) for at in range(0, count, rows)]
        first += count
    unused = max_blocks(flat.numel(), num_experts, rows) - len(blocks)
    return order, torch.tensor(blocks + [(num_experts, 0, 0)] * unused, dtype=torch.int32, device=experts.device)


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    scale13: torch.Tensor | None = None,
    scale2: torch.Tensor | None = None,
    *,
    gate: str = "silu",
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """moe.experts.routed_experts."""
    units = x.shape[0] > VECTOR_TOKENS  # fp8 weights meet fp8 activations
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        token, slot = (experts == expert).nonzero(as_tuple=True)
        gate_up = _expert_product(x[token], w13, scale13, expert, units)
        first, second = gate_up.chunk(2, -1)
        first = F.silu(first) if gate == "silu" else F.gelu(first, approximate="tanh")
        y = _expert_product((first * second).to(x.dtype), w2, scale2, expert, units)
        if units:
            y = y.to(x.dtype).float()
        out.index_put_((token,), y * weights[token, slot, None], accumulate=True)
    out = out.to(x.dtype)
    return out if residual is None else residual.copy_(residual.float() + out.float())


def _expert_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, expert: int, units: bool
) -> torch.Tensor:
    if scale is None:
        return x.float() @ weight[expert].float().t()
    if units:
        values, x_scale = quantize_rows(x)
        x = values.float() * x_scale[:, None]
    return x.float() @ (weight[expert].float() * scale[expert, :, None]).t()
