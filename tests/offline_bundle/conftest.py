"""One bundle, built once; tests that change it take a copy."""

import shutil
import sys
from pathlib import Path

import pytest
import runtime_kit
from bundle_kit import Made, build, make_model
from runtime_kit import Installed

from offline_bundle.runtime import wheels
from offline_bundle.signing.keys import KeyPair, new_keypair


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
    """Our own wheel, built from this checkout, with the setuptools of this environment instead of one from an index."""
    out = tmp_path_factory.mktemp("own") / "wheel"
    out.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip reads this option's variable the wrong way round
        return wheels.build_own_wheel(out, Path(sys.executable))


@pytest.fixture(scope="session")
def full_medium(tmp_path_factory: pytest.TempPathFactory, vendor: KeyPair, own_wheel: Path) -> Path:
    """A good medium whose runtime is Atoll itself, without the engine's packages. Do not change it."""
    return runtime_kit.build(tmp_path_factory.mktemp("full") / "medium", vendor, own_wheel=own_wheel)


@pytest.fixture(scope="session")
def small_wheel(tmp_path_factory: pytest.TempPathFactory, own_wheel: Path) -> Path:
    return runtime_kit.small_release(own_wheel, tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def medium(tmp_path_factory: pytest.TempPathFactory, vendor: KeyPair, small_wheel: Path) -> Path:
    """A good medium whose program is small, for tests of what checks and unpacks it. Do not change it:
    `runtime_kit.copy` makes one to spoil."""
    out = tmp_path_factory.mktemp("good") / "medium"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")  # so that a second build can be compared with it
        return runtime_kit.build(out, vendor, own_wheel=small_wheel, packages=runtime_kit.FEW)


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory, full_medium: Path, vendor: KeyPair) -> Installed:
    """Atoll, installed once from the full medium. There is no model on it, so `atoll install` ends with 13."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1) of util-linux")
    base = tmp_path_factory.mktemp("installed")
    done = runtime_kit.install(
        full_medium, runtime_kit.bare_path(base / "path"), "--prefix", base / "p", "--trust-key", vendor.public_path,
        language="ko_KR.UTF-8",
    )  # fmt: skip
    assert done.returncode == 13, done.stderr
    return Installed(base / "p", done.stdout + done.stderr)


@pytest.fixture(scope="session")
def installed(installation: Installed) -> Path:
    """The prefix of `installation`. A test that changes it puts it back."""
    return installation.prefix


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A PATH without pip and compilers."""
    return runtime_kit.bare_path(tmp_path / "path")
