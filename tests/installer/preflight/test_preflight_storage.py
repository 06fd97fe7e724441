"""Disk, file system and read speed on real mounts: tmpfs with limits and options, and ext4 in a file."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from preflight_kit import GIB, FakeMachine, context

from installer.preflight import read_speed, storage

MIB = 1 << 20
Mounted = Callable[..., Path]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    """``mounted("size=64m")`` → a tmpfs with these options, where this user may mount."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    points: list[Path] = []

    def mount(options: str, at: Path | None = None) -> Path:
        point = at or tmp_path / f"mount{len(points)}"
        point.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", point], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no mounts here: {done.stderr.strip()}")
        points.append(point)
        return point

    yield mount
    for point in reversed(points):
        subprocess.run(["umount", point], check=True)


# -- 15


@pytest.mark.parametrize(
    ("size", "copy", "status"), [("2g", 100 * MIB, "pass"), ("800m", 400 * MIB, "warn"), ("64m", 100 * MIB, "fail")]
)
def test_room_on_a_small_disk(tmp_path: Path, mounted: Mounted, size: str, copy: int, status: str) -> None:
    mounted(f"size={size}", tmp_path / "prefix")
    record = storage.disk(context(tmp_path, copy_bytes=copy))
    assert (record.status, record.strict) == (status, True)
    assert "free at" in record.observed


def test_a_server_keeps_twenty_gigabytes_free(tmp_path: Path, mounted: Mounted) -> None:
    mounted("size=10g", tmp_path / "prefix")
    assert storage.disk(context(tmp_path, system=True, copy_bytes=MIB)).status == "warn"
    assert storage.disk(context(tmp_path, copy_bytes=MIB)).status == "pass"


def test_no_inodes(tmp_path: Path, mounted: Mounted) -> None:
    mounted("size=2g,nr_inodes=500", tmp_path / "prefix")
    record = storage.disk(context(tmp_path))
    assert record.status == "fail"
    assert "inodes" in record.observed


def test_code_and_models_on_two_disks(tmp_path: Path, mounted: Mounted) -> None:
    mounted("size=2g", tmp_path / "prefix")
    mounted("size=96m", tmp_path / "prefix/opt/atoll")
    record = storage.disk(context(tmp_path, copy_bytes=MIB, code_bytes=100 * MIB))
    assert record.status == "fail"
    assert "opt/atoll" in record.observed
    assert storage.disk(context(tmp_path, copy_bytes=MIB)).status == "warn"  # it holds, with little to spare


def _usage(used: float, total: int) -> SimpleNamespace:
    blocks = total // 4096
    free = int(blocks * (1 - used))
    return SimpleNamespace(f_bavail=free, f_bfree=free, f_blocks=blocks, f_frsize=4096, f_files=0, f_favail=0)


@pytest.mark.parametrize(("used", "status"), [(0.5, "pass"), (0.85, "warn"), (0.97, "warn")])
def test_a_large_disk_that_fills_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: float, status: str
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: _usage(used, 2000 * GIB))
    assert storage.disk(context(tmp_path, system=True, copy_bytes=GIB)).status == status


def test_more_than_there_is(tmp_path: Path) -> None:
    assert storage.disk(context(tmp_path, copy_bytes=1 << 60)).status == "fail"


# -- 16


@pytest.mark.parametrize(
    ("options", "word", "command"), [("ro", "read-only", "remount,rw"), ("noexec", "noexec", "remount,exec")]
)
def test_unfit_mounts(tmp_path: Path, mounted: Mounted, options: str, word: str, command: str) -> None:
    mounted(f"size=64m,{options}", tmp_path / "prefix")
    record = storage.filesystem(context(tmp_path))
    assert record.status == "fail"
    assert word in record.observed
    assert command in record.command


def test_a_cache_that_is_noexec(tmp_path: Path, mounted: Mounted) -> None:
    mounted("size=64m,noexec", tmp_path / "prefix/var/cache")
    assert "noexec" in storage.filesystem(context(tmp_path)).observed


def test_models_may_lie_on_a_noexec_disk(tmp_path: Path, mounted: Mounted) -> None:
    mounted("size=64m,noexec", tmp_path / "prefix/var/lib/atoll")
    assert storage.filesystem(context(tmp_path)).status == "pass"


def test_symlinks_inside_the_tree(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "prefix/var/lib").mkdir(parents=True)
    (tmp_path / "prefix/var/lib/atoll").symlink_to(tmp_path / "elsewhere")
    record = storage.filesystem(context(tmp_path))
    assert record.status == "fail"
    assert "mount --bind" in record.command


def test_network_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage.filesystem(context(tmp_path)).status == "pass"
    mount = SimpleNamespace(fstype="nfs4", mountpoint="/srv")
    monkeypatch.setattr(storage, "mount_of", lambda path: mount)
    assert storage.filesystem(context(tmp_path)).status == "warn"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "prefix").mkdir(mode=0o555)
    assert storage.filesystem(context(tmp_path)).status == "fail"


# -- 17


def test_a_real_file_is_read_past_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(MIB) * 80)
    count, seconds = read_speed.measure(path)
    assert count == 80 * MIB
    assert seconds > 0


def test_reading_stops_when_patience_ends(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(256 * GIB)  # holes are read as fast as memory is cleared
    count, _ = read_speed.measure(path, amount=256 * GIB, patience=0.05)
    assert count < 256 * GIB


def test_a_short_file_is_not_worth_it(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x" * MIB)
    assert read_speed._largest(tmp_path) is None
    with pytest.raises(OSError, match="short"):
        read_speed.measure(tmp_path / "a.safetensors")


@pytest.mark.parametrize(("speed", "status"), [(3e9, "pass"), (0.5e9, "warn"), (0.05e9, "warn")])
def test_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speed: float, status: str) -> None:
    bundle = tmp_path / "bundle/model"
    bundle.mkdir(parents=True)
    with (bundle / "model.safetensors").open("wb") as file:
        file.truncate(read_speed.LEAST_FILE)
    monkeypatch.setattr(read_speed, "block_device", lambda machine, path: None)
    monkeypatch.setattr(read_speed, "measure", lambda source: (GIB, GIB / speed))
    record = read_speed.read_speed(context(tmp_path, system=True, bundle=tmp_path / "bundle"))
    assert record.status == status
    assert "GB/s from" in record.observed
    small, large = (context(tmp_path, bundle=tmp_path / "bundle", weight_bytes=size) for size in (MIB, 100 * GIB))
    assert read_speed.read_speed(small).status == "pass"  # a trial under a prefix is not held up by it
    assert read_speed.read_speed(large).status == status


def test_nothing_to_measure(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path / "root")
    assert read_speed.read_speed(context(tmp_path, machine=machine)).status == "pass"
    assert read_speed.read_speed(context(tmp_path, machine=machine, system=True)).status == "warn"


def test_the_store_is_measured_first(tmp_path: Path) -> None:
    plans = context(tmp_path)
    model = plans.layout.models / "d/model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(os.urandom(MIB) * 72)
    record = read_speed.read_speed(plans)
    assert str(model) in record.observed
