"""Tensors stream from files in order, whatever the size of the buffers; faults are named and no thread stays."""

import os
import sys
import threading
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ModelError
from engine.models.loading.checkpoint import read_header
from engine.models.loading.reader import Reader, _fills

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


@pytest.mark.parametrize(("buffer_bytes", "num_buffers"), [(64, 1), (64, 3), (1024, 4), (1 << 20, 8)])
def test_values_and_order(shards, buffer_bytes, num_buffers):
    tensors, infos = shards
    found = read(infos, "fcaebd", buffer_bytes=buffer_bytes, num_buffers=num_buffers)
    for name, value in found.items():
        assert torch.equal(value, tensors[name]), name


def test_other_dtypes_are_converted(shards):
    tensors, infos = shards
    for name, value in read(infos, "abcdf", torch.bfloat16, buffer_bytes=128).items():
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


def test_many_small_tensors_share_buffers_and_large_ones_are_cut(tmp_path):
    """Of odd sizes, in several files, in another order than the files': each byte once, in few reads."""
    torch.manual_seed(0)
    kinds = [torch.bfloat16, torch.float32, torch.uint8, torch.float64, torch.int8]
    sizes = [1, 3, 7, 64, 65, 1000, 4095, 40_000]
    tensors = {
        f"t{i:03}": torch.randint(-100, 100, (sizes[i % len(sizes)] + i % 5,)).to(kinds[i % len(kinds)])
        for i in range(300)
    }
    names = sorted(tensors)
    for shard in range(3):
        save_file({name: tensors[name] for name in names[shard::3]}, tmp_path / f"{shard}.safetensors")
    infos = {name: info for shard in range(3) for name, info in read_header(tmp_path / f"{shard}.safetensors").items()}
    order = [names[i * 7 % len(names)] for i in range(len(names))]
    fills = _fills([infos[name] for name in order], 4096)
    total = sum(infos[name].num_bytes for name in order)
    assert sum(part.size for fill in fills for part in fill) == total
    assert len(fills) < total / 4096 * 1.2, "a buffer is nearly full"
    assert all(part.start % 64 == 0 and part.start + part.size <= 4096 for fill in fills for part in fill)
    for threads in (1, 4):
        with Reader([infos[n] for n in order], CPU, buffer_bytes=4096, num_buffers=3, num_threads=threads) as reader:
            for name in order:
                found = torch.empty_like(tensors[name])
                reader.copy_to(found)
                assert torch.equal(found, tensors[name]), name


def test_a_file_that_shrinks_below_shared_buffers_is_named_when_its_tensor_is_due(shards):
    _, infos = shards
    os.truncate(infos["f"].shard, infos["f"].offset + 1)
    with Reader([infos[n] for n in "abf"], CPU, buffer_bytes=64) as reader:
        reader.copy_to(torch.empty(100, 33))
        reader.copy_to(torch.empty(7).bfloat16())
        with pytest.raises(ModelError, match=r"2\.safetensors became shorter"):
            reader.copy_to(torch.empty(1))


def test_python_switches_threads_as_before_afterwards(shards):
    _, infos = shards
    before = sys.getswitchinterval()
    with Reader([infos["a"]], CPU) as reader:
        assert sys.getswitchinterval() < before
        reader.copy_to(torch.empty(100, 33))
    assert sys.getswitchinterval() == before
    with pytest.raises(ModelError), Reader([replace(infos["a"], shard=infos["a"].shard / "x")], CPU):
        pass
    assert sys.getswitchinterval() == before
