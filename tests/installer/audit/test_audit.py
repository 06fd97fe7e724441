"""The audit log against somebody who edits, cuts or replaces its file: its chain and the heads kept elsewhere expose
it."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from installer.audit import anchor, check
from installer.audit import log as audit_log
from installer.audit.head import GENESIS, Head
from installer.base.errors import InstallError

EVENTS = ["one", "two", "three", "four", "five", "six"]


def log(directory: Path, count: int = 6) -> tuple[Path, list[Head]]:
    path = directory / "audit.jsonl"
    path.unlink(missing_ok=True)
    return path, [audit_log.append(path, event, number=number) for number, event in enumerate(EVENTS[:count])]


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def forged(path: Path, start: int, **change: Any) -> None:
    """A sound chain with other content from line `start` on, as somebody who knows the format could make it."""
    records = [json.loads(line) for line in lines_of(path)]
    previous = records[start - 1]["hash"] if start else GENESIS
    for number, record in enumerate(records[start:], start):
        record |= {"prev": previous, **(change if number == start else {})}
        record["hash"] = previous = audit_log._hash(record)
    path.write_bytes(b"".join(audit_log._text(record) + b"\n" for record in records))


def test_a_whole_log_is_intact(tmp_path: Path) -> None:
    path, heads = log(tmp_path)
    verdict = check.check(path, heads)
    assert (verdict.state, verdict.entries, verdict.exit_code, verdict.unanchored) == ("intact", 6, 0, 0)
    assert verdict.head == heads[-1] == audit_log.head(path)
    assert check.check(path, heads[:4]).unanchored == 2


def rewrite(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(b"".join(change(lines_of(path))))


CHANGES: dict[str, tuple[Callable[[Path], object], str, int | None]] = {
    "cut by one": (rewrite(lambda lines: lines[:-1]), "cut", 6),
    "cut to nothing": (rewrite(lambda lines: []), "cut", 1),
    "cut inside the last line": (lambda path: os.truncate(path, path.stat().st_size - 9), "cut", 6),
    "a value edited": (
        rewrite(lambda lines: [*lines[:2], lines[2].replace(b"three", b"threE"), *lines[3:]]), "edited", 3),
    "another spelling": (rewrite(lambda lines: [lines[0].replace(b": ", b":", 1), *lines[1:]]), "edited", 1),
    "two fields of one name": (
        rewrite(lambda lines: [lines[0].replace(b"{", b'{"event": "x", ', 1), *lines[1:]]), "edited", 1),
    "two swapped": (rewrite(lambda lines: [lines[0], lines[2], lines[1], *lines[3:]]), "reordered", 2),
    "one removed": (rewrite(lambda lines: [*lines[:3], *lines[4:]]), "reordered", 4),
    "one twice": (rewrite(lambda lines: [*lines[:3], lines[2], *lines[3:]]), "reordered", 4),
    "a sound chain, edited": (lambda path: forged(path, 3, event="x"), "rewritten", 4),
    "a sound chain from the first on": (lambda path: forged(path, 0, event="x"), "rewritten", 1),
    "gone": (Path.unlink, "missing", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_named(name: str, tmp_path: Path) -> None:
    path, heads = log(tmp_path)
    change, state, at = CHANGES[name]
    change(path)
    verdict = check.check(path, heads)
    assert (verdict.state, verdict.at) == (state, at)
    assert verdict.exit_code == (13 if state == "missing" else 11)
    assert verdict.message
    assert verdict.next
    if state in ("cut", "rewritten", "missing"):  # then the chain alone says nothing
        assert check.check(path).state == "intact"


def test_entries_added_after_a_cut_do_not_hide_it(tmp_path: Path) -> None:
    path, heads = log(tmp_path)
    os.truncate(path, sum(len(line) for line in lines_of(path)[:3]))
    for event in EVENTS:
        audit_log.append(path, event)
    verdict = check.check(path, heads)
    assert (verdict.state, verdict.at) == ("rewritten", 4)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_single_change_goes_unseen_given_the_last_head(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Any byte changed, any range removed or repeated, any line forged together with all that follow it."""
    path, heads = log(tmp_path_factory.getbasetemp(), data.draw(st.integers(1, 6)))
    whole = path.read_bytes()
    kind = data.draw(st.sampled_from(["byte", "remove", "repeat", "forge"]))
    if kind == "forge":
        forged(path, data.draw(st.integers(0, len(heads) - 1)), event="x")
    else:
        start = data.draw(st.integers(0, len(whole) - 1))
        end = data.draw(st.integers(start + 1, len(whole)))
        piece = whole[start:end]
        if kind == "byte":
            end, piece = start + 1, bytes([data.draw(st.integers(0, 255))])
        elif kind == "remove":
            piece = b""
        else:
            piece = piece * 2
        path.write_bytes(whole[:start] + piece + whole[end:])
    assume(path.read_bytes() != whole)
    verdict = check.check(path, heads[-1:])
    if verdict.exit_code == 0:  # every entry stands as it was; only something unfinished hangs behind the last
        assert path.read_bytes().startswith(whole)
        assert verdict.torn_bytes


def test_a_torn_line_is_no_damage_and_goes_with_the_next_entry(tmp_path: Path) -> None:
    path, heads = log(tmp_path)
    with path.open("ab") as file:
        file.write(b'{"at": "half')
    verdict = check.check(path, heads)
    assert (verdict.state, verdict.torn_bytes) == ("intact", 12)
    head = audit_log.append(path, "seven")
    assert head.count == 7
    assert check.check(path, [*heads, head]).torn_bytes == 0


