"""Ingest under everything that goes wrong: kills, lying leftovers, full disks, changed media."""

import hashlib
import itertools
import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bundle_kit import CHUNK, Made, build, forge, make_model, manifest_of, refused, visible

from offline_bundle import BundleError, verify_bundle
from offline_bundle.signing.keys import KeyPair
from offline_bundle.store.ingest import ingest
from offline_bundle.store.store import is_sealed, list_models, locked, remove_model, verify_model

SHARD = "model/model-00001-of-00002.safetensors"
ingest_module = sys.modules["offline_bundle.store.ingest"]  # the package re-exports a function of the same name


def good(made: Made, store: Path) -> None:
    """The store holds exactly this bundle: right bytes, read-only, nothing left over."""
    (digest,) = visible(store)
    found = verify_model(store, digest, made.trusted, deep=True)
    assert found.path == store / digest
    assert is_sealed(store, digest)
    for path in (store / digest).rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o555 if path.is_dir() else 0o444)
    hidden = sorted(p.name for p in store.iterdir() if p.name.startswith("."))
    assert hidden == sorted([".lock", f".{digest}.stamps"])


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child; returns the wait status (0: it finished, 9: it was killed)."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BundleError as e:
            code = e.exit_code
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(call_number: int) -> None:
    """Make this process SIGKILL itself before or after its n-th call that changes the disk."""
    calls = itertools.count(1)  # next() is atomic: no thread can skip the number

    def wrap(real: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            mine = next(calls) == call_number
            if mine and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for i, name in enumerate(["pwrite", "write", "fsync", "rename", "fchmod", "ftruncate", "unlink", "mkdir"]):
        setattr(os, name, wrap(getattr(os, name), after=(call_number + i) % 2 == 0))


def test_ingest_gives_a_read_only_entry(pristine: Made, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    found = ingest(pristine.path, pristine.trusted, tmp_path / "store", progress=lambda *a: seen.append(a))
    assert found.path == tmp_path / "store" / found.digest
    assert found.digest == hashlib.sha256((pristine.path / "bundle.json").read_bytes()).hexdigest()
    assert found.copied_bytes == found.manifest.total_bytes
    assert (found.model_dir / "config.json").read_bytes() == (pristine.path / "model/config.json").read_bytes()
    assert found.key_fingerprint == pristine.keys.fingerprint
    assert seen[0] == ("copy", 0, found.manifest.total_bytes)
    assert seen[-1] == ("copy", found.manifest.total_bytes, found.manifest.total_bytes)
    good(pristine, tmp_path / "store")


def test_a_disk_with_costly_seeks_is_read_chunk_by_chunk(
    pristine: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offline_bundle.parallel._rotational", lambda device: True)
    verify_bundle(pristine.path, pristine.trusted, full=True)
    ingest(pristine.path, pristine.trusted, tmp_path / "store")
    good(pristine, tmp_path / "store")


def test_second_ingest_reads_no_weights(made: Made, tmp_path: Path) -> None:
    first = ingest(made.path, made.trusted, tmp_path / "store")
    (made.path / SHARD).unlink()  # the medium is not needed any more
    again = ingest(made.path, made.trusted, tmp_path / "store")
    assert again.copied_bytes == 0
    assert again.path == first.path
    good(made, tmp_path / "store")


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_random_points_again_and_again(seed: int, pristine: Made, tmp_path: Path) -> None:
    random_ = random.Random(seed)
    store = tmp_path / "store"
    kills = 0
    while kills < 8:
        point = random_.randint(1, 90)

        def work(point: int = point) -> None:
            die_at(point)
            ingest(pristine.path, pristine.trusted, store)

        status = in_child(work)
        if status == 0:  # what the kills before had left to do was less than this: from the beginning again
            good(pristine, store)
            remove_model(store, visible(store)[0])
            continue
        assert status == -signal.SIGKILL
        kills += 1
        for digest in visible(store):  # the only name that may show is a complete entry
            verify_model(store, digest, pristine.trusted, deep=True)
    ingest(pristine.path, pristine.trusted, store)
    good(pristine, store)


@pytest.mark.parametrize("point", range(1, 200, 7))
def test_killed_at_every_kind_of_step_once(point: int, pristine: Made, tmp_path: Path) -> None:
    store = tmp_path / "store"

    def work() -> None:
        die_at(point)
        ingest(pristine.path, pristine.trusted, store)

    assert in_child(work) in (0, -signal.SIGKILL)
    for digest in visible(store):
        verify_model(store, digest, pristine.trusted, deep=True)
    ingest(pristine.path, pristine.trusted, store)
    good(pristine, store)


def test_a_resumed_ingest_copies_only_what_is_missing(pristine: Made, tmp_path: Path) -> None:
    store = tmp_path / "store"
    stop_after(pristine, store, chunks=8)
    files = {f.path: f for f in manifest_of(pristine.path).files}
    journal = next(store.glob(".*.journal")).read_text().split("\n")
    there = [record for line in journal if line and "chunk" in (record := json.loads(line))]
    held = sum(min(CHUNK, files[r["path"]].size - CHUNK * r["chunk"]) for r in there)
    seen: list[tuple[str, int, int]] = []
    found = ingest(pristine.path, pristine.trusted, store, progress=lambda *a: seen.append(a))
    assert len(there) >= 8
    assert found.copied_bytes == found.manifest.total_bytes - held
    assert ("copy", held, found.manifest.total_bytes) in seen, "the bar goes on where it stopped"
    good(pristine, store)


def test_leftovers_are_hashed_again(pristine: Made, tmp_path: Path) -> None:
    store = tmp_path / "store"
    partial = stop_after(pristine, store, chunks=7)
    weights = next(p for p in partial.rglob("*.safetensors") if p.stat().st_mode & 0o200)
    before = weights.stat()
    with weights.open("r+b") as f:
        f.seek(10)
        byte = f.read(1)
        f.seek(10)
        f.write(bytes([byte[0] ^ 1]))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    ingest(pristine.path, pristine.trusted, store)
    good(pristine, store)


def test_a_finished_file_that_was_touched_is_hashed_again(pristine: Made, tmp_path: Path) -> None:
    """Same size, same modification time, same inode: only the change time gives the forgery away."""
    store = tmp_path / "store"

    def work() -> None:
        real, seen = ingest_module._Ingest._publish, []

        def die(self: Any) -> None:
            seen.append(real)
            os.kill(os.getpid(), signal.SIGKILL)

        ingest_module._Ingest._publish = die
        ingest(pristine.path, pristine.trusted, store)

    assert in_child(work) == -signal.SIGKILL
    target = next(store.glob(".*.partial")) / SHARD
    before = target.stat()
    os.chmod(target, 0o600)
    with target.open("r+b") as f:
        f.seek(-1, os.SEEK_END)
        byte = f.read(1)
        f.seek(-1, os.SEEK_END)
        f.write(bytes([byte[0] ^ 1]))
    os.chmod(target, 0o444)
    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = target.stat()
    assert (before.st_size, before.st_mtime_ns, before.st_ino) == (after.st_size, after.st_mtime_ns, after.st_ino)
    found = ingest(pristine.path, pristine.trusted, store)
    assert 0 < found.copied_bytes <= 65536
    good(pristine, store)


def test_a_lying_or_torn_journal_only_costs_time(pristine: Made, tmp_path: Path) -> None:
    store = tmp_path / "store"
    stop_after(pristine, store, chunks=2)
    journal = next(store.glob(".*.journal"))
    lies = [{"path": SHARD, "chunk": i} for i in range(4)] + [{"path": SHARD, "stamp": [1, 2, 3, 4, 5, 6]}]
    junk = b'\n{"path": 5}\n[]\nnull\n\xff\xff\n{"path":"x","chunk":"y"}\n{"path":"' + SHARD.encode()
    journal.write_bytes(journal.read_bytes() + "\n".join(map(json.dumps, lies)).encode() + junk)
    ingest(pristine.path, pristine.trusted, store)
    good(pristine, store)


def test_strange_things_in_the_staging_directory_are_not_kept(pristine: Made, tmp_path: Path) -> None:
    store = tmp_path / "store"
    partial = stop_after(pristine, store, chunks=3)
    (partial / "model/planted.json").write_text("{}")
    ingest(pristine.path, pristine.trusted, store)
    good(pristine, store)


def test_a_link_in_the_staging_directory_is_not_written_through(pristine: Made, tmp_path: Path) -> None:
    store = tmp_path / "store"
    partial = stop_after(pristine, store, chunks=3)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (partial / "model/config.json").unlink()
    (partial / "model/config.json").symlink_to(victim)
    ingest(pristine.path, pristine.trusted, store)
    good(pristine, store)
    assert victim.read_text() == "precious"


def test_a_medium_that_changes_after_the_check_cannot_reach_the_store(made: Made, tmp_path: Path) -> None:
    def corrupt(*_: object) -> None:
        with (made.path / SHARD).open("r+b") as f:
            f.seek(100_000)
            f.write(b"\0" * 64)

    store = tmp_path / "store"
    refused(11, SHARD, lambda: ingest(made.path, made.trusted, store, progress=corrupt))
    assert visible(store) == []


def test_good_chunks_survive_a_bad_one(made: Made, tmp_path: Path) -> None:
    """After a damaged copy, a second medium with the same bundle completes the ingest."""
    store = tmp_path / "store"
    shard = made.path / SHARD
    right = shard.read_bytes()
    shard.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    refused(11, SHARD, lambda: ingest(made.path, made.trusted, store))
    shard.write_bytes(right)
    ingest(made.path, made.trusted, store)
    good(made, store)


def test_a_damaged_entry_is_noticed_and_replaced(pristine: Made, tmp_path: Path) -> None:
    store = tmp_path / "store"
    found = ingest(pristine.path, pristine.trusted, store)
    target = found.path / SHARD
    os.chmod(target, 0o644)
    with target.open("r+b") as f:
        f.write(b"\xff")
    os.chmod(target, 0o444)
    quick = lambda: verify_model(store, found.digest, pristine.trusted, deep=False)  # noqa: E731
    refused(11, "changed after the last verification", quick)
    refused(11, SHARD, lambda: verify_model(store, found.digest, pristine.trusted, deep=True))
    assert ingest(pristine.path, pristine.trusted, store).copied_bytes > 0
    good(pristine, store)


def test_an_entry_that_was_only_touched_is_hashed_and_kept(pristine: Made, tmp_path: Path) -> None:
    store = tmp_path / "store"
    found = ingest(pristine.path, pristine.trusted, store)
    os.chmod(found.path / SHARD, 0o644)
    refused(11, "writable", lambda: verify_model(store, found.digest, pristine.trusted, deep=True))
    assert ingest(pristine.path, pristine.trusted, store).copied_bytes == 0
    good(pristine, store)


def test_two_bundles_list_and_remove(pristine: Made, vendor: KeyPair, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert list_models(store) == []
    newer = build(make_model(tmp_path / "m", kib=1), tmp_path / "o", vendor, version="1.1.0", sequence=6)
    second = ingest(newer, pristine.trusted, store)
    first = ingest(pristine.path, pristine.trusted, store)
    assert [m.manifest.version for m in list_models(store)] == ["1.0.0", "1.1.0"]
    remove_model(store, first.digest)
    assert [m.digest for m in list_models(store)] == [second.digest]
    refused(13, "no model", lambda: remove_model(store, first.digest))
    refused(2, "hexadecimal", lambda: remove_model(store, "../x"))
    good(pristine, store)


def test_one_ingest_at_a_time(pristine: Made, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with locked(store):
        refused(75, "another process", lambda: ingest(pristine.path, pristine.trusted, store))
    ingest(pristine.path, pristine.trusted, store)


def test_a_store_that_anybody_may_write_to_is_refused(pristine: Made, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    store.chmod(0o777)
    refused(30, "chmod o-w", lambda: ingest(pristine.path, pristine.trusted, store))


def test_interrupt_stops_promptly_and_resumes(pristine: Made, tmp_path: Path) -> None:
    store = tmp_path / "store"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest(pristine.path, pristine.trusted, store, progress=interrupt)
    assert visible(store) == []
    ingest(pristine.path, pristine.trusted, store)
    good(pristine, store)


def test_a_file_size_limit_ends_in_a_clear_error_and_can_be_resumed(pristine: Made, tmp_path: Path) -> None:
    store = tmp_path / "store"

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        ingest(pristine.path, pristine.trusted, store)

    assert in_child(work) == 30
    assert visible(store) == []
    ingest(pristine.path, pristine.trusted, store)
    good(pristine, store)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; remount it to make room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_too_little_space_is_said_before_anything_is_copied(pristine: Made, small_disk: Path) -> None:
    error = refused(30, "bytes free", lambda: ingest(pristine.path, pristine.trusted, small_disk / "store"))
    assert "remove a model" in error.hint


def test_a_disk_that_fills_up_underway(pristine: Made, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = small_disk / "store"
    monkeypatch.setattr(ingest_module, "_SPACE_SLACK", -(1 << 40))
    error = refused(30, "No space left", lambda: ingest(pristine.path, pristine.trusted, store))
    assert "run the same command again" in error.hint
    assert visible(store) == []
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    monkeypatch.undo()
    found = ingest(pristine.path, pristine.trusted, store)
    assert found.copied_bytes < found.manifest.total_bytes
    good(pristine, store)


def test_leftovers_of_another_bundle_make_room(
    pristine: Made, vendor: KeyPair, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = small_disk / "store"
    other = Made(build(make_model(tmp_path / "m", seed=1), tmp_path / "o", vendor), vendor, tmp_path)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    partial = stop_after(other, store, chunks=9)
    info = os.statvfs(store)
    used = (info.f_blocks - info.f_bfree) * info.f_frsize
    subprocess.run(["mount", "-o", f"remount,size={used + 350_000}", str(small_disk)], check=True)
    monkeypatch.setattr(ingest_module, "_SPACE_SLACK", 0)
    ingest(pristine.path, pristine.trusted, store)
    assert not partial.exists()
    good(pristine, store)


def test_refused_content_leaves_nothing_even_after_a_resume(made: Made, tmp_path: Path) -> None:
    forge(made, {"model/config.json": (b'{"auto_map":{}}', "config")})
    store = tmp_path / "store"
    stop_after(made, store, chunks=1)
    refused(11, "auto_map", lambda: ingest(made.path, made.trusted, store))
    assert [p.name for p in store.iterdir()] == [".lock"]


def stop_after(made: Made, store: Path, *, chunks: int) -> Path:
    """Kill an ingest after so many chunks are in the journal; returns the staging directory."""

    def work() -> None:
        journal = sys.modules["offline_bundle.store.journal"].Journal
        real, count = journal.chunk_written, 0

        def counted(self: Any, path: str, index: int) -> None:
            nonlocal count
            real(self, path, index)
            count += 1
            if count == chunks:
                os.kill(os.getpid(), signal.SIGKILL)

        journal.chunk_written = counted
        ingest(made.path, made.trusted, store)

    assert in_child(work) == -signal.SIGKILL
    return next(store.glob(".*.partial"))
