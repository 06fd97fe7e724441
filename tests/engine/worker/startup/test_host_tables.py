"""Gemma 4's per-layer embeddings on the host: where they are put, what the plan says of them, and how they are loaded.

What a GPU does with them is tests/gpu/test_gpu_host_table.py's; the kernel, test_triton_host_rows.py's.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.capabilities import check_capabilities
from engine.config import EngineConfig
from engine.core.kv.planner import GIB, MemoryBudget, plan_memory
from engine.core.kv.spec import CacheSpec
from engine.errors import ConfigError, ModelError, OutOfMemoryPlanError
from engine.kernels.runtime import host_memory
from engine.kernels.runtime.host_memory import HostMemoryError
from engine.models.config.model import ModelConfig
from engine.models.loading.checkpoint import check_checkpoint
from engine.models.loading.loader import fill_randomly, load_weights
from engine.models.loading.reader import read_into
from engine.models.registry import model_class
from engine.worker.startup import embedding_offload
from engine.worker.startup.memory import (
    GpuMemory,
    StepNeeds,
    check_weights_fit,
    gpu_budget,
    host_bytes,
    loaded_bytes,
    weight_bytes,
)

GPU = torch.device("cuda", 0)
VOCAB, LAYERS, SIZE = 400, 4, 48
TABLE_BYTES = VOCAB * LAYERS * SIZE * 2
NAME = "model.embed_tokens_per_layer.weight"
RAW = {
    "architectures": ["Gemma4ForCausalLM"], "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
    "global_head_dim": 32, "sliding_window": 24, "max_position_embeddings": 512, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": SIZE,
    "vocab_size_per_layer_input": VOCAB, "torch_dtype": "float16",
}  # fmt: skip


def empty_model(directory, dtype=torch.float16):
    """float16: not packed on a CPU, so of the same size as on a GPU."""
    config = ModelConfig.load(directory)
    torch.set_default_dtype(dtype)
    try:
        return model_class(config)(config, 64)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture
def model_dir(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(tuple(target.shape), generator=generator).half()
        for name, target in empty_model(tmp_path).weights().items()
    }
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def config(directory=Path(), place="auto"):
    return EngineConfig(directory, per_layer_embeddings=place)


@pytest.fixture
def machine(monkeypatch):
    """A GPU with memory of its own, and a host with `left` bytes available."""
    state = SimpleNamespace(left=64 * GIB, integrated=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(is_integrated=state.integrated))
    monkeypatch.setattr(embedding_offload, "host_memory", lambda: (128 * GIB, state.left))
    return state


@pytest.fixture
def locked(monkeypatch):
    """Tables that were locked: there is no driver here."""
    tables = []
    monkeypatch.setattr(embedding_offload, "lock", tables.append)
    return tables


def kept(directory, place="auto"):
    model = empty_model(directory)
    embedding_offload.keep_tables(model, config(place=place), GPU)
    return model


# Where they are put.


@pytest.mark.parametrize("place", ["auto", "host"])
def test_on_the_host_they_are_no_part_of_the_gpus_weights(machine, locked, model_dir, place):
    on_gpu, model = kept(model_dir, "gpu"), kept(model_dir, place)
    assert (host_bytes(on_gpu), host_bytes(model)) == (0, TABLE_BYTES)
    assert loaded_bytes(on_gpu) - loaded_bytes(model) == TABLE_BYTES
    load_weights(model, model_dir)
    embedding_offload.lock_tables(model, config(), GPU)
    assert [table.data_ptr() for table in locked] == [model.lookup_tables()[0].weight.data_ptr()]
    load_weights(on_gpu, model_dir)
    embedding_offload.lock_tables(on_gpu, config(), GPU)
    assert len(locked) == 1
    assert weight_bytes(on_gpu) == loaded_bytes(on_gpu)
    assert weight_bytes(model) == loaded_bytes(model) == weight_bytes(on_gpu) - TABLE_BYTES


def test_a_gpu_that_shares_the_hosts_memory_keeps_them(machine, model_dir):
    machine.integrated = 1
    assert not host_bytes(kept(model_dir))
    assert host_bytes(kept(model_dir, "host")), "who asks for it gets it"


def test_with_too_little_host_memory_they_stay_on_the_gpu_and_the_log_says_so(machine, model_dir, caplog):
    machine.left = 4 * GIB + TABLE_BYTES - 1
    with caplog.at_level(logging.WARNING):
        assert not host_bytes(kept(model_dir))
    assert "take 0.1 MiB of the GPU's memory: on the host, 4.00 GiB are available" in caplog.text
    machine.left += 1
    assert host_bytes(kept(model_dir))


def test_asked_for_but_impossible_is_refused_with_the_numbers_and_what_to_do(machine, model_dir, monkeypatch):
    machine.left = 3 * GIB
    with pytest.raises(ConfigError, match=r"0\.1 MiB cannot be kept .*: 3\.00 GiB are available") as refusal:
        kept(model_dir, "host")
    assert refusal.value.flag == "--per-layer-embeddings"
    assert "MemoryMax=" in refusal.value.hint
    machine.left = 64 * GIB

    def nothing(*_):
        raise HostMemoryError("the system refused memory (Cannot allocate memory)")

    monkeypatch.setattr(host_memory, "empty", nothing)
    assert not host_bytes(kept(model_dir))
    with pytest.raises(ConfigError, match="the system refused memory"):
        kept(model_dir, "host")


def test_a_model_without_them_is_left_alone(machine, tiny_llama_dir, caplog):
    directory = tiny_llama_dir("gqa")
    with caplog.at_level(logging.INFO):
        assert not host_bytes(kept(directory))
        assert not caplog.text
        kept(directory, "host")
    assert "--per-layer-embeddings host changes nothing" in caplog.text


@pytest.mark.parametrize(("place", "device", "reason"), [
    ("disk", "cuda", "disk is not available"), ("gpu", "cpu", "gpu is not available on cpu"),
])  # fmt: skip
def test_what_no_device_can_do_is_refused(place, device, reason):
    with pytest.raises(ConfigError, match=reason) as refusal:
        check_capabilities(config(place=place), device)
    assert refusal.value.flag == "--per-layer-embeddings"


@pytest.mark.parametrize(("place", "device"), [("auto", "cpu"), ("host", "cpu"), ("gpu", "cuda"), ("host", "cuda")])
def test_what_a_device_can_do_is_not(place, device):
    check_capabilities(config(place=place), device)


# What cannot be locked.


@pytest.fixture
def unlockable(monkeypatch):
    def refuse(_):
        raise HostMemoryError("the CUDA driver says: operation not supported (801)")

    monkeypatch.setattr(embedding_offload, "lock", refuse)


def test_what_cannot_be_locked_moves_to_the_gpu(machine, unlockable, model_dir, caplog):
    model = kept(model_dir)
    load_weights(model, model_dir)
    [table] = model.lookup_tables()
    before = table.weight.clone()
    with caplog.at_level(logging.WARNING):
        embedding_offload.lock_tables(model, config(), torch.device("cpu"))  # the one that is here
    assert "operation not supported" in caplog.text
    assert not table.on_host
    assert torch.equal(table.weight, before)
    assert host_bytes(model) == 0
    assert weight_bytes(model) == loaded_bytes(kept(model_dir, "gpu"))


def test_what_cannot_be_locked_but_was_asked_for_is_refused(machine, unlockable, model_dir):
    model = kept(model_dir, "host")
    with pytest.raises(ConfigError, match=r"cannot be locked for cuda:0: the CUDA driver says") as refusal:
        embedding_offload.lock_tables(model, config(place="host"), GPU)
    assert "--per-layer-embeddings gpu" in refusal.value.hint


def test_what_fits_nowhere_is_refused(machine, unlockable, model_dir, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB, 8 * GIB))
    monkeypatch.setattr(torch.Tensor, "to", full)
    model = kept(model_dir)
    with pytest.raises(OutOfMemoryPlanError, match=r"fit nowhere: .*801.*1\.00 GiB of the 8\.00 GiB on cuda:0"):
        embedding_offload.lock_tables(model, config(), GPU)


# What the plan says.


def test_the_plan_has_a_line_that_adds_nothing(machine, model_dir, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (79 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    model = kept(model_dir)
    spec = CacheSpec(tuple(model.cache_layers()), 2, 16)
    arguments = {"device": "cuda:0", "max_model_len": 512, "model_max_len": 512, "max_num_seqs": 8,
                 "default_num_seqs": 8}
    needs = StepNeeds(GIB, 0, 0, 2 * GIB)

    def plan(on_host):
        return plan_memory(gpu_budget(config(), GIB, needs, GpuMemory.now(GPU), on_host), spec, **arguments)

    usual, saving = plan(0), plan(5 * GIB)
    assert saving.budget.on_host == 5 * GIB
    assert saving.resident_bytes == usual.resident_bytes
    assert saving.num_slabs == usual.num_slabs
    lines = saving.table().splitlines()
    [line] = [line for line in lines if "in host memory" in line]
    assert "5.00 GiB" in line
    assert "as much GPU memory is saved" in line
    lines.remove(line)
    assert lines == usual.table().splitlines()


def test_a_budget_of_a_cpu_has_no_such_line():
    assert MemoryBudget(GIB, GIB, 0, 0).on_host == 0


def test_weights_that_do_not_fit_name_the_way_to_the_host(machine, model_dir):
    card = GpuMemory(GPU, 80 * GIB, 80 * GIB)
    with pytest.raises(OutOfMemoryPlanError) as refusal:
        check_weights_fit(kept(model_dir, "gpu"), config(), card)
    assert "--per-layer-embeddings host keeps 0.1 MiB of them in host memory" in refusal.value.hint
    with pytest.raises(OutOfMemoryPlanError) as refusal:
        check_weights_fit(kept(model_dir), config(), card)
    assert "per-layer" not in refusal.value.hint


# How they are loaded.


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_loaded_in_place_with_the_bits_of_the_file(machine, model_dir, dtype):
    model = empty_model(model_dir, dtype)
    embedding_offload.keep_tables(model, config(), GPU)
    [table] = model.lookup_tables()
    address, seen = table.weight.data_ptr(), []
    load_weights(model, model_dir, lambda _stage, done, total: seen.append((done, total)))
    assert table.weight.data_ptr() == address
    file = load_file(model_dir / "model.safetensors")
    for name, weight in model.weights().items():
        assert torch.equal(weight, file[name].to(dtype)), name
    assert seen[-1][0] == seen[-1][1] == sum(t.nbytes for t in file.values())
    assert seen == sorted(seen)


def test_a_large_one_comes_in_pieces(machine, model_dir, monkeypatch):
    from engine.models.loading import reader

    monkeypatch.setattr(reader, "_BUFFER_BYTES", 1000)
    model, seen = kept(model_dir), []
    load_weights(model, model_dir, lambda _stage, done, _total: seen.append(done))
    assert torch.equal(model.lookup_tables()[0].weight, load_file(model_dir / "model.safetensors")[NAME])
    assert len(seen) >= TABLE_BYTES / 1000, "progress is told meanwhile"


def test_a_file_that_ends_early_is_named(model_dir):
    info = check_checkpoint(model_dir)[NAME]
    os.truncate(info.shard, info.offset + info.num_bytes - 1)
    with pytest.raises(ModelError, match=r"model\.safetensors became shorter"):
        read_into(info, torch.empty(info.shape, dtype=torch.float16), lambda _: None)


def test_random_weights_fill_it_with_copies_of_a_block(machine, model_dir, monkeypatch):
    from engine.models.loading import loader

    monkeypatch.setattr(loader, "_RANDOM_BLOCK", 10_001)
    model, again = kept(model_dir), kept(model_dir)
    fill_randomly(model, 3)
    fill_randomly(again, 3)
    table = model.lookup_tables()[0].weight
    assert torch.equal(table, again.lookup_tables()[0].weight)
    assert 0.019 < table.float().std() < 0.021
    assert len(table.unique(dim=0)) == VOCAB, "no row is another's copy"
    assert torch.equal(table.flatten()[:10_001], table.flatten()[10_001:20_002])


_MEASURED = """
import sys, torch
from pathlib import Path
from engine.config import EngineConfig
from engine.models.loading.loader import load_weights
from engine.worker.startup import embedding_offload
sys.path.insert(0, sys.argv[1])
from test_host_tables import empty_model

def peak():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))

model = empty_model(Path(sys.argv[2]))
embedding_offload._shares_memory = lambda _: False
embedding_offload._RESERVE = 0
embedding_offload.keep_tables(model, EngineConfig(Path(), per_layer_embeddings="host"), torch.device("cuda", 0))
before = peak()
load_weights(model, Path(sys.argv[2]))
print(peak() - before)
"""


def test_loading_takes_the_table_and_little_more(tmp_path):
    """192 MB of a table: no second copy of it, in whatever form, is ever in memory."""
    raw = RAW | {"vocab_size": 2000, "vocab_size_per_layer_input": 500_000}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    weights = {name: torch.zeros(w.shape, dtype=w.dtype) for name, w in empty_model(tmp_path).weights().items()}
    size = weights[NAME].nbytes
    assert size == 500_000 * LAYERS * SIZE * 2
    save_file(weights, tmp_path / "model.safetensors")
    del weights
    command = [sys.executable, "-c", _MEASURED, str(Path(__file__).parent), str(tmp_path)]
    root = Path(__file__).parents[4]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert size <= int(done.stdout) <= size + (96 << 20), "the table, and pages of libraries and of small tensors"
