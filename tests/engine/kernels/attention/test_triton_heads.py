"""Heads of Gemma and Qwen3.5: the fused kernel and its reference against plain torch, in the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.attention import heads as attention_heads
from engine.kernels.attention import kernel_reference as attention_reference
from engine.kernels.attention.reference import write_kv
from engine.layers.norm import WideRMSNorm, unit_rms
from engine.layers.rope import RotaryEmbedding, rotate

TOKENS, PAGE = 6, 16
POSITIONS = torch.tensor([0, 99, 7, 7, 41, 3])
SLOTS = torch.tensor([17, 0, 63, 31, 32, 5])
WHOLE = {"rope_theta": 1e4}
PARTIAL = WHOLE | {"partial_rotary_factor": 0.25}
PROPORTIONAL = PARTIAL | {"rope_type": "proportional"}


def norm_of(dim, offset, dtype):
    norm = WideRMSNorm(dim, 1e-3, offset=offset)
    norm.weight = torch.nn.Parameter(torch.randn(dim).to(dtype), requires_grad=False)
    return norm


def both(
    kernels, dim, heads, kv_heads, rope, *, offset=None, v_norm=False, k_eq_v=False, own_kv=True, dtype=torch.float32,
    cache=None, keep=True, **scales,
):  # fmt: skip
    """(kernel's, torch's) q, k and v side by side, cache of k, cache of v."""
    torch.manual_seed(0)
    width = (heads + (2 - k_eq_v) * kv_heads if own_kv else heads) * dim
    x = torch.randn(TOKENS, width + 24).to(dtype)[:, :width]
    table = RotaryEmbedding(dim, 100, rope)
    norms = [] if offset is None else [norm_of(dim, offset, dtype) for _ in range(2)]
    results = []
    pages = torch.zeros(4, 2, PAGE, kv_heads, dim).to(cache or dtype)
    weights = {} if not norms else {"q_norm": norms[0].weight, "k_norm": norms[1].weight, "offset": offset}
    kept = x.clone()
    q, own = kernels.heads_and_write_kv(
        x, table.cos, table.sin, table.distance, POSITIONS, SLOTS, pages[:, 0], pages[:, 1], heads, **weights,
        eps=1e-3, v_norm=v_norm, k_eq_v=k_eq_v, own_kv=own_kv, keep=keep, **scales,
    )  # fmt: skip
    assert torch.equal(x, kept)
    results.append((q, own, pages[:, 0], pages[:, 1]))

    parts = x.unflatten(-1, (-1, dim))
    q, k, v = parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, -kv_heads:]
    if norms:
        q, k = norms[0](q), norms[1](k)
    turn = table.rows(POSITIONS, torch.float32)
    q, k = rotate(q.float(), turn).to(dtype), rotate(k.float(), turn).to(dtype)
    v = unit_rms(v, 1e-3) if v_norm else v
    pages = torch.zeros(2, 4, PAGE, kv_heads, dim).to(cache or dtype)
    if own_kv:
        stored = [t.float() / s for t, s in ((k, scales.get("k_scale", 1)), (v, scales.get("v_scale", 1)))]
        limit = 448.0 if cache else torch.inf
        as_stored = [t.clamp(-limit, limit).to(pages.dtype) for t in stored]
        view = pages.view(torch.uint8) if cache else pages
        write_kv(*(t.view(view.dtype) for t in as_stored), view[0], view[1], SLOTS)
    results.append((q, torch.stack((k, v), 1) if own_kv and keep else None, *pages))
    return results


CASES = {
    "gemma3": (16, 4, 2, WHOLE, {"offset": 1.0}),
    "qwen3.5": (32, 3, 1, PARTIAL, {"offset": 1.0}),
    "gemma4 sliding": (16, 4, 2, WHOLE, {"offset": 0.0, "v_norm": True}),
    "gemma4 full": (32, 8, 1, PROPORTIONAL, {"offset": 0.0, "v_norm": True, "k_eq_v": True}),
    "gemma4 sharing": (32, 4, 2, PROPORTIONAL, {"offset": 0.0, "own_kv": False}),
    "odd": (24, 3, 1, WHOLE, {"offset": 1.0}),
    "no norms": (32, 2, 2, PARTIAL, {}),
    "wide": (512, 2, 1, PROPORTIONAL, {"offset": 0.0, "v_norm": True, "k_eq_v": True}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kernels", [attention_heads, attention_reference], ids=["triton", "reference"])
def test_heads(kernels, case, dtype):
    dim, heads, kv_heads, rope, options = CASES[case]
    for ours, reference in zip(*both(kernels, dim, heads, kv_heads, rope, dtype=dtype, **options), strict=True):
        if reference is None:
            assert ours is None
        else:
            tolerance = 1e-5 if dtype == torch.float32 else 4e-3
            torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)


def test_a_decode_step_keeps_nothing_beside_the_cache():
    ours, reference = both(attention_heads, 16, 4, 2, WHOLE, offset=1.0, keep=False)
    assert ours[1] is None
    torch.testing.assert_close(ours[2:], reference[2:], rtol=1e-5, atol=1e-5)


def test_fp8_cache_holds_scaled_numbers_and_saturates():
    ours, reference = both(
        attention_heads, 32, 4, 2, PROPORTIONAL, offset=0.0, v_norm=True, cache=torch.float8_e4m3fn, k_scale=0.02,
        v_scale=0.004,
    )  # fmt: skip
    for a, b in zip(ours[2:], reference[2:], strict=True):
        assert (a.float() == b.float()).float().mean() > 0.98
        torch.testing.assert_close(a.float(), b.float(), rtol=0.126, atol=2**-9)
    assert (ours[3].float().abs() == 448).any()
