"""Where the library is not, or what was remembered is damaged, products stay PyTorch's."""

import json

import pytest
import torch

from engine.kernels import cublaslt, products
from engine.kernels.cublaslt import Shape
from engine.layers.linear import Linear
from engine.layers.quant import FP8
from engine.worker.prepare import choose_products


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch, tmp_path):
    monkeypatch.setattr(products, "_chosen", {})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_without_the_library_nothing_is_chosen(monkeypatch):
    def missing():
        raise cublaslt.CublasLtError("not there")

    monkeypatch.setattr(cublaslt, "_library", missing)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    weight = torch.randn(8, 4, dtype=torch.bfloat16)
    assert products.choose({(8, 4): [products.Weight(weight, None)]}, [48], torch.bfloat16) == 0
    assert products.chosen(torch.randn(48, 4, dtype=torch.bfloat16), weight) is None


def test_what_was_found_is_read_back_and_a_damaged_file_is_not(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(cublaslt, "version", lambda: 130100)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card / of ours")
    memory = products._Memory.open()
    memory.known = {Shape(48, 8, 4, torch.bfloat16): b"\x01" * 64, Shape(64, 8, 4, torch.float16, True): b""}
    memory.save()
    assert products._Memory.open().known == memory.known
    [path] = tmp_path.iterdir()
    assert path.name == "atoll-products-a-card---of-ours-130100-3.json"
    for damaged in ("{", "[[1, 2]]", json.dumps([[48, 8, 4, "no_dtype", 0, ""]]), '[[48, 8, 4, "bfloat16", 0, "z"]]'):
        path.write_text(damaged)
        assert products._Memory.open().known == {}
        assert "measured anew" in caplog.text
        caplog.clear()


def test_products_of_gaps_or_other_types_are_not_looked_up(monkeypatch):
    bound = object()
    monkeypatch.setitem(products._chosen, Shape(48, 8, 4, torch.bfloat16), bound)
    weight = torch.randn(8, 4, dtype=torch.bfloat16)
    x = torch.randn(48, 4, dtype=torch.bfloat16)
    assert products.chosen(x, weight) is bound
    assert products.chosen(torch.randn(48, 8, dtype=torch.bfloat16)[:, :4], weight) is None
    assert products.chosen(x.half(), weight) is None
    assert products.chosen(x, weight, torch.bfloat16) is None, "of fp8 weights nothing was chosen"
    assert products.chosen(x[:47], weight) is None


def test_all_algorithms_are_tried_at_a_few_numbers_of_rows_and_good_ones_between_them(monkeypatch):
    tried = []

    def best(shape, weights, candidates):
        tried.append((shape.rows, candidates))
        good = [f"{shape.rows}-{i}".encode() for i in range(2)]
        return good[0] if candidates is None else candidates[-1], good

    monkeypatch.setattr(products, "_best", best)
    rows = [8192, 1024, 960, 640, 512, 256, 240, 160, 64, 40]
    shapes = [Shape(number, 8, 4, torch.bfloat16) for number in rows]
    found = products._fastest(shapes, [])
    assert sorted(found, reverse=True) == shapes
    assert [number for number, candidates in tried if candidates is None] == [8192, 1024, 640, 512, 256, 160, 64, 40]
    assert dict(tried)[960] == [b"1024-0", b"1024-1", b"640-0", b"640-1"]
    assert dict(tried)[240] == [b"256-0", b"256-1", b"160-0", b"160-1"]
    assert found[shapes[2]] == b"640-1"


@pytest.mark.parametrize("rows", [[], [64], [8192, 40], list(range(1024, 32, -8))])
def test_first_and_last_numbers_of_rows_are_among_them(rows):
    pillars = products._pillars(rows)
    assert pillars[:1] == rows[:1]
    assert pillars[-1:] == rows[-1:]
    assert set(pillars) <= set(rows)
    assert len(pillars) <= 8


@pytest.mark.parametrize("on_hopper", [False, True])
def test_what_is_measured_are_products_of_large_weights_in_steps_with_graphs(monkeypatch, on_hopper):
    asked = {}

    def choose(weights, rows, dtype, *, fp8=False):
        asked.update({shape: (sorted(rows), dtype, fp8, len(some)) for shape, some in weights.items()})
        return 0

    monkeypatch.setattr(products, "choose", choose)
    monkeypatch.setattr(cublaslt, "has_forms", lambda: on_hopper)
    layers = [linear(4096, 1024), linear(4096, 1024), linear(8192, 1024, fp8=True), linear(1024, 1024)]
    layers += [linear(4096, 2048, bias=True), linear(1 << 17, 64)]
    choose_products(torch.nn.ModuleList(layers), torch.float16, 144, 2048)
    assert set(asked) == {(4096, 1024), (8192, 1024)}
    with_graphs = {40, 144, 160, 256, 512}
    rows, *others = asked[4096, 1024]
    assert others == [torch.bfloat16, False, 2]
    assert (min(rows), max(rows)) == (40, 2048), "full steps too"
    assert with_graphs < set(rows)
    rows, *others = asked[8192, 1024]
    assert others == [torch.float16, True, 1]
    assert (min(rows), max(rows)) == (40 if on_hopper else 144, 640), "elsewhere our kernel keeps up to 128 rows"
    assert with_graphs - {40} < set(rows)


def linear(outputs, inner, *, bias=False, fp8=False):
    """As it is on a GPU after loading."""
    layer = Linear(inner, outputs, bias=bias)
    layer.weight = torch.nn.Parameter(torch.empty(outputs, inner, dtype=FP8 if fp8 else torch.bfloat16), False)
    if fp8:
        layer.scale = torch.nn.Parameter(torch.ones(outputs), False)
    layer._product = Linear._on_fp8 if fp8 else Linear._on_gpu
    return layer
