"""The kernels of this folder in plain torch: the same names and arguments (except for tuning), in float32 arithmetic.

Tests and the self-test (engine/selftest) compare each kernel with its reference. References run on any device.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from engine.kernels.pointwise.kv_format import KvScale

_FP8_MAX = 448.0  # the largest e4m3 number


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
    """pointwise.norm.rms_norm."""
    if residual is not None:
        x = residual.copy_(x.float() + residual.float())
    if wide_offset is None:
        y = normed(x, eps).to(x.dtype) * weight
    else:
        y = wide_normed(x, weight, wide_offset, eps)
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
    quantize: Sequence[bool] = (),
) -> list[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    """pointwise.norm.post_norm."""
    if branch is not None:
        x_weight, y, y_weight = branch
        x = wide_normed(x, x_weight, offset, eps) + wide_normed(y, y_weight, offset, eps)
    residual += wide_normed(x, weight, offset, eps)
    if scalar is not None:
        residual *= scalar
    normed = [wide_normed(residual, each, offset, eps) for each in following]
    if not normed and any(quantize):
        return [quantize_rows(residual)]
    asked = (*quantize, False, False, False)
    return [quantize_rows(each) if fp8 else each for each, fp8 in zip(normed, asked, strict=False)]


def gate_mul(
    gate: torch.Tensor, up: torch.Tensor, kind: str, *, quantize: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """pointwise.fused.gate_mul."""
    y = gated(gate, up, kind)
    return quantize_rows(y) if quantize else y


def gated(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    wide = gate.float()
    y = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "sigmoid": torch.sigmoid}[kind](wide)
    return y.to(up.dtype) * up


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """pointwise.fused.softcap."""
    return x.float().div(cap).tanh().mul(cap)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """pointwise.quantize.quantize_rows."""
    wide = x.float()
    scale = wide.abs().amax(-1).clamp_min(1e-12) / _FP8_MAX
    return (wide / scale[:, None]).to(torch.float8_e4m3fn), scale


def quantize_rows_to_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """pointwise.quantize.quantize_rows_to_int8."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / 127.5).clamp_(min=1e-12)
    return (wide / scale[:, None]).round_().clamp_(-128, 127).to(torch.int8), scale


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
    k_scale: KvScale = 1.0,
    v_scale: KvScale = 1.0,
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
    k = rotated(k, cos[at], sin[at])
    qkv.unflatten(-1, (-1, dim))[:, num_heads : num_heads + kv_heads] = k
    store_kv(k, k_cache, k_scale, page, offset)
    store_kv(v, v_cache, v_scale, page, offset)
    out = qkv[:, : num_heads * dim].view(-1, num_heads, dim)
    out.copy_(rotated(q, cos[at], sin[at]))
    return out


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def wide_normed(x: torch.Tensor, weight: torch.Tensor, offset: float, eps: float) -> torch.Tensor:
    return (normed(x, eps) * (offset + weight.float())).to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def indexable(x: torch.Tensor) -> torch.Tensor:
    """fp8 numbers viewed as bytes, because not every operator of torch takes their dtype."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def to_cache(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values in the dtype of a cache that has no scales of its own."""
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype)
    return (x.float() / scale).clamp(-_FP8_MAX, _FP8_MAX).to(dtype)


def to_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] as an int8 cache holds it: int8 [..., D], and a float32 scale [...] for each token and head. A NaN or
    an infinity makes the scale NaN, so that a broken model does not look sound."""
    wide = x.float()
    scale = (wide.abs().amax(-1).clamp_min(1e-12) + (wide * 0).sum(-1)) / 127
    return (wide / scale[..., None]).round().nan_to_num().clamp(-127, 127).to(torch.int8), scale


def store_kv(
    new: torch.Tensor, cache: torch.Tensor, scale: KvScale, page: torch.Tensor, offset: torch.Tensor
) -> None:
    """Store keys or values [T, Hkv, D] at token `offset` [T] of each `page` [T]."""
    if isinstance(scale, torch.Tensor):
        cache[page, offset], scale[page, offset] = to_int8(new)
    else:
        indexable(cache)[page, offset] = indexable(to_cache(new, scale, cache.dtype))


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
    """pointwise.host_rows.gather_rows. `programs` has no effect here."""
    rows = F.embedding(ids.to(table.device), table)
    return (rows.float() * scale).to(table.dtype).to(ids.device)
