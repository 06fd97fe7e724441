"""Rotary embedding: which numbers of a head turn, how fast, and what stays."""

import pytest
import torch

from engine.errors import ModelError
from engine.layers.rope import RotaryEmbedding, rotate

HEAD_DIM, POSITION = 16, 5


def turned(rope, x):
    table = RotaryEmbedding(HEAD_DIM, 32, rope)
    return rotate(x, table.rows(torch.tensor([POSITION]), x.dtype))


def by_hand(x, pairs):
    """`pairs`: (i, j, inverse frequency)."""
    out = x.clone()
    for i, j, inv_freq in pairs:
        angle = torch.tensor(POSITION * inv_freq)
        out[..., i] = x[..., i] * angle.cos() - x[..., j] * angle.sin()
        out[..., j] = x[..., j] * angle.cos() + x[..., i] * angle.sin()
    return out


PAIRS = {
    "default": ({}, [(i, i + 8, 100.0 ** (-2 * i / 16)) for i in range(8)]),
    "linear": ({"rope_type": "linear", "factor": 4.0}, [(i, i + 8, 100.0 ** (-2 * i / 16) / 4) for i in range(8)]),
    "partial": ({"partial_rotary_factor": 0.5}, [(i, i + 4, 100.0 ** (-2 * i / 8)) for i in range(4)]),
    "proportional": (
        {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        [(i, i + 8, 100.0 ** (-2 * i / 16)) for i in range(2)],
    ),
    "proportional_slower": (
        {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 8.0},
        [(i, i + 8, 100.0 ** (-2 * i / 16) / 8) for i in range(2)],
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_pairs_and_frequencies(kind):
    rope, pairs = PAIRS[kind]
    x = torch.randn(1, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(turned({"rope_theta": 100.0} | rope, x), by_hand(x, pairs))


def test_a_slice_of_a_fused_projection_is_left_alone():
    fused = torch.randn(1, 7, HEAD_DIM)
    kept = fused.clone()
    turned({"rope_theta": 100.0, "rope_type": "proportional", "partial_rotary_factor": 0.25}, fused[:, :3])
    assert torch.equal(fused, kept)


def test_unknown_type_is_refused():
    with pytest.raises(ModelError, match="rope_type 'longrope'"):
        RotaryEmbedding(HEAD_DIM, 8, {"rope_theta": 1e4, "rope_type": "longrope"})
