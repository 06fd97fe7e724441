"""Rotary position embedding, with the context-extension variants that checkpoints use.

Rotates the pairs (x[i], x[i + distance]), i < r, by position * inv_freq[i] (Su et al. 2021, arXiv:2104.09864,
half-split form). Numbers outside of these pairs stay as they are.

    whole head                    r = d/2                     distance = d/2
    partial_rotary_factor f       r = f d/2                   distance = r      only the first 2 r numbers are rotated
    rope_type "proportional"      r = f d/2                   distance = d/2    the slowest pairs are not rotated
"""

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.errors import ModelError
from engine.message import msg


class Rope(NamedTuple):
    """What a layer needs for rotating. cos and sin [n, 1, r]: on a CPU for the step's tokens, on a GPU for all
    positions. On a CPU, if the whole head is rotated, they are [n, 1, d] instead: (cos, cos) and (-sin, sin)."""

    cos: torch.Tensor
    sin: torch.Tensor
    distance: int  # between the two elements of a pair


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin for every position up to `max_len`: [max_len, 1, r] float32 each."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, head_dim: int, max_len: int, rope: dict[str, Any]) -> None:
        super().__init__()
        inv_freq, factor = inverse_frequencies(head_dim, rope)
        self.whole_head = 2 * len(inv_freq) == head_dim
        self.distance = head_dim // 2 if rope.get("rope_type") == "proportional" else len(inv_freq)
        angle = torch.outer(torch.arange(max_len, dtype=torch.float32), inv_freq)
        self.register_buffer("cos", (angle.cos() * factor).unsqueeze(1), persistent=False)
        self.register_buffer("sin", (angle.sin() * factor).unsqueeze(1), persistent=False)

    def rows(self, positions: torch.Tensor, dtype: torch.dtype) -> Rope:
        """The rows for positions [T]: looked up once per step, used by every layer.

        On a GPU: the whole tables, in which the fused kernel looks up its tokens' positions.
        """
        if self.cos.is_cuda:
            return Rope(self.cos, self.sin, self.distance)
        cos, sin = self.cos[positions].to(dtype), self.sin[positions].to(dtype)
        if self.whole_head:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return Rope(cos, sin, self.distance)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """x [T, H, d] rotated; a new tensor."""
    cos, sin, distance = rope
    if cos.shape[-1] == x.shape[-1]:  # the whole head: its two halves swap places, which takes fewer operators
        return torch.mul(x, cos).addcmul_(x.roll(distance, -1), sin)
    pairs = cos.shape[-1]
    out = x.clone()
    first, second = x[..., :pairs], x[..., distance : distance + pairs]
    out_first, out_second = out[..., :pairs], out[..., distance : distance + pairs]
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out


def inverse_frequencies(head_dim: int, rope: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """([r] inverse frequencies, attention factor) of a `rope_parameters` block of a config."""
    kind = rope.get("rope_type", "default")
    base = float(rope["rope_theta"])
    rotary_dim = int(head_dim * float(rope.get("partial_rotary_factor", 1.0))) // 2 * 2
    # Proportional: the frequencies of the whole head, of which only the first ones are used.
    period = head_dim if kind == "proportional" else rotary_dim
    inv_freq = 1.0 / base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / period)
    if kind == "default":
        return inv_freq, 1.0
    if kind in ("linear", "proportional"):
        return inv_freq / float(rope.get("factor", 1.0)), 1.0
    if kind == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if kind == "yarn":
        return _yarn(inv_freq, rotary_dim, base, rope)
    raise ModelError(
        msg("config.json: rope_type {kind} is not supported (default, linear, llama3, yarn, proportional are).",
            kind=f"{kind!r}")
    )


def _llama3(inv_freq: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between are interpolated."""
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    old_len = float(rope["original_max_position_embeddings"])
    wavelen = 2 * math.pi / inv_freq
    smooth = ((old_len / wavelen - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


def _yarn(inv_freq: torch.Tensor, head_dim: int, base: float, rope: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): NTK by parts, with the softmax temperature folded into cos and sin."""
    factor = float(rope["factor"])
    old_len = float(rope["original_max_position_embeddings"])

    def dimension(rotations: float) -> float:
        return head_dim * math.log(old_len / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(float(rope.get("beta_fast", 32)))), 0)
    high = min(math.ceil(dimension(float(rope.get("beta_slow", 1)))), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), float(attention_factor)
