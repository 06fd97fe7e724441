"""A signed bundle of a tiny model, and a place to install it to."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from installer_kit import Site
from safetensors.numpy import save_file
from server_kit import Server, empty_server

from installer.operate.lifecycle import stop
from offline_bundle.model.build import build_bundle
from offline_bundle.signing.keys import KeyPair, new_keypair

LICENCE_TEXT = "You may use this model for tests.\n" * 20


@pytest.fixture(scope="session")
def signer(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return new_keypair(tmp_path_factory.mktemp("keys"), "vendor")


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory, signer: KeyPair) -> Callable[..., Path]:
    """``bundle(sequence=1, acceptance="click", megabytes=1, runtime=None)`` → directory of a signed bundle; equal calls
    share it. `runtime`: the versions of Atoll that it asks for."""
    made: dict[tuple[int, str, int, str | None], Path] = {}

    def make(sequence: int = 1, acceptance: str = "click", megabytes: int = 1, runtime: str | None = None) -> Path:
        key = (sequence, acceptance, megabytes, runtime)
        if key not in made:
            root = tmp_path_factory.mktemp("bundle")
            model = root / "source"
            model.mkdir()
            config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
            (model / "config.json").write_text(json.dumps(config))
            (model / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "BPE"}}))
            weights = np.full((megabytes << 20) // 4, sequence, dtype=np.float32)
            save_file({"model.embed_tokens.weight": weights}, model / "model.safetensors")
            (root / "LICENSE").write_text(LICENCE_TEXT)
            made[key] = build_bundle(
                model,
                root,
                name="tiny",
                version=f"1.{sequence}.0",
                sequence=sequence,
                license_id="LicenseRef-Test",
                license_file=root / "LICENSE",
                source_repo="example/tiny",
                source_revision="0" * 40,
                private_key=signer.private_path,
                acceptance=acceptance,  # type: ignore[arg-type]
                requires={"runtime": runtime},
            )
        return made[key]

    return make


@pytest.fixture
def site(tmp_path: Path, free_port: Callable[[], int], signer: KeyPair) -> Iterator[Site]:
    made = Site(tmp_path / "prefix", free_port(), signer.public_path)
    yield made
    if made.layout.journal.exists():
        stop(made.layout, service=made.service)
    else:
        made.service.stop()


@pytest.fixture
def server(tmp_path: Path, free_port: Callable[[], int], signer: KeyPair) -> Iterator[Server]:
    """A server's root with nothing of ours, for installs of the system form."""
    made = empty_server(tmp_path / "server", free_port(), signer.public_path)
    yield made
    made.service.stop()
