"""Where the library is not, or what was remembered is damaged, products stay PyTorch's."""

import json

import pytest
import torch

from engine.kernels import cublaslt, products
from engine.kernels.cublaslt import Shape


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
    assert products.choose({(8, 4): [weight]}, [48]) == 0
    assert products.chosen(torch.randn(48, 4, dtype=torch.bfloat16), weight) is None


def test_what_was_found_is_read_back_and_a_damaged_file_is_not(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(cublaslt, "version", lambda: 130100)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card / of ours")
    memory = products._Memory.open()
    memory.known = {Shape(48, 8, 4, torch.bfloat16): b"\x01" * 64, Shape(64, 8, 4, torch.float16): b""}
    memory.save()
    assert products._Memory.open().known == memory.known
    [path] = tmp_path.iterdir()
    assert path.name == "atoll-products-a-card---of-ours-130100-2.json"
    for damaged in ("{", "[[1, 2]]", json.dumps([[48, 8, 4, "no_dtype", ""]]), '[[48, 8, 4, "bfloat16", "zz"]]'):
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
    assert products.chosen(x[:47], weight) is None
