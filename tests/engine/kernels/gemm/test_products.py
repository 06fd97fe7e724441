"""Where the library is not, or what was remembered is damaged, products stay PyTorch's."""

import json

import pytest
import torch

from engine.kernels.gemm import autotune, cublaslt
from engine.kernels.gemm.cublaslt import Shape
from engine.kernels.gemm.trials import Weight
from engine.layers.linear import Linear
from engine.layers.quant.fp8 import FP8, ON_FP8_UNITS
from engine.layers.quant.unquantized import ON_GPU
from engine.worker.startup.warmup import choose_matmuls


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch, tmp_path):
    monkeypatch.setattr(autotune, "_chosen", {})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_without_the_library_nothing_is_chosen(monkeypatch):
    def missing():
        raise cublaslt.CublasLtError("not there")

    monkeypatch.setattr(cublaslt, "_library", missing)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    weight = torch.randn(8, 4, dtype=torch.bfloat16)
    assert autotune.choose({(8, 4): [Weight(weight, None)]}, [48], torch.bfloat16) == 0
    assert autotune.chosen(torch.randn(48, 4, dtype=torch.bfloat16), weight) is None


def test_a_shape_that_the_library_has_nothing_for_keeps_pytorch_s_product(monkeypatch):
    """fp8 with scales for rows is not for every card; the others' choice goes on."""

    def nothing(product):
        raise cublaslt.CublasLtError("cublasLtMatmulAlgoGetHeuristic: status 15")

    monkeypatch.setattr(cublaslt.Matmul, "__init__", lambda product, shape: None)
    monkeypatch.setattr(cublaslt.Matmul, "algorithms", nothing)
    shapes = [Shape(rows, 8, 4, torch.bfloat16, True) for rows in (48, 64)]
    weight = Weight(torch.zeros(8, 4).to(FP8), torch.ones(8))
    assert autotune._fastest(shapes, [weight]) == dict.fromkeys(shapes, b"")


def test_what_was_found_is_read_back_and_a_damaged_file_is_not(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(cublaslt, "version", lambda: 130100)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card / of ours")
    memory = autotune._Memory.open()
    memory.known = {Shape(48, 8, 4, torch.bfloat16): b"\x01" * 64, Shape(64, 8, 4, torch.float16, True): b""}
    memory.save()
    assert autotune._Memory.open().known == memory.known
    [path] = tmp_path.iterdir()
    assert path.name == "atoll-products-a-card---of-ours-130100-3.json"
    for damaged in ("{", "[[1, 2]]", json.dumps([[48, 8, 4, "no_dtype", 0, ""]]), '[[48, 8, 4, "bfloat16", 0, "z"]]'):
        path.write_text(damaged)
        assert autotune._Memory.open().known == {}
        assert "measured again" in caplog.text
        caplog.clear()


def test_a_first_start_keeps_what_it_measured_and_a_cache_that_takes_nothing_costs_nothing(
    monkeypatch, tmp_path, caplog
):
    """The operator's cache directory is not there until something is put into it."""
    monkeypatch.setattr(cublaslt, "version", lambda: 130100)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(autotune, "_fastest", lambda shapes, weights: dict.fromkeys(shapes, b""))
    weights = {(8, 4): [Weight(torch.randn(8, 4, dtype=torch.bfloat16), None)]}
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache/triton"))
    assert autotune.choose(weights, [48], torch.bfloat16) == 1
    assert autotune.choose(weights, [48], torch.bfloat16) == 0, "the next start knows it"
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file/triton"))
    monkeypatch.setattr(autotune._Memory, "open", classmethod(lambda cls: cls(tmp_path / "file/triton/known", {})))
    assert autotune.choose(weights, [48], torch.bfloat16) == 1
    assert "cannot be kept" in caplog.text


def test_products_of_gaps_or_other_types_are_not_looked_up(monkeypatch):
    bound = object()
    monkeypatch.setitem(autotune._chosen, Shape(48, 8, 4, torch.bfloat16), bound)
    weight = torch.randn(8, 4, dtype=torch.bfloat16)
    x = torch.randn(48, 4, dtype=torch.bfloat16)
    assert autotune.chosen(x, weight) is bound
    assert autotune.chosen(torch.randn(48, 8, dtype=torch.bfloat16)[:, :4], weight) is None
    assert autotune.chosen(x.half(), weight) is None
    assert autotune.chosen(x, weight, torch.bfloat16) is None, "of fp8 weights nothing was chosen"
    assert autotune.chosen(x[:47], weight) is None


@pytest.mark.parametrize("on_hopper", [False, True])
def test_what_is_measured_are_products_of_decode_steps_and_full_ones(monkeypatch, on_hopper):
    asked = {}

    def choose(weights, rows, dtype, *, fp8=False):
        asked.update({shape: (sorted(rows), dtype, fp8, len(some)) for shape, some in weights.items()})
        return 0

    monkeypatch.setattr(autotune, "choose", choose)
    monkeypatch.setattr(cublaslt, "has_forms", lambda: on_hopper)
    layers = [linear(4096, 1024), linear(4096, 1024), linear(8192, 1024, fp8=True), linear(1024, 1024)]
    layers += [linear(4096, 512, fp8=True), linear(4096, 2048, bias=True), linear(1 << 17, 64)]
    choose_matmuls(torch.nn.ModuleList(layers), torch.float16, 512, 2048)
    assert set(asked) == {(4096, 1024), (8192, 1024), (1024, 1024)}, "no bias, no head, no small one of fp8"
    rows, *others = asked[4096, 1024]
    assert others == [torch.bfloat16, False, 2]
    assert (rows[0], rows[-2:]) == (40, [256, 2048]), "full steps too"
    rows, *others = asked[8192, 1024]
    assert others == [torch.float16, True, 1]
    assert (rows[0], rows[-1]) == (40 if on_hopper else 144, 256), "elsewhere our kernel keeps up to 128 rows"


def linear(outputs, inner, *, bias=False, fp8=False):
    """As it is on a GPU after loading."""
    layer = Linear(inner, outputs, bias=bias)
    layer.weight = torch.nn.Parameter(torch.empty(outputs, inner, dtype=FP8 if fp8 else torch.bfloat16), False)
    if fp8:
        layer.scale = torch.nn.Parameter(torch.ones(outputs), False)
    layer.gemm = ON_FP8_UNITS if fp8 else ON_GPU
    return layer
