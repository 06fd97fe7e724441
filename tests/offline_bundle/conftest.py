"""One bundle, built once; tests that change it take a copy."""

import sys
from pathlib import Path

import pytest
import runtime_kit
from bundle_kit import Made, build, make_model

from offline_bundle.runtime import wheels
from offline_bundle.signing.keys import KeyPair, new_keypair


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes minutes has a make target of its own (make test-runtime)."""
    if "slow" in (config.option.markexpr or ""):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


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


@pytest.fixture(scope="session")
def own_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our own wheel, built from this checkout."""
    house = tmp_path_factory.mktemp("own") / "wheel"
    house.mkdir()
    return wheels.build_own_wheel(house, Path(sys.executable))


@pytest.fixture(scope="session")
def medium(tmp_path_factory: pytest.TempPathFactory, vendor: KeyPair, own_wheel: Path) -> Path:
    """A good medium with a small real runtime. Do not change it: `runtime_kit.copy` makes one to spoil."""
    return runtime_kit.build(tmp_path_factory.mktemp("good") / "medium", vendor, own_wheel=own_wheel)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A PATH without pip and compilers."""
    return runtime_kit.bare_path(tmp_path / "path")