def test_names_that_are_no_utf8_do_not_stop_an_entry(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit_log.append(path, "certificate-imported", file=os.fsdecode(b"/media/\xff.pem"))
    audit_log.append(path, "line\u2028separator")
    assert audit_log.head(path).count == 2
    assert check.check(path).state == "intact"


@pytest.mark.parametrize(
    "text", ["", "3f9a", "3f9a61c0d2e4b58:1", "g" * 16 + ":1", "3f9a61c0d2e4b587", "3f9a61c0d2e4b587:x"]
)
def test_what_is_no_head_is_refused(text: str) -> None:
    with pytest.raises(InstallError) as caught:
        check.parse_head(text)
    assert caught.value.exit_code == 2


def test_a_head_on_paper_may_be_shortened_and_grouped(tmp_path: Path) -> None:
    path, heads = log(tmp_path)
    digits = heads[3].hash[:16].upper()
    written = check.parse_head(f"{digits[:4]} {digits[4:8]} {digits[8:]}:4")
    assert check.check(path, [written]).state == "intact"
    assert check.check(path, [Head(4, "0" * 16)]).state == "rewritten"


# -- journald ---------------------------------------------------------------------------------------------------------


def fields(datagram: bytes) -> dict[str, str]:
    """journald's native protocol, read back."""
    found = {}
    while datagram:
        name, _, rest = datagram.partition(b"\n")
        length = int.from_bytes(rest[:8], "little")
        found[name.decode()] = rest[8 : 8 + length].decode()
        assert rest[8 + length : 9 + length] == b"\n"
        datagram = rest[9 + length :]
    return found


def test_each_entry_sends_the_head_to_journald(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(str(tmp_path / "socket"))
    receiver.settimeout(5)
    monkeypatch.setattr(anchor, "SOCKET", tmp_path / "socket")
    path, heads = log(tmp_path, 2)
    for head in heads:
        sent = fields(receiver.recv(65536))
        assert (sent["ATOLL_AUDIT_COUNT"], sent["ATOLL_AUDIT_HEAD"]) == (str(head.count), head.hash)
        assert sent["ATOLL_AUDIT_PATH"] == str(path)
        assert sent["MESSAGE_ID"] == anchor.MESSAGE_ID
    receiver.close()


def test_without_journald_entries_are_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchor, "SOCKET", tmp_path / "nothing")
    monkeypatch.setattr(anchor, "JOURNALCTL", str(tmp_path / "no-journalctl"))
    path, heads = log(tmp_path)
    assert audit_log.head(path) == heads[-1]
    assert anchor.sent(path) is None


def test_anchors_are_read_from_the_end_of_a_purge_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What journalctl prints; that the real one prints it is shown on a machine that boots (tests/boot)."""
    path, _ = log(tmp_path, 1)
    counts = [(1, "a"), (2, "b"), (0, GENESIS), (1, "c"), ("odd", "d")]
    printed = [json.dumps({"ATOLL_AUDIT_COUNT": str(count), "ATOLL_AUDIT_HEAD": head}) for count, head in counts]
    (tmp_path / "out").write_text("\n".join(printed) + "\n")
    tool = tmp_path / "journalctl"
    tool.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/asked\ncat {tmp_path}/out\n')
    tool.chmod(0o755)
    monkeypatch.setattr(anchor, "JOURNALCTL", str(tool))
    assert anchor.sent(path) == [Head(1, "c")]
    asked = (tmp_path / "asked").read_text().split()
    assert {f"_UID={os.getuid()}", f"ATOLL_AUDIT_PATH={path}"} <= set(asked)


def test_several_writers_at_once_make_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    heads: list[Head] = []
    writers = [threading.Thread(target=lambda: heads.extend(audit_log.append(path, "x") for _ in range(20)))
               for _ in range(4)]  # fmt: skip
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert check.check(path, heads).state == "intact"
    assert sorted(head.count for head in heads) == list(range(1, 81))


# -- the command ------------------------------------------------------------------------------------------------------


def atoll(prefix: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "appliance.cli", "audit", *words, "--prefix", str(prefix)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "LANG": "C.UTF-8"})


def test_the_command(tmp_path: Path) -> None:
    assert atoll(tmp_path, "verify").returncode == 2  # nothing is installed
    state = tmp_path / "var/lib/atoll/state"
    state.mkdir(parents=True)
    path, heads = log(state)
    shown = atoll(tmp_path, "show")
    assert shown.returncode == 0, shown.stderr
    assert "write this down: " + str(heads[-1]) in shown.stdout
    assert "head: 6 entries" in shown.stdout
    assert len(json.loads(atoll(tmp_path, "show", "--json", "--since", "1h").stdout)["entries"]) == 6
    assert json.loads(atoll(tmp_path, "show", "--json", "--since", "2090-01-01").stdout)["entries"] == []
    assert atoll(tmp_path, "show", "--since", "soon").returncode == 2
    good = atoll(tmp_path, "verify", "--head", str(heads[-1]))
    assert good.returncode == 0, good.stdout + good.stderr
    assert "is whole: 6 entries" in good.stdout
    rewrite(lambda lines: lines[:4])(path)
    alone = atoll(tmp_path, "verify", "--json")
    assert (alone.returncode, json.loads(alone.stdout)["state"]) == (0, "intact")  # the chain cannot tell
    cut = atoll(tmp_path, "verify", "--head", str(heads[-1]))
    assert cut.returncode == 11
    assert "cut short: it has 4 entries, and had 6" in cut.stdout
