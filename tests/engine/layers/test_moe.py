"""Routed experts on the CPU against the formula, written out; their fp8 form; and what loading does with them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.moe.tiles import Shape, tiles_for
from engine.kernels.runtime.gpu_target import H100
from engine.layers.gemm_inputs import UnnormedRows
from engine.layers.moe import ExpertLinear, RoutedExperts, Router, Routing, SparseMLP, choose_experts, kinds_of_steps
from engine.layers.norm import RMSNorm
from engine.layers.quant.fp8 import FP8, FP8_PER_CHANNEL
from engine.layers.quant.unquantized import ON_GPU, UNQUANTIZED
from engine.models.loading.loader import quantize
from engine.worker.startup.memory import loaded_bytes, weight_bytes

HIDDEN, INNER, EXPERTS = 32, 48, 6


def filled(gate="silu"):
    torch.manual_seed(3)
    experts = RoutedExperts(HIDDEN, INNER, EXPERTS, gate=gate)
    for linear in (experts.gate_up_proj, experts.down_proj):
        linear.weight = nn.Parameter(torch.randn(linear.weight.shape) * 0.2, requires_grad=False)
    return experts


def written_out(experts, x, routing, w13, w2):
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for weight, e in zip(routing.weights[t], routing.experts[t].tolist(), strict=True):
            gate, up = w13[e, :INNER] @ x[t], w13[e, INNER:] @ x[t]
            act = F.silu(gate) if experts.gate == "silu" else F.gelu(gate, approximate="tanh")
            out[t] += weight * (w2[e] @ (act * up))
    return out


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_routed_experts(tokens, gate):
    experts, x = filled(gate), torch.randn(tokens, HIDDEN)
    routing = choose_experts(torch.randn(tokens, EXPERTS), 3)
    expected = written_out(experts, x, routing, experts.gate_up_proj.weight, experts.down_proj.weight)
    torch.testing.assert_close(experts(x, routing), expected, rtol=1e-5, atol=1e-5)


def test_an_expert_that_nobody_chose_is_not_read():
    experts, x = filled(), torch.randn(5, HIDDEN)
    routing = Routing(torch.ones(5, 2), torch.tensor([[0, 2], [2, 4], [4, 0], [0, 4], [2, 0]], dtype=torch.int32))
    experts.gate_up_proj.weight[[1, 3, 5]] = float("nan")
    assert experts(x, routing).isfinite().all()


def test_one_token_in_nan_spoils_no_other():
    experts, x, logits = filled(), torch.randn(9, HIDDEN), torch.randn(9, EXPERTS)
    before = experts(x, choose_experts(logits, 2))
    x[4], logits[4] = float("nan"), float("nan")
    after = experts(x, choose_experts(logits, 2))
    assert after[4].isnan().all()
    others = [t for t in range(9) if t != 4]
    torch.testing.assert_close(after[others], before[others])


def test_choice_of_experts():
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    p = logits.softmax(-1)[0]
    weights, experts = choose_experts(logits, 2, renormalize=False)
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights[0], p[[1, 2]])
    weights, _ = choose_experts(logits, 2)
    torch.testing.assert_close(weights[0], p[[1, 2]] / p[[1, 2]].sum())
    scaled, _ = choose_experts(logits, 2, expert_scale=torch.tensor([9.0, 2.0, 0.5, 9.0]))
    torch.testing.assert_close(scaled, weights * torch.tensor([2.0, 0.5]))
    assert choose_experts(logits.bfloat16(), 2).weights.dtype == torch.float32


@pytest.mark.parametrize("tokens", [3, 40])
def test_fp8_experts(tokens):
    """Each expert and output channel has its own scale; from five tokens on activations are fp8 as well."""
    experts, x = filled(), torch.randn(tokens, HIDDEN)
    experts.gate_up_proj.weight[2] *= 1000  # a scale for the whole tensor would lose the others
    routing = choose_experts(torch.randn(tokens, EXPERTS), 2)
    exact = experts(x, routing)
    for linear in (experts.gate_up_proj, experts.down_proj):
        weight = linear.weight
        linear.use(FP8_PER_CHANNEL.experts)
        linear.weight = weight
        linear.finalize()
        linear.finalize()  # a second time changes nothing
        assert linear.weight.dtype == FP8
        assert linear.scale.shape == linear.weight.shape[:2]
    error = (experts(x, routing) - exact).norm(dim=1) / exact.norm(dim=1)
    assert (error > 0).all()
    assert error.max() < 0.2
    assert error.median() < 0.08


def test_quantisation_leaves_the_router_and_odd_sizes_alone():
    model = nn.Module()
    model.router = Router(HIDDEN, EXPERTS, 2)
    model.experts = RoutedExperts(HIDDEN, 40, EXPERTS)  # 40 is no multiple of 16
    quantize(model, "fp8")
    assert model.router.method is UNQUANTIZED.linear
    assert model.experts.down_proj.method is UNQUANTIZED.experts
    assert model.experts.gate_up_proj.method is FP8_PER_CHANNEL.experts
    for linear in (model.experts.gate_up_proj, model.experts.down_proj):
        linear.weight = nn.Parameter(torch.randn(linear.weight.shape), requires_grad=False)
        linear.finalize()
    assert model.experts.gate_up_proj.weight.dtype == FP8
    assert model.experts.down_proj.weight.dtype == torch.float32


def test_the_norm_before_a_sparse_block():
    """Few rows pass it in the block's own kernels; more come as plain numbers, for the experts read them too."""
    block, norm = SparseMLP(HIDDEN, 32, EXPERTS, 2), RMSNorm(HIDDEN, 1e-6)
    norm.weight = nn.Parameter(torch.ones(HIDDEN), requires_grad=False)
    block.gate.gemm = ON_GPU
    assert block.fits_decode(4)
    assert not block.fits_decode(5)
    assert isinstance(norm.add(None, torch.ones(4, HIDDEN), block.gate)[0], UnnormedRows)
    assert isinstance(norm.add(None, torch.ones(5, HIDDEN), block.gate)[0], torch.Tensor)
    assert not block.gate.wants_fp8(100)


