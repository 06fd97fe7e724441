"""The choice of experts that the router's last program makes is that of choose_experts."""

import pytest
import torch
import triton
import triton.language as tl

from engine.kernels.moe import reference as moe_reference
from engine.kernels.moe.top_k import all_experts, dense_factor
from engine.kernels.runtime.launcher import kernel


@kernel
def _choose(
    logits_ptr, scale_ptr, experts_ptr, weights_ptr, dense_ptr, stride,
    E: tl.constexpr, EP: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    at = logits_ptr + tl.program_id(0) * stride
    out = tl.program_id(0) * TOP_K
    j = tl.arange(0, KP)
    experts, weights = all_experts(at, scale_ptr, E, EP, TOP_K, KP, RENORMALIZE)
    tl.store(experts_ptr + out + j, experts, mask=j < TOP_K)
    tl.store(weights_ptr + out + j, weights, mask=j < TOP_K)
    tl.store(dense_ptr + tl.program_id(0), dense_factor(at, E))


def choose(logits, top_k, renormalize=True, expert_scale=None):
    """logits [T, E + 1] -> experts [T, k], their weights, and that of the last column."""
    tokens, num_experts = logits.shape[0], logits.shape[1] - 1
    experts = torch.empty(tokens, top_k, dtype=torch.int32)
    weights, dense = torch.empty(tokens, top_k), torch.empty(tokens)
    _choose(
        (tokens,), logits, expert_scale, experts, weights, dense, logits.stride(0), E=num_experts,
        EP=triton.next_power_of_2(num_experts), TOP_K=top_k, KP=triton.next_power_of_2(top_k), RENORMALIZE=renormalize,
    )  # fmt: skip
    return experts, weights, dense


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("num_experts, top_k", [(5, 2), (64, 6), (256, 8), (3, 3)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_the_choice_is_that_of_choose_experts(num_experts, top_k, renormalize, dtype):
    torch.manual_seed(num_experts)
    # Coarse steps, so that many are equal: of those the first counts.
    logits = ((torch.randn(6, num_experts + 1) * 4).round() / 2).to(dtype)
    logits[1] = -logits[1].abs() - 1
    logits[2] = torch.tensor([0.0, -0.0]).repeat(num_experts)[: num_experts + 1]
    logits[3, :-1] = 4.0 * (torch.arange(num_experts) - num_experts // 2).sign()
    logits[4] = logits[4] * 1e-4
    scale = torch.rand(num_experts) + 0.5
    experts, weights, dense = choose(logits, top_k, renormalize, scale)
    want_weights, want = moe_reference.choose_experts(
        logits[:, :-1].float(), top_k, renormalize=renormalize, expert_scale=scale
    )
    assert torch.equal(experts, want)
    torch.testing.assert_close(weights, want_weights)
    torch.testing.assert_close(dense, logits[:, -1].sigmoid().float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf")])
def test_what_is_no_number_chooses_experts_that_exist(value, dtype):
    logits = torch.randn(3, 8).to(dtype)
    logits[0, 2] = value
    logits[1] = value
    experts, weights, _ = choose(logits, 4)
    assert all(len(set(row)) == 4 for row in experts.tolist())
    assert ((experts >= 0) & (experts < 7)).all()
    assert weights[:2].isnan().all(), "it must be seen"
    assert weights[2].isfinite().all(), "other tokens have nothing of it"
