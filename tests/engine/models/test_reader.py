"""Tensors stream from files in order, whatever the size of the buffers; faults are named and no thread stays."""

import os
import threading

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ModelError
from engine.models.loading.checkpoint import read_header
from engine.models.loading.reader import Reader

CPU = torch.device("cpu")


@pytest.fixture
def shards(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(100, 33), "b": torch.randn(7).bfloat16(), "c": torch.randn(64, 64).half(),
        "d": torch.randn(3, 5, 7, dtype=torch.float64), "e": torch.empty(0, 4), "f": torch.randn(1),
    }
    save_file({k: tensors[k] for k in "abc"}, tmp_path / "1.safetensors")
    save_file({k: tensors[k] for k in "def"}, tmp_path / "2.safetensors")
    infos = read_header(tmp_path / "1.safetensors") | read_header(tmp_path / "2.safetensors")
    return tensors, infos


def read(infos, names, dtype=None, **options):
    with Reader([infos[n] for n in names], CPU, **options) as reader:
        found = {}
        for name in names:
            kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
            found[name] = torch.empty(infos[name].shape, dtype=dtype or kinds[infos[name].dtype])
            reader.copy_to(found[name])
    return found


@pytest.mark.parametrize(("buffer_bytes", "num_buffers"), [(8, 3), (64, 1), (1000, 4), (1 << 20, 8)])
def test_values_and_order(shards, buffer_bytes, num_buffers):
    tensors, infos = shards
    found = read(infos, "fcaebd", buffer_bytes=buffer_bytes, num_buffers=num_buffers)
    for name, value in found.items():
        assert torch.equal(value, tensors[name]), name


def test_other_dtypes_are_converted(shards):
    tensors, infos = shards
    for name, value in read(infos, "abcdf", torch.bfloat16, buffer_bytes=72).items():
        assert torch.equal(value, tensors[name].bfloat16())


def test_a_file_that_shrinks_is_named(shards):
    _, infos = shards
    shard = infos["a"].shard
    os.truncate(shard, infos["a"].offset + 100)
    with pytest.raises(ModelError, match=r"1\.safetensors became shorter"):
        read(infos, "a")


def test_a_file_that_is_gone_is_named(shards):
    _, infos = shards
    infos["d"].shard.unlink()
    with pytest.raises(ModelError, match=r"2\.safetensors cannot be read"):
        read(infos, "abcd")
    assert not [t for t in threading.enumerate() if t.name.startswith("weights")]


def test_an_interrupt_ends_the_threads_and_closes_the_files(shards):
    _, infos = shards
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt), Reader([infos["a"]] * 50, CPU, buffer_bytes=64) as reader:
        reader.copy_to(torch.empty(100, 33))
        raise KeyboardInterrupt
    assert not [t for t in threading.enumerate() if t.name.startswith("weights")]
    assert set(os.listdir("/proc/self/fd")) <= before
