"""How much of a model's weights its signed configuration says may stay in main memory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.models.config.model import ModelConfig
from engine.models.registry import model_class
from installer.base.layout import Layout
from installer.preflight import lookup_tables
from installer.preflight.model_needs import of_manifests, read_needs
from offline_bundle.model.build import build_bundle
from offline_bundle.model.manifest import BundleManifest
from offline_bundle.signing.keys import KeyPair

E2B = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512,
    "vocab_size": 262144, "num_attention_heads": 8, "sliding_window": 512, "num_hidden_layers": 35,
    "hidden_size": 1536, "num_key_value_heads": 1, "intermediate_size": 6144, "num_kv_shared_layers": 20,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "use_double_wide_mlp": True,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "max_position_embeddings": 131072,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "final_logit_softcapping": 30.0,
}  # fmt: skip


@pytest.mark.parametrize("left_out", [(), ("vocab_size_per_layer_input", "hidden_size_per_layer_input")])
def test_it_is_what_the_engine_makes_of_the_same_configuration(left_out: tuple[str, ...]) -> None:
    raw = {name: value for name, value in E2B.items() if name not in left_out}
    config = ModelConfig.parse(raw)
    tables = model_class(config)(config, 64).lookup_tables()
    assert lookup_tables.of_config(raw) == sum(table.weight.numel() * 2 for table in tables) == 4_697_620_480
    nested = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": raw, "dtype": "float32"}
    assert lookup_tables.of_config(nested) == 9_395_240_960


@pytest.mark.parametrize("config", [
    {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}, {"architectures": 4, "num_hidden_layers": 32},
    {**E2B, "hidden_size_per_layer_input": 0}, [], None, {},
    {**E2B, "num_hidden_layers": -1}, {**E2B, "num_hidden_layers": "35"}, {**E2B, "num_hidden_layers": True},
])  # fmt: skip
def test_a_model_without_them(config: Any) -> None:
    assert lookup_tables.of_config(config) == 0


@pytest.fixture
def medium(tmp_path: Path, signer: KeyPair) -> Path:
    """A bundle of a small model with such a table: 512 rows x 4 layers x 64 numbers of two bytes."""
    model = tmp_path / "model"
    model.mkdir()
    config = {**E2B, "num_hidden_layers": 4, "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 512}
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "BPE"}}))
    save_file({"model.embed_tokens.weight": np.zeros(1 << 18, dtype=np.float32)}, model / "model.safetensors")
    (tmp_path / "LICENSE").write_text("Take it.\n")
    return build_bundle(
        model, tmp_path, name="small", version="1.0.0", sequence=1, license_id="LicenseRef-Test",
        license_file=tmp_path / "LICENSE", source_repo="example/small", source_revision="0" * 40,
        private_key=signer.private_path,
    )  # fmt: skip


def test_a_signed_configuration_is_believed_and_no_other(medium: Path, signer: KeyPair, tmp_path: Path) -> None:
    (need,) = read_needs(medium, [signer.public_path], Layout.at(tmp_path / "prefix")).values["models"]
    assert (need.table_bytes, need.tables) == (512 * 4 * 64 * 2, "auto")
    manifest = BundleManifest.parse((medium / "bundle.json").read_bytes())
    (need,) = of_manifests({"a": manifest}, sources={"a": medium}, tables={"a": "gpu"})["models"]
    assert (need.table_bytes, need.tables) == (512 * 4 * 64 * 2, "gpu")
    config = medium / "model/config.json"
    good = config.read_text()
    config.write_text(good.replace("512", "513", 1))
    assert lookup_tables.of_bundle(medium, manifest) == 0
    config.unlink()
    assert lookup_tables.of_bundle(medium, manifest) == 0
    config.symlink_to(tmp_path / "LICENSE")
    assert lookup_tables.of_bundle(medium, manifest) == 0


def test_it_is_never_more_than_the_weights(medium: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = BundleManifest.parse((medium / "bundle.json").read_bytes())
    monkeypatch.setattr(lookup_tables, "of_config", lambda _: 1 << 40)
    assert lookup_tables.of_bundle(medium, manifest) == sum(f.size for f in manifest.files if f.role == "weights")
