"""Router, choice and grouping in one kernel, against each alone: in the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.moe import experts as moe_experts
from engine.kernels.moe import reference as moe_reference
from engine.kernels.moe.routing import route_and_group, supports
from engine.kernels.moe.tiles import ROUTED_TOKENS, Shape, all_kinds


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def clear_inputs(tokens, num_experts, hidden):
    """x, router: small whole numbers, so that sums in any order are exact, and many logits are equal."""
    x = torch.randint(-1, 2, (tokens, hidden + 8)).half()[:, :hidden]  # strided rows
    return x, torch.randint(-1, 2, (num_experts, hidden)).half()


@pytest.mark.parametrize("tokens, num_experts, top_k, hidden, rows", [
    (5, 8, 2, 64, 16), (8, 128, 8, 300, 16), (9, 60, 10, 256, 32), (32, 16, 8, 520, 16), (17, 3, 3, 64, 16),
    (32, 128, 8, 64, 64), (24, 2, 1, 256, 16),
])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"renormalize": False, "expert_scale": True}])
def test_like_its_parts(tokens, num_experts, top_k, hidden, rows, options):
    x, router = clear_inputs(tokens, num_experts, hidden)
    if "expert_scale" in options:
        options = options | {"expert_scale": torch.rand(num_experts) + 0.5}
    for _ in range(2):  # the counter of arrivals is back at zero
        weights, experts, groups = route_and_group(x, router, top_k, rows, **options)
        logits = (x.float() @ router.float().t()).half()
        wanted_weights, wanted = moe_reference.choose_experts(logits, top_k, **options)
        assert torch.equal(experts, wanted)
        torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=1e-6)
        order, blocks = moe_reference.group(wanted, num_experts, rows)
        assert torch.equal(groups.order, order)
        assert torch.equal(groups.blocks, blocks)
        assert groups.rows == rows
    other = moe_experts.group(wanted, num_experts, rows)
    assert torch.equal(other.order, groups.order)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_token_spoils_no_other(value):
    x, router = clear_inputs(7, 12, 64)
    before = route_and_group(x, router, 4, 16)
    x[2] = value
    weights, experts, groups = route_and_group(x, router, 4, 16)
    assert weights[2].isnan().all(), "it must be seen"
    assert len(set(experts[2].tolist())) == 4
    assert ((experts >= 0) & (experts < 12)).all()
    others = [t for t in range(7) if t != 2]
    assert torch.equal(experts[others], before[1][others])
    assert torch.equal(weights[others], before[0][others])
    order, blocks = moe_reference.group(experts, 12, 16)
    assert torch.equal(groups.order, order)
    assert torch.equal(groups.blocks, blocks)


def test_which_steps_it_serves():
    router = torch.zeros(128, 64, dtype=torch.bfloat16)
    assert [n for n in (1, 4, 5, ROUTED_TOKENS, ROUTED_TOKENS + 1) if supports(n, 8, router)] == [5, ROUTED_TOKENS]
    assert not supports(8, 8, router.float())
    assert supports(32, 16, router)
    assert not supports(33, 9, router)
    many = torch.zeros(512, 64, dtype=torch.bfloat16)
    assert [n for n in (8, 16, 32, 33) if supports(n, 10, many)] == [8, 16, 32]


def test_the_warm_up_runs_each_variant():
    kinds = all_kinds(Shape(128, 8, 2816, 704, 1), 64, 227 << 10)
    assert {max(8, 1 << (n - 1).bit_length()) for n in kinds if 4 < n <= ROUTED_TOKENS} == {8, 16, 32, 64}
