"""On the GPU: products by an algorithm that was chosen equal PyTorch's, in a graph too, and are remembered."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.kernels import cublaslt, products

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

SHAPES = [(768, 512, 48), (4096, 1024, 100), (1024, 3072, 64)]


def inputs(outputs: int, inner: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    return torch.randn(rows, inner, **kind), torch.randn(outputs, inner, **kind)


@pytest.mark.parametrize("outputs, inner, rows", SHAPES)
def test_every_algorithm_multiplies(outputs: int, inner: int, rows: int) -> None:
    x, weight = inputs(outputs, inner, rows)
    product = cublaslt.Product(cublaslt.Shape(rows, outputs, inner, torch.bfloat16))
    algorithms = product.algorithms()
    assert algorithms
    expected = F.linear(x.float(), weight.float())
    for algorithm in algorithms:
        torch.testing.assert_close(product.bind(algorithm)(x, weight).float(), expected, rtol=2e-2, atol=0.5)


def test_a_choice_is_remembered_and_runs_in_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(products, "_BETTER", 100.0)  # the library's is taken, however slow
    monkeypatch.setattr(products, "_chosen", {})
    x, weight = inputs(*SHAPES[0])
    weights = {(768, 512): [weight]}
    assert products.choose(weights, [48, 64]) == 2
    bound = products.chosen(x, weight)
    assert bound is not None
    assert products.chosen(x[:7], weight) is None
    products._chosen.clear()
    assert products.choose(weights, [48, 64]) == 0, "measured again, though it is known"
    again = products.chosen(x, weight)
    assert again is not None
    expected = F.linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    again(x, weight)
    with torch.cuda.graph(graph):
        y = again(x, weight)
    y.zero_()
    graph.replay()
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=0.5)
    assert torch.equal(y, bound(x, weight))