def test_memory_of_a_quantised_model_is_known_before_it_is_loaded():
    model = nn.Module()
    model.experts = RoutedExperts(HIDDEN, INNER, EXPERTS)
    quantize(model, "fp8")
    expected = loaded_bytes(model)
    for linear in (model.experts.gate_up_proj, model.experts.down_proj):
        linear.weight = nn.Parameter(torch.randn(linear.weight.shape), requires_grad=False)
        linear.finalize()
    assert weight_bytes(model) == expected


def test_names_of_weights_cover_the_stacks_once():
    """Every element belongs to one checkpoint tensor, whichever way they are stored."""
    experts = filled()
    for found in (experts.weights("e."), experts.stacked_weights("e.")):
        for linear in (experts.gate_up_proj, experts.down_proj):
            linear.weight.zero_()
        for tensor in found.values():
            tensor += 1
        for linear in (experts.gate_up_proj, experts.down_proj):
            assert (linear.weight == 1).all()
    assert len(experts.weights("e.")) == 3 * EXPERTS
    names = experts.weights("e.", ("w1", "w3", "w2"))
    names["e.4.w3.weight"].fill_(7)
    assert (experts.gate_up_proj.weight[4, INNER:] == 7).all()
    assert (experts.gate_up_proj.weight == 7).sum() == INNER * HIDDEN
    assert isinstance(experts.down_proj, ExpertLinear)


def test_kinds_of_steps_meet_every_set_of_tiles():
    model = nn.Module()
    model.router = Router(2048, 128, 8)
    with torch.device("meta"):
        model.experts = RoutedExperts(2048, 768, 128)
    shared = H100.shared_memory
    kinds = kinds_of_steps(model, 3000, H100)
    shape = Shape(128, 8, 2048, 768, model.experts.down_proj.weight.itemsize)
    assert {1, 2, 3} < kinds
    many = {tokens for tokens in kinds if tokens > 4}
    assert {tiles_for(shape, t, shared) for t in many} == {tiles_for(shape, t, shared) for t in range(5, 3001)}
    assert len(kinds) < 14
    assert max(kinds) > 1024  # from where more than 8192 pairs are sorted
    assert kinds_of_steps(nn.Linear(1, 1), 3000, H100) == set()
