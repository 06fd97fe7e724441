"""Routed experts on a GPU: real layers' shapes against the reference, and the same bits however steps are started."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_kit import DEVICE

from engine.kernels.gemm import small_batch
from engine.kernels.moe import experts as moe_experts
from engine.kernels.moe import reference as moe_reference
from engine.kernels.moe.decode import DenseBranch, Norm, sparse_block
from engine.kernels.moe.routing import route_and_group
from engine.kernels.pointwise import reference as pointwise_reference
from engine.kernels.pointwise.norm import rms_norm
from engine.kernels.runtime.compile_ahead import compile_ahead
from engine.kernels.runtime.launcher import Kernel, recording

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

SHAPES = {  # experts, a token's, hidden, inner, gate
    "qwen3-30b-a3b": (128, 8, 2048, 768, "silu"),
    "gemma4-26b-a4b": (128, 8, 2816, 704, "gelu_tanh"),
    "qwen3.6-35b-a3b": (256, 8, 2048, 512, "silu"),
    "mixtral-like": (8, 2, 4096, 1792, "silu"),
}
BESIDE = {"qwen3.6-35b-a3b": (512, True), "gemma4-26b-a4b": (2112, False), "qwen3-30b-a3b": (0, False)}
LONG = "qwen3-30b-a3b"  # the shape that routings and chains are tried with
TOKENS = (1, 3, 4, 5, 16, 64, 300, 1100, 4096)
ROUTED, CHAINED, IN_A_BLOCK = (4, 17, 129, 513), (1, 4, 24), (1, 2, 3, 4)
FORMS = ("bf16", "fp8", "blocks")  # the last: fp8 with a scale for each 128 x 128 numbers
Layer = tuple[torch.Tensor, ...]  # w13, w2, and of fp8 ones their scales


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """The kernels of all these tests, compiled side by side: each shape has its own, and one after the other they take
    minutes. What is not named here is compiled where it is needed."""
    with recording() as jobs:
        for shape, form in itertools.product(SHAPES, FORMS):
            num_experts, _, hidden, _, _ = SHAPES[shape]
            layer, norm = make_layer(shape, form), torch.ones(hidden, device=DEVICE).bfloat16()

            def rows(tokens: int, width: int = hidden, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
                return torch.zeros(tokens, width, dtype=dtype, device=DEVICE)

            for tokens in TOKENS:
                routed(shape, rows(tokens), rows(tokens, num_experts), layer)
            if shape == LONG:
                for tokens in ROUTED if form == "bf16" else ():
                    routed(shape, rows(tokens), rows(tokens, num_experts, torch.float32), layer)
                for tokens in CHAINED:
                    link(rows(tokens), norm, layer, lambda: None)
            if shape in BESIDE:
                around = make_router(shape), layer, make_dense_branch(shape, form), norm
                for tokens in IN_A_BLOCK:
                    in_one_block(shape, rows(tokens), *around, 1.0)
                    in_parts(shape, rows(tokens), *around)
                    next_block(shape, rows(tokens), *around)
    compile_ahead(jobs, torch.cuda.get_device_capability())


def make_layer(shape: str, form: str) -> Layer:
    num_experts, _, hidden, inner, _ = SHAPES[shape]
    generator = torch.Generator(DEVICE).manual_seed(0)
    stacks = [
        torch.randn(num_experts, rows, columns, device=DEVICE, generator=generator).mul_(columns**-0.5).bfloat16()
        for rows, columns in ((2 * inner, hidden), (hidden, inner))
    ]
    if form == "bf16":
        return tuple(stacks)
    if form == "blocks":
        pairs = [in_blocks(stack, halves) for stack, halves in zip(stacks, (2, 1), strict=True)]
        return (*(values for values, _ in pairs), *(scale for _, scale in pairs))
    pairs = [pointwise_reference.quantize_rows(stack.flatten(0, 1)) for stack in stacks]
    values = [v.view(stack.shape) for (v, _), stack in zip(pairs, stacks, strict=True)]
    return (*values, *(s.view(stack.shape[:2]) for (_, s), stack in zip(pairs, stacks, strict=True)))


def in_blocks(weight: torch.Tensor, halves: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 numbers [.., N, K] and scales between half and one and a half of 1/64; each half has blocks of its own."""
    *first, rows, columns = weight.shape
    shape = *first, halves * -(-rows // halves // 128), -(-columns // 128)
    scale = torch.rand(shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    return (weight * 64).to(torch.float8_e4m3fn), (scale + 0.5) / 64


def routed(shape: str, x: torch.Tensor, logits: torch.Tensor, layer: Layer) -> tuple[torch.Tensor, ...]:
    """The choice of experts, their weights and what they make of x."""
    _, top_k, _, _, gate = SHAPES[shape]
    weights, experts = moe_experts.choose_experts(logits, top_k)
    return experts, weights, moe_experts.routed_experts(x, weights, experts, *layer, gate=gate)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_their_references(shape: str, form: str) -> None:
    num_experts, top_k, hidden, _, gate = SHAPES[shape]
    layer = make_layer(shape, form)
    torch.manual_seed(2)  # neither of the weights' seeds; of so many random rows, one may have a large relative error
    for tokens in TOKENS:
        x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
        logits = torch.randn(tokens, num_experts, device=DEVICE).bfloat16()
        experts, weights, ours = routed(shape, x, logits, layer)
        reference_weights, reference_experts = moe_reference.choose_experts(logits, top_k)
        assert torch.equal(experts, reference_experts), tokens
        torch.testing.assert_close(weights, reference_weights, rtol=1e-5, atol=1e-6)
        reference = moe_reference.routed_experts(x, weights, experts, *layer, gate=gate).float()
        error = (ours.float() - reference).norm(dim=1) / reference.norm(dim=1)
        assert error.max() < (1e-2 if form == "bf16" else 4e-2), f"{tokens} tokens: {error.max():.2e}"


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_int4_equals_its_reference(shape: str, group: int) -> None:
    num_experts, _, hidden, inner, gate = SHAPES[shape]
    if inner % group:
        pytest.skip("no groups of 128 fit this shape")
    layer: list[torch.Tensor] = []
    for rows, columns in ((2 * inner, hidden), (hidden, inner)):
        bytes_of_row = num_experts, rows, columns // 2
        layer.append(torch.randint(0, 256, bytes_of_row, device=DEVICE, dtype=torch.uint8))
    for rows, columns in ((2 * inner, hidden), (hidden, inner)):
        scale = torch.rand(num_experts, rows, columns // group, device=DEVICE) + 0.5
        layer.append((scale * (columns**-0.5 / 4)).bfloat16())
    for tokens in TOKENS:
        x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
        logits = torch.randn(tokens, num_experts, device=DEVICE).bfloat16()
        experts, weights, ours = routed(shape, x, logits, tuple(layer))
        reference = moe_reference.routed_experts(x, weights, experts, *layer, gate=gate).float()
        error = (ours.float() - reference).norm(dim=1) / reference.norm(dim=1)
        assert error.max() < (4e-2 if group == 128 else 1e-2), f"{tokens} tokens: {error.max():.2e}"


@pytest.mark.parametrize("skew", ["even", "one expert", "few experts"])
def test_any_routing(skew: str) -> None:
    """Experts with all tokens, with none, and with a block and one more."""
    num_experts, _, hidden, _, gate = SHAPES[LONG]
    layer = make_layer(LONG, "bf16")
    for tokens in ROUTED:
        logits = torch.randn(tokens, num_experts, device=DEVICE)
        if skew == "one expert":
            logits[:, 77] += 50
        elif skew == "few experts":
            logits[:, 8:] -= 50
        x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
        experts, weights, ours = routed(LONG, x, logits, layer)
        reference = moe_reference.routed_experts(x, weights, experts, *layer, gate=gate).float()
        assert ((ours.float() - reference).norm(dim=1) / reference.norm(dim=1)).max() < 1e-2


@pytest.mark.parametrize("shape", SHAPES)
def test_router_choice_and_grouping_in_one_kernel(shape: str) -> None:
    """Whole numbers, so that sums in any order are exact: every expert and every place must be the reference's."""
    num_experts, top_k, hidden, _, _ = SHAPES[shape]
    router = torch.randint(-1, 2, (num_experts, hidden), device=DEVICE).bfloat16() / 8
    for tokens in (5, 8, 9, 16, 24, 32, 40, 64):
        x = torch.randint(-1, 2, (tokens, hidden), device=DEVICE).bfloat16()
        # Small enough that no probability becomes zero, which would make logits equal that are not.
        logits = x.float() @ router.float().t()
        wanted_weights, wanted = moe_reference.choose_experts(logits.bfloat16(), top_k)
        order, blocks = moe_reference.group(wanted, num_experts, 16)
        for _ in range(20):  # launched without a pause: each finds the counter of arrivals at zero
            weights, experts, groups = route_and_group(x, router, top_k, 16)
        assert torch.equal(experts, wanted), tokens
        torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=1e-6)
        assert torch.equal(groups.order, order), tokens
        assert torch.equal(groups.blocks, blocks), tokens


def link(residual: torch.Tensor, norm: torch.Tensor, layer: Layer, pause: Callable[[], None]) -> None:
    """A layer onto the residual stream; its router's scores are its first features."""
    num_experts, top_k, _, _, gate = SHAPES[LONG]
    x = rms_norm(residual, norm, 1e-6)
    pause()
    routing = moe_experts.choose_experts(x[:, :num_experts], top_k)
    pause()
    moe_experts.routed_experts(x, *routing, *layer, gate=gate, residual=residual)
    pause()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", CHAINED)
def test_kernels_that_start_early_see_what_they_must(tokens: int, form: str) -> None:
    """A chain of layers, each routed by the one before: one kernel at a time, all at once, and in a graph give the same
    bits. (A kernel may start while the one before it runs, and some read the choice of experts before they wait.)"""
    hidden, layer = SHAPES[LONG][2], make_layer(LONG, form)
    norm = torch.ones(hidden, device=DEVICE).bfloat16()
    start = torch.randn(tokens, hidden, device=DEVICE).bfloat16()

    def chain(pause: Callable[[], None]) -> torch.Tensor:
        residual = start.clone()
        pause()
        for _ in range(40):
            link(residual, norm, layer, pause)
        return residual

    expected = chain(torch.cuda.synchronize)
    assert expected.isfinite().all()
    for _ in range(20):
        assert torch.equal(chain(lambda: None), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(lambda: None)
    for _ in range(50):
        graph.replay()
        assert torch.equal(captured, expected)


def make_dense_branch(shape: str, form: str) -> DenseBranch | None:
    """The MLP beside the experts, and in some models a factor for it."""
    width, factor = BESIDE[shape]
    hidden = SHAPES[shape][2]
    if not width:
        return None

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=DEVICE).mul_(columns**-0.5).bfloat16()

    first, second = weight(2 * width, hidden), weight(hidden, width)
    parts: tuple[torch.Tensor | None, ...] = first, None, second, None
    if form != "bf16":
        quantise = in_blocks if form == "blocks" and width % 128 == 0 else pointwise_reference.quantize_rows
        parts = *quantise(first), *quantise(second)
    return DenseBranch(*parts, weight(1, hidden) if factor else None)


def make_router(shape: str) -> torch.Tensor:
    num_experts, _, hidden, _, _ = SHAPES[shape]
    return torch.randn(num_experts, hidden, device=DEVICE).mul_(3 * hidden**-0.5).bfloat16()


Pair = tuple[torch.Tensor, torch.Tensor | None]  # of the experts, and of an MLP that has a result of its own


def in_one_block(
    shape: str, x: torch.Tensor, router: torch.Tensor, layer: Layer, dense: DenseBranch | None, norm: torch.Tensor,
    offset: float | None, residual: torch.Tensor | None = None,
) -> Pair:  # fmt: skip
    _, top_k, _, _, gate = SHAPES[shape]
    return sparse_block(
        x, router, *layer, top_k=top_k, gate=gate, norm=Norm(norm, 1e-6, offset), dense=dense,
        residual=residual,
    )  # fmt: skip


def in_parts(
    shape: str, x: torch.Tensor, router: torch.Tensor, layer: Layer, dense: DenseBranch | None, norm: torch.Tensor
) -> Pair:
    """The same by kernels that do less at a time, and round where the block does: experts take x normed and rounded,
    all other products norm it in passing."""
    normed = rms_norm(x, norm, 1e-6, wide_offset=1.0)
    scores = small_batch.gemv(x, router, norm=(norm, 1e-6), wide_offset=1.0)
    parts = routed(shape, normed, scores, layer)[2].float()
    if dense is None:
        return parts, None
    block = 128 if dense.down_scale is not None and dense.down_scale.dim() == 2 else 0
    h = small_batch.gemv(
        x, dense.gate_up, dense.gate_up_scale, norm=(norm, 1e-6), wide_offset=1.0, gate=SHAPES[shape][4], block=block
    )
    other = small_batch.gemv(h, dense.down, dense.down_scale, block=block).float()
    if dense.factor is None:
        return parts, other
    factor = small_batch.gemv(x, dense.factor, norm=(norm, 1e-6), wide_offset=1.0)
    return parts + factor.float().sigmoid() * other, None


def clear_rows(shape: str, count: int, router: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Random x [count, H] whose choice of experts, and their weights, hang on no rounding.

    Scores are rounded to bf16. Where two are nearly equal, that decides which one is chosen; and a score of 8 to 16
    that is rounded the other way changes its expert's weight by 6 %. Sums in another order may do both: in float32 they
    are 2^-20 of a score apart. So the last one chosen has to exceed the next by 2^-6 of itself, two to four steps of
    bf16, and none chosen may be nearer than 2^-16 of itself to where bf16 rounds the other way. More than half of all
    rows are so."""
    top_k, hidden = SHAPES[shape][1:3]
    x = torch.randn(32 * count, hidden, device=DEVICE).bfloat16()
    exact = x.double()
    normed = exact * (exact.square().mean(1, keepdim=True) + 1e-6).rsqrt() * (1 + norm.double())
    best = (normed @ router.double().t()).topk(top_k + 1, 1).values
    apart = best[:, top_k - 1] - best[:, top_k] > best[:, top_k - 1] * 2**-6
    chosen, slack = best[:, :top_k], best[:, :top_k] * 2**-16
    rounded = ((chosen - slack).bfloat16() == (chosen + slack).bfloat16()).all(1)
    x = x[apart & rounded]
    assert len(x) >= count, f"{len(x)} of {32 * count} rows are clear"
    return x[:count]


def next_block(
    shape: str, residual: torch.Tensor, router: torch.Tensor, layer: Layer, dense: DenseBranch | None,
    norm: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The residual stream behind a block, in place."""
    _, apart = in_one_block(shape, residual, router, layer, dense, norm, None, residual)
    if apart is not None:
        residual = rms_norm(apart, norm, 1e-6, residual)
    return residual


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", BESIDE)
def test_a_block_of_few_tokens_equals_its_parts(shape: str, form: str) -> None:
    hidden = SHAPES[shape][2]
    around = make_router(shape), make_layer(shape, form), make_dense_branch(shape, form)
    norm = torch.rand(hidden, device=DEVICE).bfloat16()
    for tokens in IN_A_BLOCK:
        x = clear_rows(shape, tokens, around[0], norm)
        ours, apart = in_one_block(shape, x, *around, norm, 1.0)
        parts, other = in_parts(shape, x, *around, norm)
        assert ((ours.float() - parts).norm(dim=1) / parts.norm(dim=1)).max() < 1e-2
        assert (apart is None) == (other is None)
        if apart is not None and other is not None:
            assert ((apart.float() - other).norm(dim=1) / other.norm(dim=1)).max() < 1e-2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("shape", BESIDE)
def test_blocks_that_start_early_see_what_they_must(
    shape: str, tokens: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain of blocks, each routed by the one before: kernels one at a time, all at once and in a graph give the same
    bits.
    (The last kernel of a block reads the choice and the other MLP's first result before it waits.)"""
    hidden = SHAPES[shape][2]
    around = make_router(shape), make_layer(shape, form), make_dense_branch(shape, form)
    norm = torch.ones(hidden, device=DEVICE).bfloat16()
    start = torch.randn(tokens, hidden, device=DEVICE).bfloat16()

    def chain() -> torch.Tensor:
        residual = start.clone()
        for _ in range(40):
            residual = next_block(shape, residual, *around, norm)
        return residual

    start_kernel = Kernel.__call__

    def start_and_wait(kernel: Kernel, *args: Any, **options: Any) -> None:
        start_kernel(kernel, *args, **options)
        torch.cuda.synchronize()

    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "__call__", start_and_wait)
        expected = chain()
    assert expected.isfinite().all()
    for _ in range(20):
        assert torch.equal(chain(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(50):
        graph.replay()
        assert torch.equal(captured, expected)
