"""Whether the audit log is the one that was written: checks its chain, and heads of it that were kept elsewhere."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from installer.audit import log
from installer.audit.head import GENESIS, Head
from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t

_HEAD = re.compile(r"([0-9a-fA-F]{16,64}):([0-9]{1,9})\Z")
MIN_DIGITS = 16

State = Literal["intact", "edited", "reordered", "cut", "rewritten", "missing"]


@dataclass(slots=True)
class Verdict:
    """`entries`: number of good ones, from the first on. `at`: the first bad line. `anchors`: number that were
    compared."""

    state: State
    entries: int
    head: Head
    at: int | None = None
    torn_bytes: int = 0
    anchors: int = 0
    message: str = ""
    next: str = ""
    unanchored: int = field(default=0)  # newest entries that no anchor covers

    @property
    def exit_code(self) -> int:
        return {"intact": 0, "missing": int(ExitCode.MEDIA)}.get(self.state, int(ExitCode.CONTENT_MISMATCH))

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": 1, **asdict(self), "exit_code": self.exit_code}


def parse_head(text: str) -> Head:
    """A head as a person wrote it down: HASH:COUNT, with at least 16 digits of the hash. Raises InstallError (2)."""
    match = _HEAD.match("".join(text.split()))
    if match is None:
        raise InstallError(
            t("'{text}' is not the head of an audit log.", text=text[:80]),
            exit_code=ExitCode.USAGE, changed=t("Nothing was changed."),
            hint=t("Give it as `atoll audit show` printed it, at least {digits} digits: --head HASH:COUNT",
                   digits=MIN_DIGITS),
        )
    return Head(int(match[2]), match[1].lower())


def check(path: Path, anchors: Sequence[Head] = ()) -> Verdict:
    """Check the log against its own chain and against `anchors`, heads that it once had. Raises OSError."""
    records, broken = log.chain(path)
    hashes = [record["hash"] for record in records]
    verdict = Verdict("intact", len(records), Head(len(hashes), hashes[-1] if hashes else GENESIS),
                      torn_bytes=_torn(path), anchors=len(anchors))  # fmt: skip
    newest = max((anchor.count for anchor in anchors), default=0)
    verdict.unanchored = max(len(records) - newest, 0)
    if broken is not None:
        return _broken(path, verdict, broken)
    if newest and not path.exists():
        return _found(verdict, "missing", None, t("The audit log {path} is missing; it had {count} entries.", path=path,
                                                  count=newest))
    for anchor in sorted(anchors, key=lambda anchor: anchor.count):
        if anchor.count > len(hashes):
            message = t("The audit log was cut short: it has {found} entries, and had {count}.", found=len(hashes),
                        count=newest)
            return _found(verdict, "cut", len(hashes) + 1, message)
        there = hashes[anchor.count - 1] if anchor.count else GENESIS
        if not there.startswith(anchor.hash):
            message = t("The audit log was rewritten: entry {count} is not the one that was there when its head was "
                        "kept.", count=anchor.count)
            return _found(verdict, "rewritten", anchor.count, message)
    return verdict


def _broken(path: Path, verdict: Verdict, number: int) -> Verdict:
    """An edited line does not match its own hash. A line that does, but follows the wrong line, was moved, or lines
    before it were removed or added."""
    record = log.parse(fs.read_regular(path, log.MAX_LOG)[0].split(b"\n")[number - 1])
    if record is None:
        return _found(verdict, "edited", number, t("Entry {number} of the audit log was edited.", number=number))
    return _found(verdict, "reordered", number, t("Entry {number} of the audit log does not follow the one before it: "
                                                  "entries were moved, removed or added.", number=number))


def _found(verdict: Verdict, state: State, at: int | None, message: str) -> Verdict:
    verdict.state, verdict.at, verdict.message = state, at, message
    verdict.next = t("Keep the disk and the journal for the investigation. Entries before that one are still valid: "
                     "atoll audit show")
    return verdict


def _torn(path: Path) -> int:
    """Bytes after the last complete line, left by a power cut."""
    try:
        data = fs.read_regular(path, log.MAX_LOG)[0]
    except FileNotFoundError:
        return 0
    return len(data) - (data.rfind(b"\n") + 1)
