"""The journal and the audit log: what a crash, a full disk or an editor can do to them."""

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from installer.audit import log
from installer.base.errors import InstallError
from installer.base.journal import History, Journal, repair, replay


def write(path: Path, count: int = 3) -> list[dict]:
    journal = Journal("run-1")
    journal.open(path)
    for number in range(count):
        journal.add("begin", step=f"step-{number}", text="한글 ✓")
    journal.close()
    return journal.records


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    records = write(tmp_path / "j")
    found = replay(tmp_path / "j")
    assert found.records == records
    assert (found.torn_bytes, found.damaged_lines) == (0, [])
    assert [record["n"] for record in records] == [1, 2, 3]


def test_nothing_is_written_before_it_has_a_file(tmp_path: Path) -> None:
    journal = Journal("run-1")
    journal.add("begin", step="discover")
    assert not (tmp_path / "j").exists()
    journal.open(tmp_path / "j")
    assert [record["step"] for record in replay(tmp_path / "j").records] == ["discover"]


def test_every_possible_tear_of_the_last_line_loses_only_that_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    records = write(path)
    whole = path.read_bytes()
    last = len(whole) - len(whole.splitlines(keepends=True)[-1])
    for length in range(last, len(whole)):
        path.write_bytes(whole[:length])
        found = replay(path)
        assert found.records == records[:2]
        assert found.damaged_lines == []
        journal = Journal("run-2", found.records)
        assert journal.open(path) is None
        journal.add("begin", step="after")
        journal.close()
        assert [record["n"] for record in replay(path).records] == [1, 2, 3]


def test_a_last_line_of_zeros_counts_as_torn(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path)
    with path.open("ab") as file:
        file.write(b"\0" * 50 + b"\n")
    found = replay(path)
    assert len(found.records) == 3
    assert found.torn_bytes == 51
    Journal("run-2", found.records).open(path)
    assert replay(path).torn_bytes == 0


@given(position=st.integers(min_value=0), flip=st.integers(1, 255))
def test_a_flipped_byte_never_becomes_a_record(
    tmp_path_factory: pytest.TempPathFactory, position: int, flip: int
) -> None:
    path = tmp_path_factory.mktemp("j") / "j"
    records = write(path)
    data = bytearray(path.read_bytes())
    position %= len(data)
    data[position] ^= flip
    path.write_bytes(data)
    assert all(record in records for record in replay(path).records)


def test_damage_is_refused_and_set_aside_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = lines[0] + b'{"n": 2, "event": "commit", "sum": "0"}\n' + lines[2]
    path.write_bytes(damaged)
    found = replay(path)
    assert found.damaged_lines == [2]
    with pytest.raises(InstallError, match="damaged at line 2"):
        Journal("run-2", found.records).open(path)
    assert path.read_bytes() == damaged
    note = repair(path)
    assert note is not None
    assert "line 2" in note
    aside = list(tmp_path.glob("journal.damaged-*.jsonl"))
    assert [copy.read_bytes() for copy in aside] == [damaged]
    assert [record["n"] for record in replay(path).records] == [1, 3]


def test_a_record_that_cannot_be_written_was_never_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal("run-1")
    journal.open(path)
    journal.add("switch")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            journal.add("commit")
    assert [record["event"] for record in journal.records] == ["switch"]
    journal.add("rolled-back")
    journal.close()
    assert replay(path).records == journal.records
    assert [(record["n"], record["event"]) for record in journal.records] == [(1, "switch"), (2, "rolled-back")]


def test_history_knows_what_stands_and_what_is_open() -> None:
    def after(*records: dict) -> History:
        return History([{"at": "now", **record} for record in records])

    one, two = {"event": "commit", "release": "one"}, {"event": "commit", "release": "two"}
    switch = {"event": "switch", "previous": "one", "had_config": True, "was_running": True}
    assert after(one).committed["release"] == "one"  # type: ignore[index]
    half = after(one, switch, {"event": "begin", "step": "start"})
    assert half.open_switch is not None
    assert half.last_step == "start"
    assert half.committed["release"] == "one"  # type: ignore[index]
    assert after(one, switch, {**switch, "previous": "wrong"}).open_switch["previous"] == "one"  # type: ignore[index]
    assert after(one, switch, two).open_switch is None
    assert after(one, switch, {"event": "rolled-back"}).open_switch is None
    assert after(one, {"event": "uninstalled"}).committed is None
    made = [{"event": "key-created", "key": key} for key in "ab"]
    assert after(*made, {"event": "key-shown", "key": "a"}).unshown_keys == {"b"}


def test_audit_chain_shows_every_change(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for number in range(4):
        log.append(path, "event", number=number)
    records, wrong = log.read(path)
    assert wrong is None
    assert [record["number"] for record in records] == [0, 1, 2, 3]
    lines = path.read_bytes().splitlines(keepends=True)
    edited = json.dumps({**json.loads(lines[1]), "number": 9}).encode() + b"\n"
    for changed in ([lines[0], edited, *lines[2:]], [lines[0], *lines[2:]], [lines[1], lines[0], *lines[2:]]):
        path.write_bytes(b"".join(changed))
        assert log.read(path)[1] is not None
        log.append(path, "after")  # goes on, and does not heal the break
        assert log.read(path)[1] is not None


def test_audit_drops_a_torn_line_only(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log.append(path, "one")
    with path.open("ab") as file:
        file.write(b'{"at": "half')
    log.append(path, "two")
    records, wrong = log.read(path)
    assert wrong is None
    assert [record["event"] for record in records] == ["one", "two"]
