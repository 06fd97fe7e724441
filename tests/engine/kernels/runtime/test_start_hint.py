"""A start that is like one that went well before starts no compilers."""

import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.kernels.runtime import warm_cache_hint
from engine.worker.startup import build


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    place = tmp_path / "cache"
    place.mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(place))
    return place


def test_it_is_found_by_the_same_start_only(cache):
    assert not warm_cache_hint.found("a", "b")
    warm_cache_hint.write("a", "b")
    assert warm_cache_hint.found("a", "b")
    assert not warm_cache_hint.found("a", "c")
    assert not warm_cache_hint.found("ab", "")
    (left,) = cache.iterdir()
    assert stat.S_IMODE(left.stat().st_mode) == 0o600
    left.unlink()
    assert not warm_cache_hint.found("a", "b"), "it went with the cache"


def test_other_kernels_other_tiles_or_another_triton_are_another_start(monkeypatch, tmp_path):
    kernels = tmp_path / "kernels"
    shutil.copytree(Path(warm_cache_hint.__file__).parents[1], kernels)
    monkeypatch.setattr(warm_cache_hint, "__file__", str(kernels / "runtime/warm_cache_hint.py"))
    warm_cache_hint.write("a")
    (kernels / "__pycache__").mkdir(exist_ok=True)
    (kernels / "__pycache__/new.pyc").write_bytes(b"x")
    for name in ("pointwise/fused.py", "moe/tuned.json"):
        assert warm_cache_hint.found("a")
        kept = (kernels / name).read_bytes()
        (kernels / name).write_bytes(kept + b" ")
        assert not warm_cache_hint.found("a")
        (kernels / name).write_bytes(kept)
    assert warm_cache_hint.found("a")
    another = [SimpleNamespace(version="1.2.3")]
    monkeypatch.setattr(warm_cache_hint.metadata, "distributions", lambda name: another)
    assert not warm_cache_hint.found("a")


def test_a_cache_that_takes_nothing_does_no_harm(cache):
    cache.rmdir()
    warm_cache_hint.write("a")
    assert not warm_cache_hint.found("a")


def test_what_decides_is_the_card_the_flags_and_the_model(monkeypatch):
    names = {"cuda:0": "NVIDIA H100", "cuda:1": "NVIDIA A100"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[str(device)])

    def deciding(card="cuda:0", layers=2, **flags):
        config = EngineConfig(Path("model"), **flags)
        return build._deciding(
            config, SimpleNamespace(raw={"num_hidden_layers": layers}), SimpleNamespace(device=torch.device(card))
        )

    starts = [deciding(), deciding(card="cuda:1"), deciding(layers=3), deciding(kv_cache_dtype="fp8")]
    assert len({*starts}) == 4
    assert deciding() == starts[0]
