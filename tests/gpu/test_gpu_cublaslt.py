"""On the GPU: products by an algorithm that was chosen equal PyTorch's, in a graph too, and are remembered."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.kernels.gemm import autotune, cublaslt
from engine.kernels.gemm.trials import Weight
from engine.layers.linear import Linear
from engine.layers.quant.fp8 import FP8_PER_CHANNEL

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

FP8 = torch.float8_e4m3fn
SHAPES = [(768, 512, 48), (4096, 1024, 100), (1024, 3072, 64)]


def inputs(
    outputs: int, inner: int, rows: int, fp8: bool = False
) -> tuple[torch.Tensor, Weight, tuple[torch.Tensor, torch.Tensor] | None]:
    """x, W and the scales of their rows."""
    torch.manual_seed(rows)
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    x, weight = torch.randn(rows, inner, **kind), torch.randn(outputs, inner, **kind)
    if not fp8:
        return x, Weight(weight, None), None
    scales = torch.rand(rows, device="cuda") + 0.5, torch.rand(outputs, device="cuda") + 0.5
    return x.to(FP8), Weight(weight.to(FP8), scales[1]), scales


def exact(x: torch.Tensor, weight: Weight, scales: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    y = F.linear(x.float(), weight.values.float())
    return y if scales is None else y * scales[0][:, None] * scales[1]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("outputs, inner, rows", SHAPES)
def test_every_algorithm_multiplies(outputs: int, inner: int, rows: int, fp8: bool) -> None:
    x, weight, scales = inputs(outputs, inner, rows, fp8)
    product = cublaslt.Matmul(cublaslt.Shape(rows, outputs, inner, torch.bfloat16, fp8))
    algorithms = product.algorithms()
    assert algorithms
    if fp8 and cublaslt.has_forms():
        forms = {product._form(*form) for form in cublaslt._FP8_FORMS} - {None}
        assert len(forms) > len(cublaslt._FP8_FORMS) // 2
        assert forms <= set(algorithms)
    expected = exact(x, weight, scales)
    for algorithm in algorithms:
        y = product.bind(algorithm)(x, weight.values, scales)
        torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2.0 if fp8 else 0.5)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_choice_is_remembered_and_runs_in_a_graph(
    fp8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(autotune, "_BETTER", 100.0)  # the library's is taken, however slow
    monkeypatch.setattr(autotune, "_chosen", {})
    x, weight, scales = inputs(*SHAPES[0], fp8)
    choose = functools.partial(autotune.choose, {(768, 512): [weight]}, [48, 64, 200, 56], torch.bfloat16, fp8=fp8)
    chosen = functools.partial(autotune.chosen, weight=weight.values, dtype=torch.bfloat16 if fp8 else None)
    assert choose() == 4
    bound = chosen(x)
    assert bound is not None
    assert chosen(x[:7]) is None
    autotune._chosen.clear()
    assert choose() == 0, "measured again, though it is known"
    again = chosen(x)
    assert again is not None
    graph = torch.cuda.CUDAGraph()
    again(x, weight.values, scales)
    with torch.cuda.graph(graph):
        y = again(x, weight.values, scales)
    y.zero_()
    graph.replay()
    torch.testing.assert_close(y.float(), exact(x, weight, scales), rtol=2e-2, atol=2.0 if fp8 else 0.5)
    assert torch.equal(y, bound(x, weight.values, scales))


def test_a_layer_multiplies_by_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(autotune, "_BETTER", 100.0)
    monkeypatch.setattr(autotune, "_chosen", {})
    linear = Linear(1024, 768)
    linear.use(FP8_PER_CHANNEL.linear)
    linear.weight = torch.nn.Parameter(torch.randn(768, 1024, device="cuda", dtype=torch.bfloat16), requires_grad=False)
    linear.finalize()
    weight = linear.by_library
    assert weight is not None
    x = torch.randn(48, 1024, device="cuda", dtype=torch.bfloat16)
    usual = linear(x)
    assert autotune.choose({(768, 1024): [weight]}, [48], torch.bfloat16, fp8=True) == 1
    used: list[cublaslt.Shape] = []
    plain = cublaslt.BoundMatmul.__call__

    def noted(self: cublaslt.BoundMatmul, *operands: Any) -> torch.Tensor:
        used.append(self._matmul.shape)
        return plain(self, *operands)

    monkeypatch.setattr(cublaslt.BoundMatmul, "__call__", noted)
    torch.testing.assert_close(linear(x), usual, rtol=2e-2, atol=0.5)
    linear(x[:47])
    assert used == [cublaslt.Shape(48, 768, 1024, torch.bfloat16, True)]
