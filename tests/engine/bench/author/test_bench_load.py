"""The load benchmark: what it writes is a checkpoint, what it measures adds up, and it cleans up."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from engine.bench import __main__ as bench
from engine.bench.author import random_checkpoint
from engine.models.loading.checkpoint import check_checkpoint
from engine.models.loading.loader import load_weights

_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "vocab_size": 500, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "eos_token_id": 0,
}  # fmt: skip


@pytest.fixture
def config_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(_CONFIG))
    return directory


def test_what_is_written_is_a_checkpoint_of_that_many_layers(config_dir: Path, tmp_path: Path):
    target = tmp_path / "written"
    target.mkdir()
    random_checkpoint.write(config_dir, target, num_layers=2)
    tensors = check_checkpoint(target)
    rest, layer = random_checkpoint.num_bytes(config_dir)
    assert sum(t.num_bytes for t in tensors.values()) == rest + 2 * layer
    model = random_checkpoint.empty_model(target)
    load_weights(model, target)
    assert {name.split(".")[2] for name in model.weights() if "layers" in name} == {"0", "1"}
    with safe_open(tensors["lm_head.weight"].shard, framework="pt") as file:
        head, embedding = (file.get_tensor(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    assert torch.equal(model.weights()["model.embed_tokens.weight"], embedding)
    assert not torch.equal(head, embedding)
    assert 0.01 < head.float().std() < 0.03


def test_as_many_layers_as_fit(config_dir: Path):
    rest, layer = random_checkpoint.num_bytes(config_dir)
    assert random_checkpoint.layers_within(config_dir, rest + 3 * layer) == 3
    assert random_checkpoint.layers_within(config_dir, rest + 99 * layer) == 5
    assert random_checkpoint.layers_within(config_dir, 0) == 1


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_row_for_a_bare_config(config_dir: Path, tmp_path: Path, capsys, quantization):
    options = ["--quantization", quantization] if quantization else []
    root = tmp_path / "root"
    root.mkdir()
    assert bench.main(["load", "--model", str(config_dir), "--device", "cpu", "--layers", "3", "--repeats", "2",
                       "--dir", str(root), "--json", *options]) == 0  # fmt: skip
    row = json.loads(capsys.readouterr().out)
    rest, layer = random_checkpoint.num_bytes(config_dir)
    assert (row["bench"], row["layers"], row["quantization"]) == ("load", 3, quantization)
    assert row["file_gb"] == pytest.approx((rest + 3 * layer) / 1e9, abs=0.001)
    assert row["gb_s"] == pytest.approx((rest + 3 * layer) / 1e9 / row["secs"], rel=0.5, abs=0.02)
    assert len(row["secs_all"]) == 2
    assert "device_peak_over_weights_gb" not in row
    assert not list(root.iterdir()), "the weights were written for the benchmark only"


def test_too_little_room_is_refused(config_dir: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(random_checkpoint.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    assert bench.main(["load", "--model", str(config_dir), "--device", "cpu", "--dir", str(tmp_path)]) == 1
    assert "fewer --layers" in capsys.readouterr().err


def test_stages_read_every_byte_and_say_how_fast(config_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    status = bench.main([
        "load", "--model", str(config_dir), "--dir", str(tmp_path), "--device", "cpu", "--layers", "2",
        "--repeats", "1", "--stages", "--threads", "1", "3", "--buffer-mib", "1", "--cold", "--json",
    ])  # fmt: skip
    assert status == 0
    *stages, whole = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(row["stage"], row["threads"]) for row in stages] == [("read", 1), ("read", 3), ("both", 1), ("both", 3)]
    assert all(row["gb_s"] > 0 and row["cold"] for row in stages)
    assert whole["cold"]
    assert whole["layers"] == 2
