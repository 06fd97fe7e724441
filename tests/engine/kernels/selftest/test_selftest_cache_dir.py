"""Compiled kernels are kept where nobody else can put any."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels.runtime import cache_dir

REPOSITORY = Path(__file__).parents[4]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An environment that names nothing, a home below tmp_path."""
    for name in ("TRITON_CACHE_DIR", "CACHE_DIRECTORY", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(cache_dir.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "home").mkdir()
    yield tmp_path
    os.environ.pop("TRITON_CACHE_DIR", None)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_operators_choice_stands(place, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(place / "somewhere/else"))
    assert cache_dir.use_cache_dir() == place / "somewhere/else"
    assert not list((place / "home").iterdir())


def test_a_choice_that_cannot_be_written_to_is_replaced_and_named(place, monkeypatch, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/sys/kernels")  # read-only for root, too
    found = cache_dir.use_cache_dir()
    assert found == place / "home/.cache/atoll/triton"
    assert os.environ["TRITON_CACHE_DIR"] == str(found)
    assert cache_dir.use_cache_dir() == found
    assert [r.getMessage() for r in caplog.records] == [
        f"TRITON_CACHE_DIR=/proc/sys/kernels cannot be written to: kernels go to {found}."
    ]


def test_the_home_is_the_usual_place(place):
    found = cache_dir.use_cache_dir()
    assert found == place / "home/.cache/atoll/triton"
    assert mode(found) == 0o700
    assert os.environ["TRITON_CACHE_DIR"] == str(found)
    assert cache_dir.use_cache_dir() == found


def test_systemds_directory_comes_first(place, monkeypatch):
    for name in ("first", "second", "xdg"):
        (place / name).mkdir()
    monkeypatch.setenv("CACHE_DIRECTORY", f"{place}/first:{place}/second")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{place}/xdg")
    assert cache_dir.use_cache_dir() == place / "first/triton"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.delenv("CACHE_DIRECTORY")
    assert cache_dir.use_cache_dir() == place / "xdg/atoll/triton"


@pytest.mark.parametrize("home", ["/proc", "/nonexistent", "/dev/null"])
def test_a_home_that_cannot_be_written_leads_to_a_private_directory(place, monkeypatch, home):
    monkeypatch.setenv("HOME", home)
    found = cache_dir.use_cache_dir()
    assert found.parent == place
    assert found.name.startswith("atoll-kernels-")
    assert mode(found) == 0o700


def test_a_directory_that_others_can_write_to_is_not_taken(place):
    planted = place / "home/.cache/atoll/triton"
    planted.mkdir(parents=True)
    planted.chmod(0o777)
    assert cache_dir.use_cache_dir() != planted


def test_a_directory_in_a_place_that_others_can_write_to_is_not_taken(place):
    above = place / "home/.cache"
    above.mkdir()
    above.chmod(0o777)
    assert above not in cache_dir.use_cache_dir().parents


def test_a_sticky_place_is_safe_for_what_is_ours(place):
    above = place / "home/.cache"
    above.mkdir()
    above.chmod(0o1777)
    assert cache_dir.use_cache_dir() == above / "atoll/triton"


def test_a_link_is_followed_once_and_for_all(place):
    (place / "real").mkdir()
    (place / "home/.cache").symlink_to(place / "real")
    assert cache_dir.use_cache_dir() == place / "real/atoll/triton"


def test_a_temporary_directory_ends_with_the_process(tmp_path):
    code = "from engine.kernels.runtime.cache_dir import use_cache_dir as u; import os; print(u(), os.path.isdir(u()))"
    environment = {"HOME": "/proc", "TMPDIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    path, existed = done.stdout.split()
    assert existed == "True"
    assert Path(path).parent == tmp_path
    assert not Path(path).exists()
