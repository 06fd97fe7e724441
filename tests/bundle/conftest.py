"""One bundle, built once; tests that change it take a copy."""

from pathlib import Path

import pytest
from bundle_kit import Made, build, make_model

from offline_bundle.keys import KeyPair, new_keypair


@pytest.fixture(scope="session")
def vendor(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return new_keypair(tmp_path_factory.mktemp("trust") / "keys", "vendor")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return new_keypair(tmp_path_factory.mktemp("stranger") / "keys", "stranger")


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory, vendor: KeyPair) -> Made:
    """A good bundle. Do not change it."""
    base = tmp_path_factory.mktemp("pristine")
    source = make_model(base / "src")
    return Made(build(source, base / "out", vendor), vendor, source)


@pytest.fixture
def made(pristine: Made, tmp_path: Path) -> Made:
    """A copy of the good bundle, to be spoilt."""
    return pristine.copy_to(tmp_path / "media")
